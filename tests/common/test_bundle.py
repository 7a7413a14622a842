"""Layout, packing, hashes and checks of bundles, and their way over the wire."""

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
from dvla.v1.common_pb2 import Version
from hypothesis import given
from hypothesis import strategies as st

from services.common import bundle as b
from services.common.bundle_wire import manifest_from_proto, manifest_to_proto, version_from_proto, version_to_proto
from services.common.errors import InvalidInput
from services.common.spec import Array

NAMES = st.text(min_size=1, max_size=12)
SHAPES = st.lists(st.integers(0, 5), max_size=4).map(tuple)
SPECS = st.dictionaries(NAMES, st.tuples(st.sampled_from(sorted(b.DTYPES)), SHAPES), max_size=8)


def arrays_of(specs: dict[str, tuple[str, tuple[int, ...]]], seed: int) -> tuple[dict[str, Array], dict[str, str]]:
    rng = np.random.default_rng(seed)
    arrays: dict[str, Array] = {}
    for name, (dtype, shape) in specs.items():
        raw = np.dtype(b.DTYPES[dtype])
        high = 2 if dtype == "bool" else 256
        count = int(np.prod(shape)) * raw.itemsize
        arrays[name] = rng.integers(0, high, count, np.uint8).view(raw).reshape(shape)
    return arrays, {name: dtype for name, (dtype, _) in specs.items()}


def example() -> tuple[b.Manifest, npt.NDArray[np.uint8]]:
    arrays: dict[str, Array] = {
        "a": np.arange(6, dtype=np.float32).reshape(2, 3),
        "b": np.full(300, 7, np.uint16),
        "c": np.zeros(0),
    }
    return b.bundle("policy", b.Version(1, 4), arrays, {"b": "bfloat16"}, {"policy": "{}"})


@given(SPECS, st.integers(0, 2**32))
def test_pack_then_view_gives_equal_arrays(specs: dict[str, tuple[str, tuple[int, ...]]], seed: int) -> None:
    arrays, dtypes = arrays_of(specs, seed)
    manifest, buffer = b.bundle("m", b.Version(1, 0), arrays, dtypes)
    b.check(manifest)
    b.verify(manifest, buffer)
    back = b.views(manifest.layout, buffer)
    b.verify_arrays(manifest, back)
    assert back.keys() == arrays.keys()
    for name, array in arrays.items():
        assert back[name].shape == array.shape
        assert back[name].tobytes() == array.tobytes()
    ends = 0
    for tensor in manifest.layout.tensors:
        assert tensor.offset % b.ALIGNMENT == 0
        assert tensor.offset >= ends
        ends = tensor.offset + tensor.length
    assert manifest_from_proto(manifest_to_proto(manifest)) == manifest


