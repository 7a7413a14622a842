"""Which transports work between two processes of this machine: each is tried, in both directions, as at run time."""

import subprocess
import sys
from pathlib import Path

from services.common.arena import Arena
from services.common.arena.cuda_limits import impossible
from services.common.errors import ConfigError, DvlaError
from services.common.flatfile import shared_folder
from services.common.locality import Vicinity

PROBE_SECONDS = 60.0
_PEER = """
import sys
from pathlib import Path
from dvla.v1 import common_pb2
from services.common.arena import Peer
from services.common.arena.ring import RingReader
from services.common.errors import DvlaError
from services.common.locality import unreachable
folder, locality, extent = Path(sys.argv[1]), *map(bytes.fromhex, sys.argv[2:])
theirs = common_pb2.Locality.FromString(locality)
try:
    problem = unreachable(theirs, folder)
    RingReader(Peer(folder), common_pb2.Extent.FromString(extent), theirs.probe_nonce).close()
except DvlaError as error:
    problem = str(error)
print(problem or "fine")
"""
"""What the other process does: read our probe, then our arena."""


def shared_memory(folder: str = "") -> str:
    """Why shared memory does not work between two processes here; empty if it does."""
    try:
        place = shared_folder(folder)
        arena = Arena.create(place, "doctor", 1 << 20, entries=4)
    except ConfigError as error:
        return str(error)
    vicinity = Vicinity("shm", folder)
    try:
        extent = arena.allocate(1 << 16)
        arena.view(extent)[: len(vicinity.nonce)] = list(vicinity.nonce)
        return _ask_peer(place, vicinity.locality().SerializeToString(), extent.message().SerializeToString())
    except DvlaError as error:
        return str(error)
    finally:
        vicinity.close()
        arena.remove()


def summary(folder: str = "") -> tuple[bool, str]:
    """Whether shared memory works, and one line about all transports, best first."""
    against_cuda, against_shm = impossible(), shared_memory(folder)
    parts = [
        f"cuda_ipc: {'no, ' + against_cuda if against_cuda else 'possible on one GPU'}",
        f"shm: {'no, ' + against_shm if against_shm else f'works in {shared_folder(folder)}'}",
        "grpc: always",
    ]
    return not against_shm, "; ".join(parts) + " (what a run took, and why, is in its report)"


def _ask_peer(folder: Path, locality: bytes, extent: bytes) -> str:
    command = [sys.executable, "-c", _PEER, str(folder), locality.hex(), extent.hex()]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_SECONDS, check=True)
    except (subprocess.SubprocessError, OSError) as error:
        return f"the second process failed: {error}"
    said = done.stdout.strip()
    return "" if said == "fine" else said
