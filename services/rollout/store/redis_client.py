"""The connection to Redis: explicit timeouts, no hidden retries, and errors in our own words.

redis-py would by default re-issue a command ten times, also one that was executed and lost only its reply. Here
the driver never retries; `RedisLink.retrying` does, and is used only for calls that are idempotent: every script
is (by job key, attempt, request id, epoch or update), and so are writes and deletions of chunks under unique names.

Deadlines are ours too: with a socket timeout, redis-py sends through asyncio.wait_for, which on Python 3.11 can
swallow the cancellation of a task, and then a role never ends.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

import structlog
from redis import exceptions
from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.cluster import RedisCluster
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from services.common.errors import ConfigError, DvlaError, Exhausted, Unavailable, Unsupported
from services.rollout.store.config import redacted

log = structlog.get_logger()
T = TypeVar("T")

OLDEST_REDIS = (6, 2)
COMMAND_SECONDS = 5.0
"""Longest wait for the reply of one command; scripts take well under a millisecond."""
_READ_BYTES = 1024 * 1024  # twice as fast as the default for replies of a megabyte
_LOST = (
    *(exceptions.ConnectionError, exceptions.TimeoutError, exceptions.ReadOnlyError, TimeoutError),
    *(exceptions.RedisClusterException, exceptions.ClusterDownError),
)
_REFUSALS = ("MISCONF", "NOREPLICAS", "CLUSTERDOWN", "MASTERDOWN", "LOADING", "BUSY ")


class RedisLink:
    """A pool of connections to one Redis for commands.

    url: unix:///path, redis://host:port/db or rediss://host:port/db (TLS). password: overrides that of the url.
    patience: seconds for which a lost connection is re-tried before a call fails with Unavailable. tls: certificate
    files for rediss://, by the driver's names. A cluster is found out by `check`.
    """

    def __init__(
        self,
        url: str,
        password: str = "",
        patience: float = 10.0,
        connections: int = 64,
        tls: Mapping[str, str] | None = None,
    ) -> None:
        self.url = url
        self.address = redacted(url)  # the only form that may be shown
        self._password = password
        self._tls = dict(tls or {})
        self._patience = patience
        self.cluster = False
        self.client: Any = self.new_client(connections)

    def new_client(self, connections: int = 1) -> Redis:
        """A client with connections of its own, such as for a subscription. Its calls need a deadline each."""
        options: dict[str, Any] = self._options()
        try:
            pool = BlockingConnectionPool.from_url(
                self.url,
                max_connections=connections,
                timeout=None,
                socket_timeout=None,
                socket_connect_timeout=2.0,
                socket_read_size=_READ_BYTES,
                retry=Retry(NoBackoff(), 0),
                protocol=2,  # Redis 6.2 speaks it too, and replies have one shape everywhere
                **options,
            )
        except ValueError as error:
            raise ConfigError(
                f"redis = {self.address!r} is no address ({error}); expected unix:///path, redis://host:port or rediss://..."
            ) from error
        return Redis(connection_pool=pool)

    async def check(self) -> None:
        """Wait for Redis, then refuse one that is too old or may evict keys.

        Raises:
            ConfigError: it does not answer within the patience.
            Unsupported: too old, or maxmemory-policy is not noeviction.
        """
        try:
            info = await self.retrying("connect", lambda: self.client.info())
        except Unavailable as error:
            raise ConfigError(
                f"{error} Start a Redis or Valkey server there, or let `redis` name the address of one that runs"
            ) from error
        version = tuple(int(part) for part in str(info["redis_version"]).split(".")[:2])
        if version < OLDEST_REDIS:
            raise Unsupported(f"Redis at {self.address} is {info['redis_version']}; expected 6.2 or newer, or Valkey")
        check_policy(str(info["maxmemory_policy"]))
        if int(info.get("cluster_enabled", 0)) and not self.cluster:
            await self.client.aclose()
            self.client, self.cluster = self._new_cluster_client(), True
            for facts in await self.info("memory"):
                check_policy(str(facts["maxmemory_policy"]))

    async def info(self, section: str) -> list[dict[str, Any]]:
        """INFO of this Redis, of a cluster that of each of its primaries."""
        if not self.cluster:
            return [await self.retrying(f"INFO {section}", lambda: self.client.info(section))]
        nodes = RedisCluster.PRIMARIES
        found = await self.retrying(f"INFO {section}", lambda: self.client.info(section, target_nodes=nodes))
        return [found] if "redis_version" in found or "used_memory" in found else list(found.values())

    def _options(self) -> dict[str, Any]:
        return ({"password": self._password} if self._password else {}) | self._tls

    def _new_cluster_client(self) -> RedisCluster:
        """Follows slots to their nodes. Its own repetitions are harmless: all our commands are idempotent."""
        return RedisCluster.from_url(
            self.url,
            socket_timeout=None,
            socket_connect_timeout=2.0,
            protocol=2,
            **self._options(),
        )

    async def retrying(self, what: str, call: Callable[[], Awaitable[T]]) -> T:
        """Await `call()`, an idempotent one, again while the connection is lost; bounded backoff and time."""
        deadline = time.monotonic() + self._patience
        pause = 0.02
        while True:
            try:
                async with asyncio.timeout(COMMAND_SECONDS):
                    return await call()
            except _LOST as error:
                if _unauthorised(error):
                    raise ConfigError(
                        f"Redis at {self.address} refused us: {error}; set redis_password_file"
                    ) from error
                if time.monotonic() + pause > deadline:
                    raise Unavailable(
                        f"Redis at {self.address} cannot be reached for {what}: {str(error) or 'no answer in time'}"
                    ) from error
                log.debug("redis lost", what=what, error=repr(error))
            except exceptions.ResponseError as error:
                raise translated(error, what) from error
            await asyncio.sleep(pause)
            pause = min(pause * 2, 1.0)

    async def close(self) -> None:
        """Close all connections."""
        await self.client.aclose()
        if not self.cluster:
            await self.client.connection_pool.disconnect()


def _unauthorised(error: Exception) -> bool:
    """True for a wrong or missing password, also where the driver wraps it into a lost connection."""
    return isinstance(error, exceptions.AuthenticationError) or isinstance(
        error.__cause__, exceptions.AuthenticationError
    )


def check_policy(policy: str) -> None:
    """Refuse a Redis that evicts: it would drop whole streams, not entries."""
    if policy != "noeviction":
        raise Unsupported(
            f"Redis has maxmemory-policy {policy!r} and may drop accepted work; set maxmemory-policy noeviction"
        )


def translated(error: exceptions.ResponseError, what: str) -> Exception:
    """Our error for an error reply, or the error itself if it is a programming error."""
    text = str(error)
    if isinstance(error, exceptions.OutOfMemoryError) or "OOM command not allowed" in text:
        return Exhausted(f"Redis is at its memory limit and refused {what}; raise maxmemory or wait for the learner")
    if text.startswith(_REFUSALS):
        return Unavailable(f"Redis refused {what}: {text}")
    if isinstance(error, exceptions.NoPermissionError):
        return ConfigError(f"Redis refused {what}: {text}; give its user this permission")
    return DvlaError(f"Redis answered {what} with an error: {text}")
