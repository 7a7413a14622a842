"""Tensors survive the wire bit by bit, and nothing malformed gets in."""

import numpy as np
import numpy.typing as npt
import pytest
import xxhash
from dvla.v1 import common_pb2 as pb
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from services.common import codec
from services.common.errors import InvalidInput
from services.common.spec import Array

LIMIT = 8 * codec.FRAME_BYTES

native = st.sampled_from(sorted(codec.DTYPES)).map(np.dtype)
swapped = st.sampled_from([np.dtype(text) for text in (">i4", ">f8", ">u2", "<f4")])
any_shape = hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=6)
tensors = hnp.arrays(dtype=native | swapped, shape=any_shape)
names = st.text(max_size=12)


def layouts(array: Array) -> st.SearchStrategy[Array]:
    """The array itself, and the same numbers in other memory orders."""
    strided = np.repeat(array[..., None], 2, axis=-1)[..., 0]
    return st.sampled_from([array, np.asfortranarray(array), strided, array[..., ::-1] if array.ndim else array])


@given(arrays=st.dictionaries(names, tensors.flatmap(layouts), max_size=5), hashed=st.booleans())
def test_arrays_survive_in_any_dtype_shape_and_memory_order(arrays: dict[str, Array], hashed: bool) -> None:
    payload, rest = codec.encode(arrays, hashed)
    assert not len(rest)
    decoded = codec.decode(pb.Payload.FromString(payload.SerializeToString()))
    assert list(decoded) == list(arrays)
    for name, array in arrays.items():
        assert decoded[name].dtype == np.dtype(array.dtype.name)
        np.testing.assert_array_equal(decoded[name], array)
        assert not decoded[name].flags.writeable


@given(sizes=st.lists(st.integers(0, 3 * codec.FRAME_BYTES), min_size=1, max_size=3), hashed=st.booleans())
@settings(max_examples=15, deadline=None)
def test_bulk_travels_in_frames(sizes: list[int], hashed: bool) -> None:
    arrays: dict[str, Array] = {str(n): np.resize(np.arange(251, dtype=np.uint8), size) for n, size in enumerate(sizes)}
    payload, rest = codec.encode(arrays, hashed)
    if payload.WhichOneof("location") == "inline":
        assert payload.length <= codec.INLINE_LIMIT
        decoded = codec.decode(payload)
    else:
        assembler = codec.Assembler(payload, 16 * codec.FRAME_BYTES)
        done = [assembler.add(frame) for frame in codec.frames(rest)]
        assert done == [False] * (payload.frames - 1) + [True]
        decoded = codec.decode(payload, assembler.buffer)
    for name, array in arrays.items():
        np.testing.assert_array_equal(decoded[name], array)


def test_a_buffer_of_our_own_can_be_filled_in_place() -> None:
    arrays: dict[str, Array] = {"a": np.arange(5, dtype=np.int32), "b": np.ones((2, 3), np.float16)}
    layout = codec.plan(arrays)
    buffer = bytearray(b"\xff" * (layout.length + 100))
    codec.pack_into(memoryview(buffer), layout, arrays)
    decoded = codec.views(layout.tensors, buffer)
    np.testing.assert_array_equal(decoded["a"], arrays["a"])
    np.testing.assert_array_equal(decoded["b"], arrays["b"])
    assert buffer[layout.length :] == b"\xff" * 100
    assert all(meta.offset % codec.ALIGNMENT == 0 for meta in layout.tensors)


@pytest.mark.parametrize(
    "array",
    [
        np.array(["text"]),
        np.array([object()]),
        np.array([1 + 2j]),
        np.array(["2020-01-01"], "datetime64[D]"),
        np.zeros(2, [("field", "f4")]),
        np.zeros(2, np.longdouble),
    ],
    ids=lambda array: str(array.dtype),
)
def test_a_dtype_that_may_not_travel_is_refused_by_name(array: Array) -> None:
    with pytest.raises(InvalidInput, match=r"'strange' has dtype .*expected one of"):
        codec.encode({"strange": array})


