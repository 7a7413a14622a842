"""The flat files that hold versions: recycled when nobody reads them, within a budget of bytes and files."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from services.common.errors import InvalidInput
from services.common.flatfile import FlatFile, sweep

PREFIX = "weights"


@dataclass(eq=False)
class Slot:
    """One file: bytes reserved, the generation of its filling (0: none), since when readers block its reuse."""

    file: FlatFile
    size: int
    generation: int = 0
    blocked_since: float | None = None


class FilePool:
    """Files in a shared folder. Not thread-safe. Removes what dead processes left behind when it is made."""

    def __init__(self, folder: Path, budget: int, max_files: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.folder = folder
        self._budget, self._max_files, self._clock = budget, max_files, clock
        self._slots: dict[int, Slot] = {}
        self._free: list[int] = []
        self._next = 0
        self.swept = sweep(folder)

    def __getitem__(self, number: int) -> Slot:
        return self._slots[number]

    def take(self, length: int) -> int | None:
        """A slot for `length` bytes, locked exclusively: an unread free one, else a new one, else None.

        The caller starts the file, fills it, then calls `finish`, or `discard` if that fails. Raises InvalidInput
        if the budget can never hold so much.
        """
        if length > self._budget:
            raise InvalidInput(f"a version of {length} bytes is larger than the budget of {self._budget}")
        number = self._reuse(length)
        if number is None:
            self._shrink(length)
            if len(self._slots) >= self._max_files or self.reserved() + length > self._budget:
                return None
            number, self._next = self._next, self._next + 1
            self._slots[number] = Slot(FlatFile.create(self.folder, PREFIX), length)
        slot = self._slots[number]
        slot.generation, slot.size = 0, length
        return number

    def finish(self, number: int) -> None:
        """The slot is filled: readers may lock it."""
        slot = self._slots[number]
        slot.generation = slot.file.finish(slot.size)
        slot.file.unlock()

    def release(self, number: int) -> None:
        """The slot's version is not needed any more; whoever reads it now may finish."""
        self._slots[number].file.unlock()
        self._free.append(number)

    def reserved(self) -> int:
        """Bytes of all files."""
        return sum(slot.size for slot in self._slots.values())

    def blocked(self, seconds: float) -> Iterator[str]:
        """Words on each free file that somebody has kept locked for longer than that. Call it regularly."""
        holders: dict[int, list[int]] | None = None
        for number in self._free:
            slot = self._slots[number]
            if slot.file.try_lock_exclusive():
                slot.file.unlock()
                slot.blocked_since = None
                continue
            now = self._clock()
            slot.blocked_since = now if slot.blocked_since is None else slot.blocked_since
            if now - slot.blocked_since >= seconds:
                holders = lock_holders() if holders is None else holders
                pids = ", ".join(map(str, holders.get(slot.file.inode, []))) or "of another namespace"
                yield f"{slot.file.name} locked for {now - slot.blocked_since:.0f} s by process {pids}"

    def close(self) -> None:
        """Remove all files; readers that have one open keep its bytes."""
        for number in list(self._slots):
            self.discard(number)

    def _reuse(self, length: int) -> int | None:
        for number in sorted(self._free, key=lambda n: abs(self._slots[n].size - length)):
            slot = self._slots[number]
            if self.reserved() - slot.size + length <= self._budget and slot.file.try_lock_exclusive():
                self._free.remove(number)
                slot.blocked_since = None
                return number
        return None

    def _shrink(self, length: int) -> None:
        """Give up free files of other sizes while they stand in the way of a larger one."""
        for number in list(self._free):
            if self.reserved() + length > self._budget and self._slots[number].file.try_lock_exclusive():
                self.discard(number)

    def discard(self, number: int) -> None:
        """Delete the slot's file; readers that have it open keep its bytes."""
        self._slots.pop(number).file.remove()
        if number in self._free:
            self._free.remove(number)


def lock_holders(table: Path = Path("/proc/locks")) -> dict[int, list[int]]:
    """inode -> ids of the processes that hold or want a flock on it, as far as this namespace sees them."""
    out: dict[int, list[int]] = {}
    try:
        lines = table.read_text().splitlines()
    except OSError:  # not every sandbox shows it; the names are a courtesy
        return out
    for line in lines:
        words = [word for word in line.split() if word != "->"]
        # 1: FLOCK ADVISORY READ 4711 00:19:123456 0 EOF
        if len(words) >= 6 and words[1] == "FLOCK" and int(words[4]) > 0:
            out.setdefault(int(words[5].rsplit(":", 1)[1]), []).append(int(words[4]))
    return out