@given(SPECS, st.data())
def test_one_flipped_byte_names_its_tensor(specs: dict[str, tuple[str, tuple[int, ...]]], data: st.DataObject) -> None:
    arrays, dtypes = arrays_of(specs, 1)
    manifest, buffer = b.bundle("m", b.Version(1, 0), arrays, dtypes)
    filled = [t for t in manifest.layout.tensors if t.length]
    if not filled:
        return
    victim = data.draw(st.sampled_from(filled))
    buffer[victim.offset + data.draw(st.integers(0, victim.length - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(InvalidInput) as caught:
        b.verify(manifest, buffer)
    assert str(caught.value).startswith(f"tensor {victim} ")
    with pytest.raises(InvalidInput):
        b.verify_arrays(manifest, b.views(manifest.layout, buffer))


def test_padding_is_zero_whatever_the_buffer_held() -> None:
    layout = b.plan([("a", "uint8", (3,)), ("b", "uint8", (1,))])
    buffer = np.full(layout.length, 0xEE, np.uint8)
    b.pack(layout, {"a": np.ones(3, np.uint8), "b": np.ones(1, np.uint8)}, buffer)
    assert buffer.sum() == 4


def test_tied_tensors_are_stored_once_and_seen_under_all_names() -> None:
    shared = np.arange(100, dtype=np.float32)
    arrays = {"embed": shared, "other": shared.copy(), "head": shared, "empty": shared[:0], "empty2": shared[:0]}
    manifest, buffer = b.bundle("m", b.Version(1, 0), arrays)
    assert [t.name for t in manifest.layout.tensors] == ["embed", "other", "empty", "empty2"]
    assert dict(manifest.layout.tied) == {"head": "embed"}
    back = b.views(manifest_from_proto(manifest_to_proto(manifest)).layout, buffer)
    assert np.shares_memory(back["head"], back["embed"])
    assert np.array_equal(back["head"], shared)


def test_a_part_of_a_tensor_is_not_tied_to_it() -> None:
    whole = np.arange(10, dtype=np.float32)
    layout = b.describe({"whole": whole, "half": whole[:5], "transposed": whole.reshape(2, 5).T})
    assert not layout.tied


def test_non_contiguous_arrays_are_packed_in_c_order() -> None:
    matrix = np.arange(12, dtype=np.int32).reshape(3, 4).T
    manifest, buffer = b.bundle("m", b.Version(1, 0), {"t": matrix})
    assert np.array_equal(b.views(manifest.layout, buffer)["t"], matrix)
    b.verify_arrays(manifest, {"t": matrix})


def test_views_are_read_only_unless_asked() -> None:
    manifest, buffer = example()
    with pytest.raises(ValueError, match="read-only"):
        b.views(manifest.layout, buffer)["a"][0, 0] = 1
    b.views(manifest.layout, buffer, writable=True)["a"][0, 0] = 9
    assert buffer[:4].view(np.float32)[0] == 9


def test_versions_are_ordered_by_epoch_then_update() -> None:
    assert b.Version(1, 37) < b.Version(2, 31) < b.Version(2, 32)
    assert str(b.Version(2, 31)) == "2-31"
    assert version_from_proto(version_to_proto(b.Version(2, 31)) or Version()) == b.Version(2, 31)
    assert version_to_proto(None) is None
    assert version_from_proto(Version()) is None


@pytest.mark.parametrize(
    ("specs", "words"),
    [
        ([("a", "float31", (1,))], "'a' has dtype 'float31'"),
        ([("a", "object", (1,))], "'a' has dtype 'object'"),
        ([("a", "int8", (-1,))], "'a' has shape"),
        ([("a", "int8", (1,) * 17)], "'a' has shape"),
        ([("a", "int8", (2**40, 2**40, 0))], "'a' has shape"),
        ([("a", "int8", (1,)), ("a", "int8", (1,))], "'a' is listed twice"),
    ],
)
def test_impossible_tensors_are_refused_by_name(specs: list[tuple[str, str, tuple[int, ...]]], words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        b.plan(specs)


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({}, "missing"),
        ({"a": np.zeros(2, np.float32), "x": np.zeros(1)}, "unexpected"),
        ({"a": np.zeros(3, np.float32)}, r"'a' float32\[2\] is given as float32\[3\]"),
        ({"a": np.zeros(2, np.float64)}, "given as float64"),
    ],
)
def test_packing_what_does_not_fit_is_refused(arrays: dict[str, Array], words: str) -> None:
    layout = b.plan([("a", "float32", (2,))])
    with pytest.raises(InvalidInput, match=words):
        b.pack(layout, arrays, np.empty(layout.length, np.uint8))


def test_short_buffers_are_refused() -> None:
    manifest, buffer = example()
    for use in (b.verify, lambda m, short: b.views(m.layout, short)):
        with pytest.raises(InvalidInput, match="expected at least"):
            use(manifest, buffer[:-1])


@pytest.mark.parametrize("shift", [-256, -1, 1, 256, 2**40])
def test_offsets_other_than_the_canonical_are_refused(shift: int) -> None:
    manifest, _ = example()
    first, second, third = manifest.layout.tensors
    moved = replace(second, offset=second.offset + shift)
    with pytest.raises(InvalidInput, match="'b'"):
        b.check(replace(manifest, layout=b.Layout((first, moved, third), manifest.length)))


def test_the_wire_form_is_checked() -> None:
    manifest, _ = example()
    good = manifest_to_proto(manifest)

    def broken(words: str, version: Version = good.version, tied: str = "", **fields: int) -> None:
        message = type(good)()
        message.CopyFrom(good)
        message.version.CopyFrom(version)
        if tied:
            message.metadata["tied"] = tied
        for name, value in fields.items():
            setattr(message, name, value)
        with pytest.raises(InvalidInput, match=words):
            manifest_from_proto(message)

    broken("layout hash", layout=good.layout ^ 1)
    broken("has length", length=good.length + 256)
    for tied in ("[", "[" * 100_000):
        broken("not JSON", tied=tied)
    for tied in ('{"x": 1}', "[]"):
        broken("not an object of names", tied=tied)
    for tied in ('{"x": "nobody"}', '{"a": "b"}'):
        broken("is tied to", tied=tied)
    broken("epoch of 1 or more", Version(epoch=0, update=3))