def meta(dtype: str = "float32", shape: tuple[int, ...] = (2,), offset: int = 0, name: str = "a") -> pb.TensorMeta:
    return pb.TensorMeta(name=name, dtype=dtype, shape=shape, offset=offset)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (meta(dtype=""), "unknown dtype"),
        (meta(dtype="object"), "unknown dtype"),
        (meta(dtype="O"), "unknown dtype"),
        (meta(dtype="<U9"), "unknown dtype"),
        (meta(dtype="bfloat16"), "unknown dtype"),
        (meta(dtype="float32,(9,)float32"), "unknown dtype"),
        (meta(shape=(-1,)), "impossible shape"),
        (meta(shape=(-2, -2)), "impossible shape"),
        (meta(shape=(0, -1)), "impossible shape"),
        (meta(shape=(2**63 - 1,)), "impossible shape"),
        (meta(shape=(2**32, 2**32)), "impossible shape"),  # 0 in 64 bits
        (meta(shape=(2**31, 2**31, 4)), "impossible shape"),
        (meta(shape=(0, 2**62, 2**62)), "impossible shape"),  # empty, and too big for numpy
        (meta(shape=(1,) * 17), "impossible shape"),
        (meta(shape=(1,) * 100), "impossible shape"),
        (meta(shape=(33,)), "ends beyond"),
        (meta(shape=(2**40,)), "ends beyond"),
        (meta(offset=64, shape=(17,)), "ends beyond"),
        (meta(offset=128, shape=(1,)), "ends beyond"),
        (meta(offset=192, shape=(0,)), "ends beyond"),
        (meta(offset=2**64 - 64, shape=(16,)), "ends beyond"),  # 0 in 64 bits
        (meta(offset=2**63, shape=(1,)), "ends beyond"),
        (meta(offset=4), "not aligned"),
        (meta(dtype="bool", shape=(128,)), "neither 0 nor 1"),
    ],
    ids=lambda value: f"{value.dtype}{tuple(value.shape)}@{value.offset}" if isinstance(value, pb.TensorMeta) else "",
)
def test_a_header_that_does_not_fit_its_bytes_is_refused(bad: pb.TensorMeta, message: str) -> None:
    data = b"\x02" * 128
    with pytest.raises(InvalidInput, match=message) as refused:
        codec.views([bad], data)
    assert "'a'" in str(refused.value)
    with pytest.raises(InvalidInput, match=message):
        codec.decode(pb.Payload(tensors=[meta(name="b"), bad], length=128, inline=data))


def test_one_name_for_two_tensors_is_refused() -> None:
    with pytest.raises(InvalidInput, match="'a' appears twice"):
        codec.views([meta(), meta(offset=64)], bytes(128))


def test_wrong_length_and_wrong_hash_are_refused() -> None:
    payload, _ = codec.encode({"a": np.arange(8.0)}, hashed=True)
    data = payload.inline
    assert payload.xxh3 == xxhash.xxh3_64_intdigest(data)
    with pytest.raises(InvalidInput, match="has 63 bytes; its header says 64"):
        codec.decode(payload, data[:-1])
    with pytest.raises(InvalidInput, match="has 65 bytes"):
        codec.decode(payload, data + b"\0")
    with pytest.raises(InvalidInput, match="do not match their hash"):
        codec.decode(payload, bytes([data[0] ^ 1]) + data[1:])
    elsewhere = pb.Payload(tensors=payload.tensors, length=64, shm=pb.Extent(arena="x", length=64))
    with pytest.raises(InvalidInput, match="has 0 bytes"):
        codec.decode(elsewhere)


def bulk() -> tuple[pb.Payload, list[pb.Frame]]:
    payload, rest = codec.encode({"a": np.zeros(2 * codec.FRAME_BYTES + 64, np.uint8)})
    return payload, list(codec.frames(rest))


