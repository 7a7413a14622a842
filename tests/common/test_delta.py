"""Deltas: bit-exact for every dtype and density, small at the densities of real learning rates, strict when damaged."""

import struct
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.common import delta
from services.common.bundle import DTYPES, Layout, Version, plan
from services.common.delta import DeltaRule, apply, encode
from services.common.errors import ConfigError, InvalidInput

BASE = Version(1, 3)


def bf16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Round to nearest even, as torch does."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


SHAPES = st.lists(st.tuples(st.sampled_from(sorted(DTYPES)), st.integers(0, 300)), min_size=1, max_size=5)


@settings(max_examples=150, deadline=None)
@given(shapes=SHAPES, density=st.sampled_from([0.0, 0.01, 0.3, 1.0]), seed=st.integers(0, 2**32), data=st.data())
def test_any_bits_are_restored_exactly(
    shapes: list[tuple[str, int]], density: float, seed: int, data: st.DataObject
) -> None:
    layout = plan((str(i), dtype, (size,)) for i, (dtype, size) in enumerate(shapes))
    rng = np.random.default_rng(seed)
    old = rng.integers(0, 256, layout.length, dtype=np.uint8)
    new = old.copy()
    for tensor in layout.tensors:  # padding is not part of a version
        width = np.dtype(DTYPES[tensor.dtype]).itemsize
        words = new[tensor.offset : tensor.offset + tensor.length].reshape(-1, width)
        hit = rng.random(len(words)) < density
        words[hit] = rng.integers(0, 256, (int(hit.sum()), width), dtype=np.uint8)
    coded = encode(layout, BASE, old, new)
    if coded is None:  # tiny bundles cost less than the columns' headers
        return
    assert coded.changed == changed(layout, old, new)
    restored = old.copy()
    for _ in range(2):  # a second time changes nothing
        apply(layout, restored, coded.data)
        assert restored.tobytes() == new.tobytes()


def changed(layout: Layout, old: npt.NDArray[np.uint8], new: npt.NDArray[np.uint8]) -> int:
    total = 0
    for tensor in layout.tensors:
        part = slice(tensor.offset, tensor.offset + tensor.length)
        width = np.dtype(DTYPES[tensor.dtype]).itemsize
        total += int((old[part].reshape(-1, width) != new[part].reshape(-1, width)).any(axis=1).sum())
    return total


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 400_000), unique=True, max_size=20), st.sampled_from([1_000, 131_072, 4 * 1024 * 1024]))
def test_long_runs_of_unchanged_elements_are_bridged(where: list[int], step: int) -> None:
    layout = plan([("w", "uint8", (400_001,)), ("v", "int64", (3,))])
    old = np.full(layout.length, 7, np.uint8)
    new = old.copy()
    new[where] = 9
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(delta, "STEP", step)  # the piece borders must not matter
        coded = encode(layout, BASE, old, new)
        assert coded is not None
        assert coded.changed == len(where)
        restored = old.copy()
        apply(layout, restored, coded.data)
    assert restored.tobytes() == new.tobytes()


@pytest.mark.parametrize("rate", [1e-6, 3e-6, 1e-5, 3e-5, 1e-4])
def test_bf16_takes_at_most_three_bytes_for_each_changed_element(rate: float) -> None:
    rng = np.random.default_rng(0)
    weights = rng.normal(0, 0.02, 2_000_000).astype(np.float32)
    layout = plan([("w", "bfloat16", (len(weights),))])
    # Master weights in float32 move by up to the learning rate; what is published is rounded.
    moved = weights + rng.uniform(-rate, rate, len(weights)).astype(np.float32)
    old, new = (np.zeros(layout.length, np.uint8) for _ in range(2))
    for target, values in ((old, weights), (new, moved)):
        target[: 2 * len(weights)] = bf16(values).view(np.uint8)
    coded = encode(layout, BASE, old, new)
    assert coded is not None
    assert len(coded.data) / coded.changed <= 3.0
    restored = old.copy()
    apply(layout, restored, coded.data)
    assert restored.tobytes() == new.tobytes()


def test_dense_is_chosen_where_it_is_cheaper() -> None:
    layout = plan([("w", "uint16", (100_000,))])
    rng = np.random.default_rng(0)
    old, new = (rng.integers(0, 256, layout.length, dtype=np.uint8) for _ in range(2))
    assert encode(layout, BASE, old, new) is None  # every element, and no gap costs nothing
    few = old.copy()
    few[: 2 * 20_000] = new[: 2 * 20_000]
    assert encode(layout, BASE, old, few, density=0.1) is None
    assert encode(layout, BASE, old, few, density=0.3) is not None


def test_nothing_changed_is_a_delta_of_nothing() -> None:
    layout = plan([("w", "float32", (1000,)), ("none", "bool", (0, 5))])
    old = np.full(layout.length, 255, np.uint8)  # NaN everywhere
    coded = encode(layout, BASE, old, old.copy())
    assert coded is not None
    assert (coded.changed, coded.density) == (0, 0.0)
    assert apply(layout, old.copy(), coded.data) == 0


def example() -> tuple[Layout, npt.NDArray[np.uint8], bytes]:
    layout = plan([("w", "bfloat16", (5000,)), ("b", "float32", (100,))])
    old = np.zeros(layout.length, np.uint8)
    new = old.copy()
    new[: 2 * 5000 : 31] = 5
    new[layout.tensors[1].offset :][:8] = 3
    coded = encode(layout, BASE, old, new)
    assert coded is not None
    return layout, old, coded.data


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_damage_is_refused_or_harmless_to_everything_but_the_buffer(data: st.DataObject) -> None:
    layout, old, coded = example()
    damaged = bytearray(coded)
    for _ in range(data.draw(st.integers(1, 3))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] ^= data.draw(st.integers(1, 255))
    damaged = damaged[: data.draw(st.integers(0, len(damaged)))] + data.draw(st.binary(max_size=20))
    around = np.full(layout.length + 512, 170, np.uint8)
    around[: layout.length] = old
    with suppress(InvalidInput):
        apply(layout, around[: layout.length], bytes(damaged))
    assert (around[layout.length :] == 170).all()


def test_columns_that_do_not_fit_the_layout_are_named() -> None:
    layout, old, coded = example()
    other = plan([("w", "bfloat16", (50,))])
    for wrong, match in ((coded + b"x", "announces"), (coded[:50], "no header"), (b"", "no header")):
        with pytest.raises(InvalidInput, match=match):
            apply(layout, old.copy(), wrong)
    with pytest.raises(InvalidInput, match=r"more tensors|changes of tensor"):
        apply(other, np.zeros(other.length, np.uint8), coded)
    bomb = struct.pack("<11Q", *[0] * 11)
    assert apply(layout, old.copy(), bomb) == 0


@pytest.mark.parametrize(
    ("rule", "update", "expected"),
    [
        ({}, 4, True),
        ({}, 25, False),
        ({"density": 0.0}, 4, False),
        ({"anchor": 1}, 4, False),
        ({"anchor": 4}, 4, False),
    ],
)
def test_anchors_are_dense(rule: dict[str, Any], update: int, expected: bool) -> None:
    assert DeltaRule(**rule).allows(BASE, Version(1, update)) is expected
    assert not DeltaRule(**rule).allows(BASE, Version(2, update))


@pytest.mark.parametrize("bad", [{"density": -0.1}, {"density": 1.5}, {"anchor": 0}])
def test_impossible_rules_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="delta_"):
        DeltaRule(**bad)
