"""The peers' side of an arena: open an extent that its owner named, to write it or to read it, without a copy."""

import os
import threading
from collections import Counter
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt

from services.common import locks
from services.common.arena import table
from services.common.arena.table import Entry, Extent, State, data_start, entry_position
from services.common.errors import InvalidInput, NotFound
from services.common.flatfile import HEADER_BYTES, mapped, open_named


class Lease:
    """An extent that a peer holds under its kernel lock. Close it, or use it in a `with`.

    view: uint8 [length] on the shared bytes, read-only for readers. Not to be used after closing: the room may then
    be given to somebody else. `torch.from_numpy(lease.view)` shares the same bytes.
    """

    def __init__(self, file: "_File", number: int, writing: bool, view: npt.NDArray[np.uint8]) -> None:
        self.view = view
        self._file, self._number, self._writing = file, number, writing
        self._open = True

    def close(self) -> None:
        """Let go of the lock. Repeats are harmless."""
        if self._open:
            self._open = False
            self._file.let_go(self._number, self._writing)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Peer:
    """Opens extents of the arenas in one folder; files and mappings are kept for as long as they exist. Thread-safe.

    Everything that comes from the wire is checked: name, bounds, generation, state.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[tuple[str, bool], _File] = {}
        self._lock = threading.Lock()

    def write(self, extent: Extent) -> Lease:
        """Open a reserved extent as its only writer.

        Raises NotFound if it was freed, or is open for writing already; InvalidInput if the handle makes no sense.
        """
        return self._file(extent.arena, True).hold(extent, writing=True)

    def read(self, extent: Extent, sealed: bool = True) -> Lease:
        """Open a sealed extent for reading; with sealed False also one that its writer still fills.

        Raises NotFound if it was freed or is not sealed yet; InvalidInput if the handle makes no sense.
        """
        return self._file(extent.arena, False).hold(extent, writing=False, sealed=sealed)

    def close(self) -> None:
        """Close all files; leases that are open end with them."""
        with self._lock:
            for file in self._files.values():
                file.close()
            self._files.clear()

    def _file(self, name: str, writable: bool) -> "_File":
        with self._lock:
            file = self._files.get((name, writable))
            if file is None:
                self._prune()
                file = self._files[name, writable] = _File(self._folder, name, writable)
            return file

    def _prune(self) -> None:
        """Let go of deleted files, or their memory would never come back."""
        for key, file in list(self._files.items()):
            if file.gone and not file.busy:
                file.close()
                del self._files[key]


class _File:
    """One arena, opened and mapped. Locks belong to the open file, so shared ones of one entry are counted here."""

    def __init__(self, folder: Path, name: str, writable: bool) -> None:
        self._name = name
        self._fd = open_named(folder, name, writable)
        try:
            size, self._entries, _ = table.read_header(self._fd, name)
            data = mapped(self._fd, size - HEADER_BYTES, writable)
        except BaseException:
            os.close(self._fd)
            raise
        self._table = table.table_of(data, self._entries)
        self._generations = self._table["generation"]
        self._data = data
        self._first, self._size = data_start(self._entries), size
        self._held: Counter[int] = Counter()
        self._lock = threading.Lock()

    @property
    def gone(self) -> bool:
        """Whether the file was deleted."""
        return os.fstat(self._fd).st_nlink == 0

    @property
    def busy(self) -> bool:
        """Whether extents are open."""
        return bool(self._held)

    def hold(self, extent: Extent, writing: bool, sealed: bool = True) -> Lease:
        """Find, lock, look again, map."""
        if extent.offset < self._first or extent.length < 0 or extent.offset + extent.length > self._size:
            raise InvalidInput(f"{extent} lies outside of the arena's bytes {self._first} to {self._size}")
        with self._lock:
            number = extent.generation % self._entries
            if int(self._generations[number]) != extent.generation:  # never lock a successor, not for an instant
                raise NotFound(f"{extent} was freed")
            self._take(number, writing, extent)
            try:
                self._check(self._entry(number), extent, writing, sealed)
            except BaseException:
                self._drop(number, writing)
                raise
        start = extent.offset - HEADER_BYTES
        return Lease(self, number, writing, self._data[start : start + extent.length])

    def let_go(self, number: int, writing: bool) -> None:
        """Release one holding of an entry."""
        with self._lock:
            if self._fd >= 0:
                self._drop(number, writing)

    def close(self) -> None:
        """Close; this frees all locks."""
        with self._lock:
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1

    def _take(self, number: int, writing: bool, extent: Extent) -> None:
        byte = entry_position(number) + (table.WRITER_BYTE if writing else table.READER_BYTE)
        taken = bool(self._held[number]) or locks.try_lock(self._fd, byte, exclusive=writing)
        if not taken or (writing and self._held[number]):
            raise NotFound(f"{extent} is being freed, or another writer has it open")
        self._held[number] += 1

    def _drop(self, number: int, writing: bool) -> None:
        self._held[number] -= 1
        if not self._held[number]:
            del self._held[number]
            locks.unlock(self._fd, entry_position(number) + (table.WRITER_BYTE if writing else table.READER_BYTE))

    def _entry(self, number: int) -> Entry:
        return table.read_entry(self._table, number)

    def _check(self, entry: Entry, extent: Extent, writing: bool, sealed: bool) -> None:
        """Under the lock, so that the owner cannot free it any more."""
        if entry.generation != extent.generation or entry.state in (State.FREE, State.DOOMED):
            raise NotFound(f"{extent} was freed")
        if entry.offset != extent.offset or extent.length > entry.length:
            raise InvalidInput(f"{extent} does not lie inside of its entry, {entry}")
        if writing and entry.state is State.SEALED:
            raise InvalidInput(f"{extent} is sealed and cannot be written any more")
        if not writing and sealed and entry.state is not State.SEALED:
            raise NotFound(f"{extent} is not sealed yet")
