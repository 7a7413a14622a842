"""What a weights server can be told."""

from dataclasses import dataclass

from services.common.config import RoleConfig
from services.common.delta import DeltaRule
from services.common.errors import ConfigError

GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class WeightsConfig(RoleConfig):
    """A weights server keeps sealed versions in CPU memory. Without `upstream` it is the root."""

    listen: str = "127.0.0.1:50054"

    upstream: str = ""
    """Address of the weights server to relay from; empty for the root, which alone accepts publishes."""
    shared_folder: str = ""
    """Folder of the shared-memory files, on tmpfs; readers and publishers in the same one take bytes through it.
    Default: dvla-UID in /dev/shm."""
    durable_folder: str = ""
    """Folder on disk in which the newest version survives a restart; empty for none (a relay needs none)."""
    keep: int = 2
    """Newest versions of a model that stay readable."""
    budget_gib: float = 16.0
    """Memory for all versions together, in GiB."""
    max_files: int = 16
    """Files at once: `keep`, one that is being written, and one for each reader that may lag behind."""

    delta_density: float = 0.1
    """Largest share of changed elements for which a reader elsewhere gets a delta; 0 for never."""
    delta_anchor: int = 25
    """Every so many updates each reader gets the whole version."""

    @property
    def delta_rule(self) -> DeltaRule:
        """When a delta is worth it."""
        return DeltaRule(self.delta_density, self.delta_anchor)

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.delta_rule  # refuses impossible ones
        if self.keep < 1:
            raise ConfigError(f"keep = {self.keep}; expected 1 or more")
        if self.max_files < self.keep + 1:
            raise ConfigError(f"max_files = {self.max_files}; expected more than keep, which is {self.keep}")
        if not 0 < self.budget_gib < 2**20:
            raise ConfigError(f"budget_gib = {self.budget_gib}; expected more than 0")
        if self.upstream and self.upstream == self.listen:
            raise ConfigError(f"upstream = {self.upstream!r} is this server's own address; name the root's")
