"""Every byte exactly once, in any order."""

from itertools import pairwise
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common.errors import InvalidInput
from services.weights import coverage
from services.weights.coverage import Coverage


@given(st.sets(st.integers(1, 99)), st.randoms())
def test_any_order_of_disjoint_pieces_is_complete(cuts: set[int], random: Random) -> None:
    edges = [0, *sorted(cuts), 100]
    pieces = list(pairwise(edges))
    random.shuffle(pieces)
    seen = Coverage(100)
    for start, end in pieces:
        gap = seen.gap()
        assert gap is not None
        assert gap[0] < gap[1]
        seen.add(start, end - start)
    assert seen.gap() is None


@given(st.lists(st.tuples(st.integers(-5, 25), st.integers(-5, 25)), max_size=20))
def test_it_agrees_with_a_set_of_bytes(frames: list[tuple[int, int]]) -> None:
    seen, model = Coverage(20), set[int]()
    for offset, length in frames:
        wanted = set(range(offset, offset + length))
        good = length > 0 and wanted <= set(range(20)) and not wanted & model
        if good:
            seen.add(offset, length)
            model |= wanted
        else:
            with pytest.raises(InvalidInput):
                seen.add(offset, length)
        missing = sorted(set(range(20)) - model)
        gap = seen.gap()
        assert (gap is None) == (not missing)
        if gap:
            assert gap[0] == missing[0]
            assert set(range(*gap)) <= set(missing)


def test_nothing_needs_no_frames() -> None:
    assert Coverage(0).gap() is None


def test_scattered_frames_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coverage, "MAX_PIECES", 3)
    seen = Coverage(100)
    for offset in (0, 10, 20):
        seen.add(offset, 1)
    with pytest.raises(InvalidInput, match="ascending order"):
        seen.add(30, 1)
