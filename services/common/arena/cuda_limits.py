"""What forbids CUDA IPC on this machine, in words. Looks at files and settings only; nothing here calls CUDA."""

import os
from pathlib import Path

from dvla.v1 import common_pb2 as pb

from services.common.process import boot_id

_DRIVER = Path("/proc/driver/nvidia/version")
_TEGRA = Path("/etc/nv_tegra_release")
_ALLOCATOR_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def impossible(uuid: str = "") -> str:
    """Why no process here can share GPU memory, or not that of the GPU `uuid`; empty if nothing speaks against it."""
    if not _DRIVER.exists():
        return "no NVIDIA driver is loaded"
    if _TEGRA.exists():
        return "integrated GPUs do not support CUDA IPC"
    if uuid.startswith("MIG-"):
        return f"{uuid} is a MIG slice, whose memory cannot be shared"
    for name in _ALLOCATOR_SETTINGS:
        if "expandable_segments:true" in os.environ.get(name, "").lower().replace(" ", ""):
            return f"{name} asks for expandable segments, whose memory cannot be shared; unset it"
    return ""


def unreachable(theirs: pb.Locality, uuid: str) -> str:
    """Why a peer cannot open memory of our GPU `uuid`; empty if nothing speaks against trying."""
    if theirs.boot_id != boot_id():
        return "the peer runs on another machine (other boot id)"
    if uuid not in theirs.gpu_uuids:
        seen = ", ".join(theirs.gpu_uuids) or "none"
        return f"the peer does not use GPU {uuid} (it uses {seen}); memory of another GPU cannot be opened"
    if theirs.pid_namespace and theirs.pid_namespace != pid_namespace():
        return "the peer is in another process id namespace; share it (pid: in compose, hostPID in Kubernetes)"
    return impossible(uuid)


def pid_namespace() -> int:
    """Inode of this process's pid namespace: CUDA IPC works inside one only."""
    return os.stat("/proc/self/ns/pid").st_ino
