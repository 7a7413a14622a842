"""Accounting of free room, against a model that has one flag for each unit."""

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.arena.space import ALIGNMENT, Space, needed, rounded
from services.common.errors import InvalidInput

UNITS = 24

steps = st.lists(
    st.tuples(st.sampled_from(["take", "claim", "give"]), st.integers(0, UNITS), st.integers(0, UNITS)), max_size=60
)


class Model:
    def __init__(self) -> None:
        self.free = [True] * UNITS

    def runs(self) -> list[tuple[int, int]]:
        text = "".join("f" if free else " " for free in self.free) + " "
        starts = [at for at in range(UNITS) if self.free[at] and (at == 0 or not self.free[at - 1])]
        return [(at, text.index(" ", at) - at) for at in starts]

    def within(self, start: int, length: int, free: bool) -> bool:
        return 0 < length <= UNITS - start and all(flag is free for flag in self.free[start : start + length])

    def set(self, start: int, length: int, free: bool) -> None:
        self.free[start : start + length] = [free] * length


def attempt(action: Callable[[int, int], None], start: int, length: int) -> bool:
    try:
        action(start, length)
    except InvalidInput:
        return False
    return True


@given(steps)
def test_space_agrees_with_a_model(history: list[tuple[str, int, int]]) -> None:
    space, model = Space(UNITS), Model()
    for what, start, length in history:
        if what == "take":
            fitting = [at for at, room in model.runs() if room >= max(1, length)]
            got = space.take(max(1, length))
            assert got == (fitting[0] if fitting else None)
            if got is not None:
                model.set(got, max(1, length), False)
        else:
            right = model.within(start, length, free=what == "claim")
            assert attempt(space.claim if what == "claim" else space.give, start, length) is right
            if right:
                model.set(start, length, what == "give")
        assert space.free == sum(model.free)
        assert space.longest == max((room for _, room in model.runs()), default=0)


def test_room_is_a_multiple_of_the_alignment_and_never_nothing() -> None:
    assert [rounded(n) for n in (0, 1, ALIGNMENT, ALIGNMENT + 1)] == [ALIGNMENT, ALIGNMENT, ALIGNMENT, 2 * ALIGNMENT]


@settings(max_examples=40)
@given(st.integers(1, 6), st.integers(1, 500), st.data())
def test_needed_room_never_runs_out(count: int, longest: int, data: st.DataObject) -> None:
    space, taken = Space(needed(count, longest)), list[tuple[int, int]]()
    for _ in range(25):
        if len(taken) < count:
            start = space.take(rounded(longest))
            assert start is not None, "room for one more extent was promised"
            kept = rounded(data.draw(st.integers(0, longest)))
            if kept < rounded(longest):
                space.give(start + kept, rounded(longest) - kept)
            taken.append((start, kept))
        else:
            space.give(*taken.pop(data.draw(st.integers(0, count - 1))))


def test_what_is_free_cannot_be_given() -> None:
    space = Space(10)
    for start, length in ((0, 1), (-1, 2), (9, 2), (0, 0)):
        with pytest.raises(InvalidInput, match="free already"):
            space.give(start, length)
