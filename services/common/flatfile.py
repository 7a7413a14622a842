"""A flat file that several processes share: one header page, then bytes. Meant for tmpfs, works anywhere.

The writer holds an exclusive `flock` while it writes and gives every filling a new generation; a reader holds
a shared one while it copies and compares the generation, so a stale handle is detected. An OFD lock, which is
independent of `flock`, says that the file's owner lives. The kernel frees both when a process dies.

Bytes are mapped: on tmpfs that is three times as fast as pread. The room is allocated beforehand and never shrinks
while anybody holds a lock, so a mapping is never cut off (SIGBUS); a file that is shorter than it says, or has
holes, is refused. A mapping costs about as much as a copy, so files and mappings are kept and used again.
"""

import fcntl
import mmap
import os
import stat
import struct
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt

from services.common import locks
from services.common.bundle import Buffer, memory
from services.common.errors import ConfigError, Exhausted, InvalidInput, NotFound, Unavailable

HEADER_BYTES = 4096
SUFFIX = ".flat"
_HEADER = struct.Struct("<8sQQ")  # magic, generation (0: being written), length
_MAGIC = b"dvlaflt1"
OWNER_BYTE = 0
"""Whoever owns a file holds the lock on this byte of it."""
_POLL_SECONDS = 0.02


class FlatFile:
    """An open flat file. Offsets count from the first byte after the header. Close it, or use it in a `with`."""

    def __init__(self, path: Path, fd: int) -> None:
        self.path = path
        self.length = 0
        self._fd = fd
        self._generation = 0
        self._view: npt.NDArray[np.uint8] | None = None

    @classmethod
    def create(cls, folder: Path, prefix: str) -> Self:
        """Make a new private (0600) file, own it and lock it exclusively. Its name begins with the prefix."""
        while True:
            path = folder / f"{prefix}-{os.urandom(6).hex()}{SUFFIX}"
            file = cls(path, os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
            # A sweep may come between: then the file is gone, and the next name will do.
            if locks.try_lock(file._fd, OWNER_BYTE) and path.exists() and file.try_lock_exclusive():
                return file
            file.close()

    @property
    def name(self) -> str:
        """What a peer needs to open it."""
        return self.path.name

    @property
    def inode(self) -> int:
        """Inode number, for the kernel's list of locks."""
        return os.fstat(self._fd).st_ino

    @classmethod
    def open_shared(cls, folder: Path, name: str, generation: int, length: int, seconds: float = 5.0) -> Self:
        """Open a file named by a peer for reading and hold the shared lock.

        Raises InvalidInput for a name that is a path, NotFound if the file is absent or was filled anew, and
        Unavailable if a writer keeps it locked.
        """
        file = cls(folder / name, open_named(folder, name))
        try:
            file._expect(generation, length)  # a stale handle need not wait for the lock
            file.lock_shared(seconds)
            file._expect(generation, length)
        except BaseException:
            file.close()
            raise
        return file

    def lock_shared(self, seconds: float) -> None:
        """Wait for the shared lock; raises Unavailable when the time is over."""
        deadline = time.monotonic() + seconds
        while not _try_lock(self._fd, fcntl.LOCK_SH):
            if time.monotonic() > deadline:
                raise Unavailable(f"shared-memory file {str(self.path)!r} was locked by its writer for {seconds} s")
            time.sleep(_POLL_SECONDS)

    def try_lock_exclusive(self) -> bool:
        """Take the exclusive lock if nobody reads."""
        return _try_lock(self._fd, fcntl.LOCK_EX)

    def unlock(self) -> None:
        """Let go of the lock."""
        fcntl.flock(self._fd, fcntl.LOCK_UN)

    def start(self, length: int) -> None:
        """Begin a filling of `length` bytes: invalidates old handles, then reserves the room.

        Raises Exhausted at once if the file system has no room for it.
        """
        os.pwrite(self._fd, _HEADER.pack(_MAGIC, 0, length), 0)
        try:
            os.posix_fallocate(self._fd, 0, HEADER_BYTES + length)
        except OSError as error:
            raise Exhausted(f"no room for {length} bytes in {str(self.path.parent)!r}: {error.strerror}") from error
        if os.fstat(self._fd).st_size != HEADER_BYTES + length:
            self._view = None
            os.truncate(self._fd, HEADER_BYTES + length)
        self.length = length

    def finish(self, length: int) -> int:
        """End a filling; returns its generation, higher than any before on this machine."""
        self._generation = max(self._generation + 1, time.time_ns())  # the clock may be set back
        os.pwrite(self._fd, _HEADER.pack(_MAGIC, self._generation, length), 0)
        return self._generation

    @property
    def view(self) -> npt.NDArray[np.uint8]:
        """The bytes, mapped; writable if this process made the file. Valid as long as somebody keeps it."""
        if self._view is None or self._view.size != self.length:
            self._view = None
            self._view = mapped(self._fd, self.length, writable=bool(fcntl.fcntl(self._fd, fcntl.F_GETFL) & os.O_RDWR))
        return self._view

    def write(self, offset: int, data: Buffer) -> None:
        """Write all of `data`; raises InvalidInput if it reaches beyond the end."""
        view = memory(data)
        if offset < 0 or offset + len(view) > self.length:
            raise InvalidInput(f"bytes {offset} to {offset + len(view)} do not fit into {self.length}")
        self.view[offset : offset + len(view)] = np.frombuffer(view, np.uint8)

    @property
    def key(self) -> tuple[int, int, int]:
        """Device, inode and length: what a mapping of it is known by."""
        facts = os.fstat(self._fd)
        return facts.st_dev, facts.st_ino, self.length

    @property
    def gone(self) -> bool:
        """Whether it has been deleted."""
        return os.fstat(self._fd).st_nlink == 0

    def remove(self) -> None:
        """Delete the file and close; readers that have it open keep its bytes."""
        self.path.unlink(missing_ok=True)
        self.close()

    def close(self) -> None:
        """Close; this frees the locks."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _expect(self, generation: int, length: int) -> None:
        facts = os.fstat(self._fd)
        if not stat.S_ISREG(facts.st_mode):
            raise InvalidInput(f"{str(self.path)!r} is no regular file")
        raw = os.pread(self._fd, _HEADER.size, 0)
        room = min(facts.st_size, facts.st_blocks * 512)
        if len(raw) < _HEADER.size or room < HEADER_BYTES + length:
            raise InvalidInput(f"{str(self.path)!r} is shorter than the {length} bytes announced, or has holes")
        magic, found, size = _HEADER.unpack(raw)
        if magic != _MAGIC or size != length:
            raise InvalidInput(f"{str(self.path)!r} is no flat file of {length} bytes")
        if not generation or found != generation:
            raise NotFound(f"{str(self.path)!r} holds generation {found}; {generation} was asked for")
        self.length = length

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def shared_folder(path: str) -> Path:
    """The folder of shared files, made private to this user if absent; by default one on /dev/shm.

    Raises ConfigError if it cannot be used.
    """
    folder = Path(path or f"/dev/shm/dvla-{os.getuid()}")
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"shared folder {str(folder)!r} cannot be made: {error.strerror}; name another") from error
    if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
        raise ConfigError(f"shared folder {str(folder)!r} is not ours to use; name another or change its owner")
    return folder


def open_named(folder: Path, name: str, writable: bool = False) -> int:
    """A descriptor of a file that a peer named. Raises InvalidInput for a path, NotFound if it cannot be opened."""
    if not name or "/" in name or "\0" in name or name.startswith("."):
        raise InvalidInput(f"shared-memory file {name!r} is not a plain file name")
    try:
        # Not blocking: a peer could name a FIFO.
        access = os.O_RDWR if writable else os.O_RDONLY
        return os.open(folder / name, access | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise NotFound(f"shared-memory file {str(folder / name)!r} cannot be opened: {error.strerror}") from error


def mapped(fd: int, length: int, writable: bool = False) -> npt.NDArray[np.uint8]:
    """The bytes after the header, mapped. Unmapped when the last view is gone."""
    if not length:
        return np.empty(0, np.uint8)
    # mmap keeps a duplicate of the descriptor, and with it the locks: give it one of its own.
    own = os.open(f"/proc/self/fd/{fd}", (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC)
    try:
        access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        # Populated at once: that costs less than a fault for each page in the middle of a copy.
        pages = mmap.mmap(own, HEADER_BYTES + length, mmap.MAP_SHARED | mmap.MAP_POPULATE, access)
    finally:
        os.close(own)
    return np.frombuffer(pages, np.uint8, length, HEADER_BYTES)


class Mappings:
    """Read-only mappings of other processes' files, kept because those files are filled again and again."""

    def __init__(self) -> None:
        self._kept: dict[tuple[int, int, int], tuple[Path, npt.NDArray[np.uint8]]] = {}
        self._lock = threading.Lock()

    def of(self, file: FlatFile) -> npt.NDArray[np.uint8]:
        """The bytes of a file that the caller holds locked, for as long as it does."""
        with self._lock:
            self._prune()
            key = file.key
            if key not in self._kept:
                self._kept[key] = (file.path, file.view)
            return self._kept[key][1]

    def prune(self) -> None:
        """Let go of files that are deleted, or their memory would never come back."""
        with self._lock:
            self._prune()

    def _prune(self) -> None:
        for key, (path, _) in list(self._kept.items()):
            try:
                facts = path.stat()
            except OSError:
                facts = None
            if facts is None or (facts.st_dev, facts.st_ino, facts.st_size - HEADER_BYTES) != key:
                del self._kept[key]


def sweep(folder: Path) -> list[str]:
    """Remove the flat files whose owners died and that nobody reads; returns their names."""
    gone = []
    for path in sorted(folder.glob(f"*{SUFFIX}")):
        try:
            fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:  # removed meanwhile, or another user's
            continue
        try:
            if locks.try_lock(fd, OWNER_BYTE) and _try_lock(fd, fcntl.LOCK_EX):
                path.unlink(missing_ok=True)
                gone.append(path.name)
        finally:
            os.close(fd)
    return gone


def _try_lock(fd: int, kind: int) -> bool:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
