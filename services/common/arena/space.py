"""Accounting of free room in one run of bytes. Pure arithmetic: the arena keeps its files and locks elsewhere."""

from bisect import bisect_left

from services.common.errors import InvalidInput

ALIGNMENT = 64
"""Extents begin at multiples of this, as tensors do."""


def rounded(length: int) -> int:
    """Room that so many bytes take: a multiple of the alignment, and never nothing."""
    return max(1, -(-length // ALIGNMENT)) * ALIGNMENT


def needed(count: int, longest: int) -> int:
    """Room in which `count` extents of up to `longest` bytes always fit at once, whatever lay there before.

    Extents that shrink leave gaps. With one place less taken there are at most `count` gaps; if all were too short for
    another extent, their sum and the extents would be less than this.
    """
    return (2 * count - 1) * rounded(longest)


class Space:
    """Free runs of [0, size), merged where they touch. First fit, so that used room stays together."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._starts, self._lengths = ([0], [size]) if size else ([], [])

    @property
    def free(self) -> int:
        """Free bytes."""
        return sum(self._lengths)

    @property
    def longest(self) -> int:
        """The longest free run."""
        return max(self._lengths, default=0)

    def take(self, length: int) -> int | None:
        """Take a run of this length; its start, or None if no free run is long enough."""
        for at, room in enumerate(self._lengths):
            if room >= length:
                start = self._starts[at]
                self._cut(at, start, length)
                return start
        return None

    def claim(self, start: int, length: int) -> None:
        """Take exactly this run; raises InvalidInput unless all of it is free."""
        at = bisect_left(self._starts, start + 1) - 1
        if length <= 0 or at < 0 or start + length > self._starts[at] + self._lengths[at]:
            raise InvalidInput(f"bytes {start} to {start + length} are not free, or lie outside of {self.size}")
        self._cut(at, start, length)

    def give(self, start: int, length: int) -> None:
        """Give a run back; raises InvalidInput if any of it is free already."""
        at = bisect_left(self._starts, start)
        before = at > 0 and self._starts[at - 1] + self._lengths[at - 1] > start
        after = at < len(self._starts) and self._starts[at] < start + length
        if length <= 0 or start < 0 or start + length > self.size or before or after:
            raise InvalidInput(f"bytes {start} to {start + length} are free already, or lie outside of {self.size}")
        self._starts.insert(at, start)
        self._lengths.insert(at, length)
        self._merge(at)
        self._merge(at - 1)

    def _cut(self, at: int, start: int, length: int) -> None:
        first, end = self._starts[at], self._starts[at] + self._lengths[at]
        pieces = [(a, b - a) for a, b in ((first, start), (start + length, end)) if b > a]
        self._starts[at : at + 1] = [a for a, _ in pieces]
        self._lengths[at : at + 1] = [size for _, size in pieces]

    def _merge(self, at: int) -> None:
        """Join run `at` with the next one if they touch."""
        if 0 <= at < len(self._starts) - 1 and self._starts[at] + self._lengths[at] == self._starts[at + 1]:
            self._lengths[at] += self._lengths[at + 1]
            del self._starts[at + 1], self._lengths[at + 1]
