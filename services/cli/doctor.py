"""`dvla doctor`: what this machine can do for D-VLA, line by line, and the remedy for what is missing."""

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from services.common.errors import DvlaError

PROBE_SECONDS = 120.0
SHM = Path("/dev/shm")
LEAST_SHM_BYTES = 1 << 30
_VULKAN = """
import sapien
sapien.render.RenderMaterial()
lines = str(sapien.render.get_device_summary()).splitlines()
names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("GPU:")]
print(", ".join(names) or "a device without a name")
"""
"""Creating a material is the first thing that ManiSkill needs a device for, also without images."""


@dataclass(frozen=True)
class Finding:
    """One fact. needed: training on this machine is impossible without it."""

    what: str
    fine: bool
    text: str
    needed: bool = False


def examine() -> int:
    """Print all findings; returns 0 if nothing that is needed is missing."""
    broken = False
    for finding in findings():
        mark = "ok  " if finding.fine else ("FAIL" if finding.needed else "note")
        print(f"{mark}  {finding.what.ljust(14)}{finding.text}", flush=True)
        broken |= finding.needed and not finding.fine
    return int(broken)


def findings() -> Iterator[Finding]:
    """All findings, the quick ones first."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    cores = len(os.sched_getaffinity(0))
    yield Finding("machine", True, f"{platform.machine()}, {cores} cores, {memory:.0f} GiB, Linux {platform.release()}")
    version = sys.version_info
    yield Finding("python", (3, 11) <= version < (3, 13), f"{platform.python_version()} (3.11 or 3.12 needed)", True)
    for check in (_redis, _shared_memory, _torch, _maniskill, _vulkan):
        yield check()
    yield _transports()


def _redis() -> Finding:
    from services.common.redis_server import find_binary

    try:
        binary = find_binary()
    except DvlaError as error:
        return Finding("redis", False, str(error), True)
    return Finding("redis", True, _output(binary, "--version") or binary, True)


def _shared_memory() -> Finding:
    try:
        usage = shutil.disk_usage(SHM)
    except OSError as error:
        return Finding("shared memory", False, f"{SHM}: {error.strerror}; tensors go through gRPC instead")
    text = f"{SHM}: {usage.free / 2**30:.1f} of {usage.total / 2**30:.1f} GiB free"
    fine = usage.total >= LEAST_SHM_BYTES
    return Finding("shared memory", fine, text + ("" if fine else "; in a container give --shm-size=1g or more"))


def _torch() -> Finding:
    code = (
        "import torch; print(torch.__version__, torch.cuda.get_device_name(0) if torch.cuda.is_available() else 'CPU')"
    )
    text = _output(sys.executable, "-c", code)
    return Finding("torch", bool(text), text or "cannot be imported; pip install 'dvla[train]'", True)


def _maniskill() -> Finding:
    code = "from importlib.metadata import version; print(version('mani_skill'))"
    text = _output(sys.executable, "-c", code)
    return Finding("maniskill", bool(text), text or "not installed; pip install 'dvla[maniskill]'")


def _vulkan() -> Finding:
    text = _output(sys.executable, "-c", _VULKAN)
    remedy = (
        "no Vulkan device; install mesa-vulkan-drivers 24.3 or newer (Debian 12: from bookworm-backports), or the "
        "NVIDIA driver with its graphics part. The toy simulator works without"
    )
    return Finding("vulkan", bool(text), text or remedy)


def _transports() -> Finding:
    """Which ways tensors may take between roles here, each tried with a second process."""
    from services.cli.transports import summary

    return Finding("transports", *summary())


def _output(*command: str) -> str:
    """The last line that a command prints, empty if it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_SECONDS, check=True)
    except (subprocess.SubprocessError, OSError):
        return ""
    lines = [line.strip() for line in done.stdout.splitlines() if line.strip()]
    return lines[-1] if lines else ""
