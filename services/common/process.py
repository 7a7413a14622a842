"""Child processes that never outlive their parent, and the identity of this machine."""

import ctypes
import os
import signal
from pathlib import Path

from services.common.errors import DvlaError

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int, sig: signal.Signals = signal.SIGKILL) -> None:
    """Ask the kernel to end this process when its parent ends, even by SIGKILL. Call first in a child.

    `parent` is the pid that the child expects: if the parent died before this call, the child exits at once.
    """
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(sig)) != 0:
        raise DvlaError(f"prctl(PR_SET_PDEATHSIG) failed: {os.strerror(ctypes.get_errno())}")
    if os.getppid() != parent:
        os._exit(1)


def boot_id() -> str:
    """The kernel's boot id: equal for all processes and containers on one running host."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
