"""Which bytes of a version have arrived: each exactly once, in any order."""

from bisect import bisect_left

from services.common.errors import InvalidInput

MAX_PIECES = 10_000


class Coverage:
    """A set of disjoint ranges within [0, length), merged where they touch."""

    def __init__(self, length: int) -> None:
        self._length = length
        self._starts: list[int] = []
        self._ends: list[int] = []

    def add(self, offset: int, length: int) -> None:
        """Enter a range; raises InvalidInput if it is empty, reaches beyond the end or overlaps another."""
        end = offset + length
        if length < 1 or offset < 0 or end > self._length:
            raise InvalidInput(f"frame of bytes {offset} to {end}; expected a part of 0 to {self._length}")
        at = bisect_left(self._starts, offset)
        before, after = at > 0, at < len(self._starts)
        if (before and self._ends[at - 1] > offset) or (after and self._starts[at] < end):
            raise InvalidInput(f"frame of bytes {offset} to {end} overlaps an earlier one")
        joins_before = before and self._ends[at - 1] == offset
        joins_after = after and self._starts[at] == end
        if joins_before and joins_after:
            self._ends[at - 1] = self._ends.pop(at)
            self._starts.pop(at)
        elif joins_before:
            self._ends[at - 1] = end
        elif joins_after:
            self._starts[at] = offset
        elif len(self._starts) >= MAX_PIECES:
            raise InvalidInput(f"frames leave more than {MAX_PIECES} gaps; send them in ascending order")
        else:
            self._starts.insert(at, offset)
            self._ends.insert(at, end)

    def gap(self) -> tuple[int, int] | None:
        """The first range that has not arrived; None when all has."""
        if not self._length:
            return None
        if not self._starts or self._starts[0] > 0:
            return 0, self._starts[0] if self._starts else self._length
        if self._ends[0] == self._length:
            return None
        return self._ends[0], self._starts[1] if len(self._starts) > 1 else self._length