@pytest.mark.parametrize(
    "order",
    [[1], [0, 0], [0, 2], [0, 1, 1], [0, 1, 2, 2]],
    ids=["gap first", "repeated", "gap", "repeated later", "beyond the end"],
)
def test_frames_out_of_order_are_refused(order: list[int]) -> None:
    payload, frames = bulk()
    assembler = codec.Assembler(payload, LIMIT)
    for index in order[:-1]:
        assembler.add(frames[index])
    with pytest.raises(InvalidInput, match="expected 1 to"):
        assembler.add(frames[order[-1]])


@pytest.mark.parametrize(
    "frame",
    [
        pb.Frame(offset=0, data=b""),
        pb.Frame(offset=2**64 - 1, data=b"xx"),
        pb.Frame(offset=0, data=bytes(codec.FRAME_BYTES + 1)),
        pb.Frame(offset=1, data=b"x"),
    ],
    ids=["empty", "offset overflows", "too large", "not the next"],
)
def test_odd_frames_are_refused(frame: pb.Frame) -> None:
    payload, _ = bulk()
    with pytest.raises(InvalidInput, match="expected 1 to"):
        codec.Assembler(payload, LIMIT).add(frame)


@pytest.mark.parametrize(
    ("length", "frames", "message"),
    [
        (LIMIT + 1, 9, "larger than the limit"),
        (2**64 - 1, 2**32 - 1, "larger than the limit"),
        (codec.FRAME_BYTES + 1, 1, "announced in 1 frames"),
        (codec.FRAME_BYTES, 2, "announced in 2 frames"),
        (0, 0, "announced in 0 frames"),
    ],
)
def test_an_impossible_announcement_is_refused_before_memory_is_taken(length: int, frames: int, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        codec.Assembler(pb.Payload(length=length, frames=frames), LIMIT)


headers = st.builds(
    pb.TensorMeta,
    name=st.text(max_size=3),
    dtype=st.sampled_from([*sorted(codec.DTYPES), "object", "", "f4", "bfloat16"]),
    shape=st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(-1, 70), max_size=20),
    offset=st.integers(0, 2**64 - 1) | st.integers(0, 5).map(lambda n: n * 64),
)
payloads = st.builds(
    pb.Payload,
    tensors=st.lists(headers, max_size=4),
    length=st.integers(0, 2**64 - 1) | st.integers(0, 300),
    xxh3=st.just(0) | st.integers(0, 2**64 - 1),
    inline=st.binary(max_size=300),
)


def decode_or_refuse(payload: pb.Payload) -> None:
    try:
        decoded = codec.decode(payload)
    except InvalidInput:
        return
    for name, array in decoded.items():
        assert array.nbytes <= payload.length, name
        array.sum()  # touches every byte: none lies outside


@given(payload=payloads)
@settings(max_examples=400)
def test_any_message_is_decoded_or_refused(payload: pb.Payload) -> None:
    decode_or_refuse(payload)
    payload.length = len(payload.inline)
    payload.xxh3 = 0
    decode_or_refuse(payload)


@given(junk=st.binary(max_size=200), cut=st.integers(0, 400), flip=st.integers(0, 10_000))
@settings(max_examples=200)
def test_damaged_bytes_are_decoded_or_refused(junk: bytes, cut: int, flip: int) -> None:
    good, _ = codec.encode({"a": np.arange(20, dtype=np.int64), "b": np.zeros((2, 3), np.bool_)}, hashed=True)
    raw = bytearray(good.SerializeToString())
    raw[flip % len(raw)] ^= 1 << flip % 8
    for data in (junk, bytes(raw), bytes(raw[:cut]) + junk):
        try:
            payload = pb.Payload.FromString(data)
        except DecodeError:
            continue
        decode_or_refuse(payload)


@given(data=hnp.arrays(np.bool_, hnp.array_shapes(max_dims=2, max_side=9)))
def test_booleans_are_only_zero_and_one(data: npt.NDArray[np.bool_]) -> None:
    payload, _ = codec.encode({"a": data})
    assert codec.decode(payload)["a"].sum() == data.sum()
    payload.inline = payload.inline.replace(b"\0", b"\7", 1)
    if payload.inline[: data.size].count(7):
        with pytest.raises(InvalidInput, match="neither 0 nor 1"):
            codec.decode(payload)
