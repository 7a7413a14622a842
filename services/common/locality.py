"""Which transport two peers use for tensors, and why: a handshake, then a probe. A host name proves nothing.

The client says where it runs: boot id, the GPUs it sees, the transports it accepts, best first, and the name of a
probe file in its shared-memory folder with a nonce. The server takes the first transport that it offers and that
nothing speaks against; for shared memory it has to read the nonce from the file in its own view of the folder.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import structlog
from dvla.v1 import common_pb2 as pb

from services.common import locks
from services.common.arena import Peer
from services.common.arena.cuda_limits import pid_namespace
from services.common.errors import ConfigError, DvlaError, Unsupported
from services.common.flatfile import open_named, shared_folder
from services.common.process import boot_id

log = structlog.get_logger()

GRPC, SHM, CUDA_IPC = pb.TRANSPORT_GRPC, pb.TRANSPORT_SHM, pb.TRANSPORT_CUDA_IPC
NAMES = {"cuda_ipc": CUDA_IPC, "shm": SHM, "grpc": GRPC}
"""Transports between processes, best first."""
SETTINGS = ("auto", *NAMES)
NONCE_BYTES = 16
_SUFFIX = ".probe"

Objection = Callable[[], str]
"""Why a transport is impossible; empty if it is possible."""


def accepted(setting: str) -> list["pb.Transport.ValueType"]:
    """The transports that a setting allows, best first. Raises ConfigError for a setting that there is not."""
    if setting not in SETTINGS:
        raise ConfigError(f"transport = {setting!r}; expected one of {', '.join(SETTINGS)}")
    return list(NAMES.values()) if setting == "auto" else [NAMES[setting]]


def name_of(transport: "pb.Transport.ValueType") -> str:
    """The name that settings and logs use."""
    return pb.Transport.Name(transport).removeprefix("TRANSPORT_").lower()


@dataclass(frozen=True)
class Choice:
    """A transport and, in words, why it and none of the better ones."""

    transport: "pb.Transport.ValueType"
    reason: str


def choose(
    wanted: Sequence["pb.Transport.ValueType"], offers: Mapping["pb.Transport.ValueType", Objection], why: str = ""
) -> Choice:
    """The first wanted transport that is offered and possible. Raises Unsupported if there is none.

    why: what speaks for a transport other than grpc once nothing speaks against it.
    """
    against: list[str] = []
    for transport in [item for item in wanted if item] or [GRPC]:
        offer = offers.get(transport)
        objection = "not offered by this side" if offer is None else offer()
        if not objection:
            reasons = [*against, *([why] if why and transport != GRPC else [])]
            return Choice(transport, "; ".join(reasons) or "asked for")
        against.append(f"no {name_of(transport)}: {objection}")
    names = ", ".join(name_of(transport) for transport in offers)
    raise Unsupported(f"{'; '.join(against)}; this side offers {names}")


def unreachable(theirs: pb.Locality, folder: Path | None) -> str:
    """Why a peer's shared-memory folder is not ours; empty if its probe was read back."""
    if folder is None:
        return "no shared-memory folder here"
    if not theirs.probe_file:
        return "the peer has no shared-memory folder"
    if theirs.boot_id != boot_id():
        return "the peer runs on another machine (other boot id)"
    try:
        fd = open_named(folder, theirs.probe_file)
    except DvlaError as error:
        return f"the peer has another view of shared memory ({error})"
    try:
        nonce = os.pread(fd, NONCE_BYTES + 1, 0)
    finally:
        os.close(fd)
    same = len(nonce) == NONCE_BYTES and nonce == theirs.probe_nonce
    return "" if same else f"the peer's probe file {theirs.probe_file!r} holds another nonce here"


class Vicinity:
    """Where this process is and which transports it accepts: what it tells its peers. Thread-safe; close it at the end.

    peer: opens extents of other processes' arenas, None without shared memory. nonce: bytes that a server which offers
    shared memory writes at the beginning of what it shares, so that both directions are probed.
    """

    def __init__(self, setting: str = "auto", folder: str = "") -> None:
        self._transports = accepted(setting)
        self.forced = setting != "auto"
        self.nonce = os.urandom(NONCE_BYTES)
        self.folder = self._find(folder) if SHM in self._transports else None
        self._fd, self._path = -1, Path()
        self.peer: Peer | None = None
        if self.folder is not None:
            self.peer = Peer(self.folder)
            self._leave_probe(self.folder)

    def locality(self, *less: "pb.Transport.ValueType") -> pb.Locality:
        """The message, without some of the transports."""
        impossible = {*less, *(() if self.peer else (SHM,))}
        return pb.Locality(
            boot_id=boot_id(),
            probe_file=self._path.name if self.peer else "",
            probe_nonce=self.nonce if self.peer else b"",
            pid_namespace=pid_namespace(),
            transports=[transport for transport in self._transports if transport not in impossible],
        )

    def close(self) -> None:
        """Delete the probe file and close what is open."""
        if self.peer is not None:
            self.peer.close()
        if self._fd >= 0:
            self._path.unlink(missing_ok=True)
            os.close(self._fd)
            self._fd = -1

    def _find(self, folder: str) -> Path | None:
        try:
            return shared_folder(folder)
        except ConfigError as error:
            if self.forced or folder:
                raise
            log.warning("no shared memory, tensors travel by grpc", reason=str(error))
            return None

    def _leave_probe(self, folder: Path) -> None:
        _sweep(folder)
        self._path = folder / f"{os.urandom(6).hex()}{_SUFFIX}"
        self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        locks.try_lock(self._fd, 0)
        os.pwrite(self._fd, self.nonce, 0)


def _sweep(folder: Path) -> None:
    """Delete the probes of dead processes. One that is in the making may go too: its owner then uses grpc."""
    for path in folder.glob(f"*{_SUFFIX}"):
        try:
            fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:  # removed meanwhile, or another user's
            continue
        if locks.try_lock(fd, 0):
            path.unlink(missing_ok=True)
        os.close(fd)
