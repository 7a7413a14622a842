"""A flat file that several processes share: one header page, then bytes. Meant for tmpfs, works anywhere.

The writer holds an exclusive `flock` while it writes and gives every filling a new generation; a reader holds
a shared one while it copies and compares the generation, so a stale handle is detected. An OFD lock, which is
independent of `flock`, says that the file's owner lives. The kernel frees both when a process dies. Bytes move
by pread and pwrite: no mapping, so a full or truncated file is an error and never SIGBUS, and the interpreter
lock is free while they are copied.
"""

import fcntl
import os
import stat
import struct
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from services.common.bundle import PIECE, Buffer, memory
from services.common.errors import ConfigError, Exhausted, InvalidInput, NotFound, Unavailable

HEADER_BYTES = 4096
SUFFIX = ".flat"
_HEADER = struct.Struct("<8sQQ")  # magic, generation (0: being written), length
_MAGIC = b"dvlaflt1"
_OWNER_LOCK = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 1, 0)  # struct flock: the first byte
_POLL_SECONDS = 0.02


class FlatFile:
    """An open flat file. Offsets count from the first byte after the header. Close it, or use it in a `with`."""

    def __init__(self, path: Path, fd: int) -> None:
        self.path = path
        self._fd = fd
        self._generation = 0

    @classmethod
    def create(cls, folder: Path, prefix: str) -> Self:
        """Make a new private (0600) file, own it and lock it exclusively. Its name begins with the prefix."""
        while True:
            path = folder / f"{prefix}-{os.urandom(6).hex()}{SUFFIX}"
            file = cls(path, os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
            # A sweep may come between: then the file is gone, and the next name will do.
            if _own(file._fd) and path.exists() and file.try_lock_exclusive():
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
        if not name or "/" in name or "\0" in name or name.startswith("."):
            raise InvalidInput(f"shared-memory file {name!r} is not a plain file name")
        path = folder / name
        try:
            # Not blocking: a peer could name a FIFO.
            file = cls(path, os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC))
        except OSError as error:
            raise NotFound(f"shared-memory file {str(path)!r} cannot be opened: {error.strerror}") from error
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
        os.truncate(self._fd, HEADER_BYTES + length)

    def finish(self, length: int) -> int:
        """End a filling; returns its generation, higher than any before on this machine."""
        self._generation = max(self._generation + 1, time.time_ns())  # the clock may be set back
        os.pwrite(self._fd, _HEADER.pack(_MAGIC, self._generation, length), 0)
        return self._generation

    def write(self, offset: int, data: Buffer) -> None:
        """Write all of `data`."""
        view = memory(data)
        done = 0
        while done < len(view):
            done += os.pwrite(self._fd, view[done : done + PIECE], HEADER_BYTES + offset + done)

    def read(self, offset: int, length: int) -> bytes:
        """Exactly these bytes; raises InvalidInput if the file ends before."""
        data = os.pread(self._fd, length, HEADER_BYTES + offset)
        if len(data) != length:
            raise InvalidInput(f"{str(self.path)!r} ends within bytes {offset} to {offset + length}")
        return data

    def read_into(self, buffer: Buffer) -> None:
        """Fill a writable buffer from offset 0."""
        view = memory(buffer)
        done = 0
        while done < len(view):
            count = os.preadv(self._fd, [view[done : done + PIECE]], HEADER_BYTES + done)
            if not count:
                raise InvalidInput(f"{str(self.path)!r} ends at byte {done} of {len(view)}")
            done += count

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
        if not stat.S_ISREG(os.fstat(self._fd).st_mode):
            raise InvalidInput(f"{str(self.path)!r} is no regular file")
        raw = os.pread(self._fd, _HEADER.size, 0)
        if len(raw) < _HEADER.size or os.fstat(self._fd).st_size < HEADER_BYTES + length:
            raise InvalidInput(f"{str(self.path)!r} is shorter than the {length} bytes announced")
        magic, found, size = _HEADER.unpack(raw)
        if magic != _MAGIC or size != length:
            raise InvalidInput(f"{str(self.path)!r} is no flat file of {length} bytes")
        if not generation or found != generation:
            raise NotFound(f"{str(self.path)!r} holds generation {found}; {generation} was asked for")

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


def sweep(folder: Path) -> list[str]:
    """Remove the flat files whose owners died; returns their names."""
    gone = []
    for path in sorted(folder.glob(f"*{SUFFIX}")):
        try:
            fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:  # removed meanwhile, or another user's
            continue
        try:
            if _own(fd):
                path.unlink(missing_ok=True)
                gone.append(path.name)
        finally:
            os.close(fd)
    return gone


def _own(fd: int) -> bool:
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _OWNER_LOCK)
    except (BlockingIOError, PermissionError):
        return False
    return True


def _try_lock(fd: int, kind: int) -> bool:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
