"""Settings of a rollout worker."""

from dataclasses import dataclass

from services.common.config import RoleConfig, check_address
from services.common.errors import ConfigError
from services.common.locality import accepted


@dataclass(frozen=True, kw_only=True)
class RolloutConfig(RoleConfig):
    """A worker drives simulator sessions of one run and needs nothing but addresses; the rest it reads from them."""

    listen: str = "127.0.0.1:50053"
    run: str = "default"
    """Run to work for."""
    store: str = "127.0.0.1:50052"
    """Address of the rollout store."""
    weights: str = "127.0.0.1:50054"
    """Address of the weights server or of this node's relay."""
    shared_folder: str = ""
    """Folder of shared memory, the same as the weights server's and the simulators'. Default: dvla-UID in /dev/shm."""
    spare_policy: bool = True
    """Load new weights into a second policy while the first one samples. Without it one policy's memory is saved,
    and sampling pauses for the copy."""
    sims: tuple[str, ...] = ("127.0.0.1:50051",)
    """Addresses of simulators. "dns:host:port" stands for every address behind that name, looked up again and
    again, so that new replicas are found; "file:path" stands for the addresses that a file lists, looked up as well."""
    transport: str = "auto"
    """How observations travel: auto takes shared memory where the simulator is on this machine and grpc elsewhere;
    shm or grpc allow nothing else."""
    sessions_per_sim: int = 2
    """Sessions kept open on each simulator; with two, inference for one overlaps the physics of the other."""
    threads: int = 1
    """CPU threads of inference."""
    device: str = "cpu"
    """torch device of inference: cpu, cuda or cuda:N."""
    max_batch: int = 256
    """Rows of one policy call; waiting requests of all sessions are joined up to this."""
    batch_wait: float = 0.0
    """Seconds that rows wait for rows of other sessions, to share a policy call; never longer than until all sessions
    have asked. Worth it with many small sessions; with two large ones it takes their overlap away."""
    pending_appends: int = 32
    """Finished episodes on their way to the store; sampling waits beyond that."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for field in ("sessions_per_sim", "threads", "max_batch", "pending_appends"):
            if getattr(self, field) < 1:
                raise ConfigError(f"{field} = {getattr(self, field)}; expected 1 or more")
        if not 0 <= self.batch_wait <= 1:
            raise ConfigError(f"batch_wait = {self.batch_wait}; expected 0 to 1 second")
        for field, address in (("store", self.store), ("weights", self.weights), *(("sims", sim) for sim in self.sims)):
            if field == "sims" and address.startswith("file:"):
                continue
            check_address(field, address)
        accepted(self.transport)
        if not self.sims:
            raise ConfigError("sims is empty; give at least one address, such as --sims 127.0.0.1:50051")
        kind, _, number = self.device.partition(":")
        if kind not in ("cpu", "cuda") or (":" in self.device and not (kind == "cuda" and number.isdecimal())):
            raise ConfigError(f"device = {self.device!r}; expected cpu, cuda or cuda:N")
