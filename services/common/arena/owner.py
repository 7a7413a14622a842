"""The owner's side of an arena: it makes or adopts the file, gives room out and takes it back."""

import os
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt
import structlog

from services.common import locks
from services.common.arena import table
from services.common.arena.space import Space, rounded
from services.common.arena.table import Entry, Extent, State, data_start, entry_position
from services.common.errors import ConfigError, DvlaError, Exhausted, InvalidInput, NotFound
from services.common.flatfile import HEADER_BYTES, OWNER_BYTE, mapped

log = structlog.get_logger()

SUFFIX = ".arena"
ENTRIES = 4096


class Arena:
    """An arena that this process owns. Thread-safe. Close it, or use it in a `with`; closing leaves the file."""

    def __init__(self, path: Path, fd: int) -> None:
        """For a locked descriptor of a complete file; use `create` or `adopt`."""
        self.path, self._fd = path, fd
        self._size, self._count, self._generation = table.read_header(fd, path.name)
        self._start = data_start(self._count)
        self._data = mapped(fd, self._size - HEADER_BYTES, writable=True)
        self._space = Space(self._size - self._start)
        self._entries: dict[int, Entry] = {}  # entry -> what it says, the free ones left out
        self._since: dict[int, float] = {}  # generation -> time of the reservation
        self._lock = threading.RLock()
        rows = table.table_of(self._data, self._count)
        for number in np.flatnonzero(rows["state"]).tolist():
            self._admit(number, table.read_entry(rows, number))
        self._unused = [number for number in reversed(range(self._count)) if number not in self._entries]
        self.collect()  # an owner that died between dooming an extent and freeing it

    @classmethod
    def create(cls, folder: Path, prefix: str, size: int, entries: int = ENTRIES) -> Self:
        """Make a private (0600) arena with `size` bytes for extents, all of its memory allocated and touched.

        Raises ConfigError if the file system has no room for it.
        """
        total = data_start(entries) + size
        while True:
            path = folder / f"{prefix}-{os.urandom(6).hex()}{SUFFIX}"
            try:
                fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            except OSError as error:
                raise ConfigError(
                    f"arena {str(path)!r} cannot be made: {error.strerror}; name another folder"
                ) from error
            # Somebody who looks for orphans may come between and delete it: then another name will do.
            if locks.try_lock(fd, OWNER_BYTE) and path.exists():
                break
            os.close(fd)
        try:
            # Before any page is touched: a file that is too long for its file system would end in SIGBUS.
            os.posix_fallocate(fd, 0, total)
        except OSError as error:
            path.unlink(missing_ok=True)
            os.close(fd)
            raise ConfigError(no_room(folder, total, error)) from error
        table.write_header(fd, total, entries, time.time_ns())
        return cls(path, fd)

    @classmethod
    def adopt(cls, path: Path) -> Self | None:
        """Take over an arena whose owner died, with all its extents; None if it has an owner or is gone.

        Raises InvalidInput if the file is no arena or contradicts itself.
        """
        fd = _take(path)
        if fd is None:
            return None
        try:
            return cls(path, fd)
        except DvlaError:
            os.close(fd)
            raise

    @property
    def name(self) -> str:
        """What a peer needs to open it."""
        return self.path.name

    @property
    def capacity(self) -> int:
        """Bytes for extents."""
        return self._space.size

    @property
    def free(self) -> int:
        """Bytes that no extent takes, perhaps in several runs."""
        return self._space.free

    def extents(self) -> list[tuple[Extent, bool]]:
        """All extents and whether each is sealed; the doomed ones are left out. For reconciling after adoption."""
        with self._lock:
            return [
                (self._extent(entry), entry.state is State.SEALED)
                for entry in self._entries.values()
                if entry.state is not State.DOOMED
            ]

    def allocate(self, length: int) -> Extent:
        """Reserve room for a writer. Raises Exhausted if there is none now."""
        with self._lock:
            room = rounded(length)
            start = self._space.take(room) if self._unused else None
            if start is None:
                self.collect()
                start = self._space.take(room) if self._unused else None
            if start is None:
                raise Exhausted(
                    f"arena {self.name} has no run of {room} bytes: {self.free} of {self.capacity} are free, the "
                    f"longest run has {self._space.longest}, {len(self._unused)} entries are left"
                )
            number = self._unused.pop()
            self._generation = table.next_generation(self._generation, number, self._count)
            table.write_header(self._fd, self._size, self._count, self._generation)
            entry = Entry(State.RESERVED, self._generation, self._start + start, length, room)
            self._since[entry.generation] = time.monotonic()
            self._write(number, entry)
            return self._extent(entry)

    def shrink(self, extent: Extent, length: int) -> Extent:
        """Keep the first `length` bytes of a reserved extent and return the rest; the handle's generation stays."""
        with self._lock:
            number, entry = self._find(extent)
            if entry.state is not State.RESERVED or not 0 <= length <= entry.length:
                raise InvalidInput(f"{entry} cannot shrink to {length} bytes")
            room = rounded(length)
            self._write(number, replace(entry, length=length, room=room))
            if entry.room > room:
                self._space.give(entry.offset - self._start + room, entry.room - room)
            return self._extent(self._entries[number])

    def seal(self, extent: Extent) -> None:
        """Accept an extent: from now on it is immutable, readers may open it, and no sweep takes it."""
        with self._lock:
            number, entry = self._find(extent)
            if entry.state is State.DOOMED:
                raise NotFound(f"{extent} was freed")
            self._write(number, replace(entry, state=State.SEALED))

    def view(self, extent: Extent) -> npt.NDArray[np.uint8]:
        """The bytes, for the owner itself: uint8 [length], not copied; read-only once sealed."""
        with self._lock:
            _, entry = self._find(extent)
            if extent.length > entry.length:
                raise InvalidInput(f"{extent} is longer than its {entry.length} bytes")
            view = self._data[entry.offset - HEADER_BYTES :][: extent.length]
            view.flags.writeable = entry.state is not State.SEALED
            return view

    def held(self, extent: Extent) -> bool:
        """Whether a writer or a reader has it open, be it stopped."""
        with self._lock:
            return locks.held_elsewhere(self._fd, entry_position(self._find(extent)[0]), 2)

    def release(self, extent: Extent) -> bool:
        """Free an extent: at once (True), or, while a peer has it open, as soon as that ends. Repeats are harmless."""
        with self._lock:
            try:
                number, entry = self._find(extent)
            except NotFound:
                return True
            self._write(number, replace(entry, state=State.DOOMED))
            return self._free(number)

    def sweep(self, seconds: float) -> list[Extent]:
        """Free reserved extents older than this that no writer holds; returns them.

        seconds: longer than a writer needs between the grant and its `Peer.write`, and between closing that and the
        `seal` here.
        """
        with self._lock:
            self.collect()
            late = time.monotonic() - seconds
            dead = [
                self._extent(entry)
                for number, entry in self._entries.items()
                if entry.state is State.RESERVED
                and self._since.get(entry.generation, 0.0) <= late
                and not locks.held_elsewhere(self._fd, entry_position(number) + table.WRITER_BYTE)
            ]
            return [extent for extent in dead if self.release(extent)]

    def collect(self) -> None:
        """Free the released extents whose peers have let go meanwhile."""
        with self._lock:
            for number, entry in list(self._entries.items()):
                if entry.state is State.DOOMED:
                    self._free(number)

    def remove(self) -> None:
        """Delete the file and close; peers that have it open keep its bytes until they let go."""
        self.path.unlink(missing_ok=True)
        self.close()

    def close(self) -> None:
        """Give ownership up; the file stays and may be adopted."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _extent(self, entry: Entry) -> Extent:
        return Extent(self.name, entry.offset, entry.length, entry.generation)

    def _find(self, extent: Extent) -> tuple[int, Entry]:
        number = extent.generation % self._count
        entry = self._entries.get(number)
        known = entry is not None and (entry.generation, entry.offset) == (extent.generation, extent.offset)
        if entry is None or not known or extent.arena != self.name:
            raise NotFound(f"arena {self.name} holds no {extent} (any more)")
        return number, entry

    def _write(self, number: int, entry: Entry) -> None:
        self._entries[number] = entry
        table.write_entry(self._fd, number, entry)

    def _free(self, number: int) -> bool:
        # With the lock nobody can open it, and the entry is gone before the lock is.
        at = entry_position(number)
        if not locks.try_lock(self._fd, at, 2):
            return False
        entry = self._entries.pop(number)
        table.write_entry(self._fd, number, replace(entry, state=State.FREE))
        locks.unlock(self._fd, at, 2)
        self._since.pop(entry.generation, None)
        self._space.give(entry.offset - self._start, entry.room)
        self._unused.append(number)
        return True

    def _admit(self, number: int, entry: Entry) -> None:
        misplaced = entry.generation % self._count != number
        if entry.room != rounded(entry.room) or entry.length > entry.room or misplaced:
            raise InvalidInput(f"arena {self.name} contradicts itself: {entry}")
        self._space.claim(entry.offset - self._start, entry.room)
        self._entries[number] = entry
        self._since[entry.generation] = time.monotonic()
        self._generation = max(self._generation, entry.generation)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def orphans(folder: Path, prefix: str) -> Iterator[Arena]:
    """Adopt the arenas with this prefix whose owners died. One that is no arena is deleted, with a log line."""
    for path in sorted(folder.glob(f"{prefix}-*{SUFFIX}")):
        fd = _take(path)
        if fd is None:
            continue
        try:
            arena = Arena(path, fd)
        except DvlaError as error:
            log.warning("arena cannot be adopted and is deleted", path=str(path), reason=str(error))
            path.unlink(missing_ok=True)  # under its lock, or a file in the making could be meant
            os.close(fd)
            continue
        yield arena


def _take(path: Path) -> int | None:
    """A descriptor that holds the owner's lock, or None if the file is gone or has an owner."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    if locks.try_lock(fd, OWNER_BYTE) and os.fstat(fd).st_nlink:
        return fd
    os.close(fd)
    return None


def no_room(folder: Path, size: int, error: OSError) -> str:
    """Why an arena cannot be made, and what to do."""
    facts = os.statvfs(folder)
    free, total = facts.f_bavail * facts.f_frsize, facts.f_blocks * facts.f_frsize
    return (
        f"an arena of {size} bytes does not fit into {str(folder)!r} ({free} of {total} bytes free): {error.strerror}; "
        f"in compose set SHARED_MEMORY, or shm_size of this service, to at least "
        f"{-(-(total - free + size) // 2**20)}mb, or mount a larger tmpfs and name it as shared folder"
    )
