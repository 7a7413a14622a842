"""Byte-range locks of open file descriptions (Linux OFD locks): the sign of life between processes and containers.

They belong to the open file, not to a process id, so they hold across pid namespaces, the kernel frees them when the
last descriptor is closed or its process dies, and a stopped process keeps them. Two opens in one process exclude
each other as two processes do; through one open file the same byte can be locked once only.
"""

import fcntl
import os
import struct

_FLOCK = "hhqqi4x"  # struct flock: type, whence, start, length, pid (0 for these locks)


def try_lock(fd: int, start: int, length: int = 1, exclusive: bool = True) -> bool:
    """Lock bytes if no other open file holds a lock in the way. Exclusive locks need a writable descriptor."""
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _flock(fcntl.F_WRLCK if exclusive else fcntl.F_RDLCK, start, length))
    except (BlockingIOError, PermissionError):
        return False
    return True


def unlock(fd: int, start: int, length: int = 1) -> None:
    """Let go of these bytes."""
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _flock(fcntl.F_UNLCK, start, length))


def held_elsewhere(fd: int, start: int, length: int = 1) -> bool:
    """Whether another open file holds any lock on these bytes. Changes nothing."""
    answer = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _flock(fcntl.F_WRLCK, start, length))
    return bool(struct.unpack(_FLOCK, answer)[0] != fcntl.F_UNLCK)


def _flock(kind: int, start: int, length: int) -> bytes:
    return struct.pack(_FLOCK, kind, os.SEEK_SET, start, length, 0)
