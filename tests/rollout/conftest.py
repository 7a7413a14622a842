"""A private Redis-protocol server on a Unix socket, one for all tests of a process or one for a single test.

`DVLA_TEST_REDIS` may list other server binaries, separated by ":"; all tests then run once against each of them.
`DVLA_MORE_REDIS` may list some in the same way for tests marked `every_server`, which run against the embedded server
and each redis-server and valkey-server on PATH in any case.
"""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from services.common.redis_server import RedisServer, find_binary

StartRedis = Callable[..., RedisServer]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "redis_binary" in metafunc.fixturenames:
        binaries = os.environ.get("DVLA_TEST_REDIS", "").split(":")
        if metafunc.definition.get_closest_marker("every_server") and binaries == [""]:
            binaries = every_server()
        metafunc.parametrize("redis_binary", binaries, ids=[Path(b).name or "found" for b in binaries], scope="session")


def every_server() -> list[str]:
    """The binaries found: that of the embedded default, those on PATH, and those that the environment names."""
    more = os.environ.get("DVLA_MORE_REDIS", "").split(":")
    on_path = [shutil.which(name) for name in ("redis-server", "valkey-server")]
    found = [str(Path(binary).absolute()) for binary in [find_binary(), *on_path, *more] if binary]
    return list(dict.fromkeys(found))


@pytest.fixture(scope="session")
def redis_server(redis_binary: str) -> Iterator[RedisServer]:
    """One server for all tests: use run names of your own, and do not stop it."""
    with tempfile.TemporaryDirectory(prefix="dvla-") as folder:
        server = RedisServer(Path(folder) / "redis", redis_binary)
        server.start()
        yield server
        server.stop()


@pytest.fixture
def start_redis(redis_binary: str) -> Iterator[StartRedis]:
    """Starts servers of this test's own; options by name, such as {"maxmemory": "64mb"}."""
    servers: list[RedisServer] = []
    with tempfile.TemporaryDirectory(prefix="dvla-") as folder:

        def start(options: Mapping[str, str] | None = None) -> RedisServer:
            server = RedisServer(Path(folder) / str(len(servers)), redis_binary, options)
            server.start()
            servers.append(server)
            return server

        yield start
        for server in servers:
            server.stop()
