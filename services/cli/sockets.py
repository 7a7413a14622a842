"""A short private folder for the Unix sockets of one run: a socket path may have 100 bytes, run folders are longer."""

import fcntl
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PREFIX = "dvla-"
LOCK = "lock"
YOUNG_SECONDS = 60.0
"""A folder this young may belong to a launcher that has not locked it yet."""


@contextmanager
def socket_folder(parent: Path | None = None) -> Iterator[Path]:
    """A new folder with mode 0700, removed at the end. Also removes the ones whose launcher was killed."""
    parent = parent or Path(tempfile.gettempdir())
    if len(str(parent)) > 60:
        parent = Path("/tmp")
    sweep(parent)
    folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
    try:
        # Python opens files close-on-exec, so the kernel frees the lock when this process ends, however it ends.
        with (folder / LOCK).open("wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def sweep(parent: Path) -> None:
    """Remove folders of launchers that are gone: nobody holds their lock."""
    for lock in parent.glob(f"{PREFIX}*/{LOCK}"):
        try:
            if time.time() - lock.parent.stat().st_ctime < YOUNG_SECONDS:
                continue
            with lock.open("ab") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(lock.parent, ignore_errors=True)
        except OSError:
            continue  # in use, or somebody else's
