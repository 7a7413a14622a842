"""What a rollout store can be told."""

import re
from dataclasses import dataclass
from pathlib import Path

from services.common.config import RoleConfig
from services.common.errors import ConfigError


def redacted(url: str) -> str:
    """The address without its password, for messages and status."""
    return re.sub(r"(://[^:@/]*):[^@]*@", r"\1:***@", url)


@dataclass(frozen=True, kw_only=True)
class StoreConfig(RoleConfig):
    """A replica of the rollout store. It keeps nothing itself: replicas over one Redis are equal."""

    listen: str = "127.0.0.1:50052"

    redis: str = "redis://127.0.0.1:6379/0"
    """Redis 6.2 or newer, or Valkey: unix:///path/to.sock, redis://host:port/db or rediss://host:port/db (TLS)."""
    redis_password_file: str = ""
    """File with the password of Redis; empty if it is part of `redis` or there is none."""
    redis_patience_seconds: float = 10.0
    """Time for which a lost Redis is waited for before calls fail with UNAVAILABLE."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.redis.startswith(("unix://", "redis://", "rediss://")):
            raise ConfigError(
                f"redis = {redacted(self.redis)!r}; expected unix:///path, redis://host:port/db or rediss://host:port/db"
            )
        if not 0 < self.redis_patience_seconds <= 600:
            raise ConfigError(f"redis_patience_seconds = {self.redis_patience_seconds}; expected above 0, at most 600")

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
