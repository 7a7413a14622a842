"""The flat files that hold versions: recycled when nobody reads them, within a budget of bytes and files.

A publisher on this node brings its version in a file of its own, which is adopted: locked as long as the version is
kept, then left to the publisher, who fills it again once no reader has it locked either.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from services.common.errors import InvalidInput
from services.common.flatfile import FlatFile, Mappings, sweep

PREFIX = "weights"


@dataclass(eq=False)
class Slot:
    """One file: bytes reserved, the generation of its filling (0: none), since when readers block its reuse."""

    file: FlatFile
    size: int
    generation: int = 0
    adopted: bool = False
    blocked_since: float | None = None


class FilePool:
    """Files in a shared folder. Not thread-safe. Removes what dead processes left behind when it is made."""

    def __init__(self, folder: Path, budget: int, max_files: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.folder = folder
        self._budget, self._max_files, self._clock = budget, max_files, clock
        self._slots: dict[int, Slot] = {}
        self._mappings = Mappings()
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
        self._check(length)
        number = self._reuse(length)
        if number is None:
            self._shrink(length)
            own = sum(not slot.adopted for slot in self._slots.values())
            if own >= self._max_files or self.reserved() + length > self._budget:
                return None
            number = self._add(Slot(FlatFile.create(self.folder, PREFIX), length))
        slot = self._slots[number]
        slot.generation, slot.size = 0, length
        return number

    def adopt(self, file: FlatFile, generation: int) -> int | None:
        """A slot for a publisher's file, which is locked for reading and from now on ours to close; None as `take`."""
        self._check(file.length)
        self._shrink(file.length)
        if self.reserved() + file.length > self._budget:
            return None
        return self._add(Slot(file, file.length, generation, adopted=True))

    def view(self, number: int) -> npt.NDArray[np.uint8]:
        """The bytes of a slot, mapped; writable while it is being filled by us."""
        slot = self._slots[number]
        return self._mappings.of(slot.file) if slot.adopted else slot.file.view

    def finish(self, number: int) -> None:
        """The slot is filled: readers may lock it."""
        slot = self._slots[number]
        if not slot.adopted:
            slot.generation = slot.file.finish(slot.size)
            slot.file.unlock()

    def release(self, number: int) -> bool:
        """The slot's version is not needed any more; whoever reads it now may finish. True if the slot is gone."""
        slot = self._slots[number]
        if slot.adopted:
            self._slots.pop(number).file.close()
        else:
            slot.file.unlock()
            self._free.append(number)
        return slot.adopted

    def reserved(self) -> int:
        """Bytes of all files."""
        return sum(slot.size for slot in self._slots.values())

    def tidy(self) -> None:
        """Delete what dead publishers left and nobody reads, and let go of deleted files."""
        sweep(self.folder)
        self._mappings.prune()

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
        """Remove all files; readers that have one open keep its bytes. Adopted ones stay their publisher's."""
        for number in list(self._slots):
            self.discard(number)
        self.tidy()

    def _check(self, length: int) -> None:
        if length > self._budget:
            raise InvalidInput(f"a version of {length} bytes is larger than the budget of {self._budget}")

    def _add(self, slot: Slot) -> int:
        number, self._next = self._next, self._next + 1
        self._slots[number] = slot
        return number

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
        """Delete the slot's file, if it is ours; readers that have it open keep its bytes."""
        slot = self._slots.pop(number)
        if slot.adopted:
            slot.file.close()
        else:
            slot.file.remove()
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
