"""What a rollout store can be told."""

import re
import socket
from dataclasses import dataclass
from pathlib import Path

from services.common.config import RoleConfig, check_address
from services.common.errors import ConfigError

BYTES_IN = ("auto", "shm", "redis")


def redacted(url: str) -> str:
    """The address without its password, for messages and status."""
    return re.sub(r"(://[^:@/]*):[^@]*@", r"\1:***@", url)


@dataclass(frozen=True, kw_only=True)
class StoreConfig(RoleConfig):
    """A replica of the rollout store. It keeps nothing itself: replicas over one Redis are equal."""

    listen: str = "127.0.0.1:50052"

    redis: str = "redis://127.0.0.1:6379/0"
    """Redis 6.2 or newer, or Valkey: unix:///path/to.sock, redis://host:port/db or rediss://host:port/db (TLS). For a
    cluster, the address of any of its nodes."""
    redis_password_file: str = ""
    """File with the password of Redis; empty if it is part of `redis` or there is none."""
    redis_ca: str = ""
    """PEM certificate authority that signed the certificate of Redis (rediss://). Default: the system's authorities."""
    redis_cert: str = ""
    """PEM certificate to show to a Redis that asks for one."""
    redis_key: str = ""
    """PEM private key of redis_cert."""
    redis_patience_seconds: float = 10.0
    """Time for which a lost Redis is waited for before calls fail with UNAVAILABLE."""

    bytes_in: str = "auto"
    """Where trajectories lie: shm (this replica's arena in shared memory), redis, or auto: in the arena those of
    workers that share it, while there is room, all others in Redis. With shm, an arena too small for a run is
    refused."""
    arena_bytes: int = 0
    """Size of the arena. 0: with shm what the first run needs; with auto 16 MiB, doubled when full, up to a
    quarter of the free shared memory."""
    shared_folder: str = ""
    """Folder of the arena, on tmpfs; workers and learner in the same one take bytes through it. Default: dvla-UID in
    /dev/shm."""
    advertise: str = ""
    """Address at which other replicas reach this one for bytes in its arena. Default: `listen`, with this host's name
    in place of a wildcard."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.redis.startswith(("unix://", "redis://", "rediss://")):
            raise ConfigError(
                f"redis = {redacted(self.redis)!r}; expected unix:///path, redis://host:port/db or rediss://host:port/db"
            )
        if (self.redis_ca or self.redis_cert) and not self.redis.startswith("rediss://"):
            raise ConfigError(f"redis_ca and redis_cert are for rediss:// addresses, not {redacted(self.redis)!r}")
        if bool(self.redis_cert) != bool(self.redis_key):
            raise ConfigError("redis_cert and redis_key come together; one of them is missing")
        if not 0 < self.redis_patience_seconds <= 600:
            raise ConfigError(f"redis_patience_seconds = {self.redis_patience_seconds}; expected above 0, at most 600")
        if self.bytes_in not in BYTES_IN:
            raise ConfigError(f"bytes_in = {self.bytes_in!r}; expected one of {', '.join(BYTES_IN)}")
        if self.arena_bytes < 0:
            raise ConfigError(f"arena_bytes = {self.arena_bytes}; expected 0 or more")
        if self.advertise:
            check_address("advertise", self.advertise)

    def reachable(self) -> str:
        """The address for other replicas."""
        host, _, port = self.listen.rpartition(":")
        wildcard = host in ("0.0.0.0", "[::]", "*")
        return self.advertise or (f"{socket.gethostname()}:{port}" if wildcard else self.listen)

    def redis_tls(self) -> dict[str, str]:
        """Files for a TLS connection to Redis, as the driver names them. Raises ConfigError if one is missing."""
        files = {"ssl_ca_certs": self.redis_ca, "ssl_certfile": self.redis_cert, "ssl_keyfile": self.redis_key}
        for path in filter(None, files.values()):
            if not Path(path).is_file():
                raise ConfigError(f"TLS file {path!r} of Redis does not exist")
        return {name: path for name, path in files.items() if path}

    def redis_password(self) -> str:
        """The password of Redis, empty for none."""
        if not self.redis_password_file:
            return ""
        try:
            password = Path(self.redis_password_file).read_text().strip()
        except OSError as error:
            raise ConfigError(
                f"redis_password_file = {self.redis_password_file!r} cannot be read: {error.strerror}"
            ) from error
        if not password:
            raise ConfigError(
                f"redis_password_file = {self.redis_password_file!r} is empty; write the password into it"
            )
        return password
