"""Redis elsewhere: over TLS, with a password, and as a cluster of three nodes."""

import asyncio
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
from redis.asyncio import Redis

from services.common.errors import ConfigError, DvlaError, Unavailable
from services.common.redis_server import RedisServer
from services.rollout.store.config import StoreConfig
from services.rollout.store.machine import RolloutStore
from services.rollout.store.redis_client import RedisLink
from tests.rollout.conftest import StartRedis
from tests.rollout.store.harness import Clock, Harness, make_spec, name
from tests.rollout.store.tls import TlsProxy, make_certificates

pytestmark = pytest.mark.redis


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tls")
    make_certificates(folder)
    return folder


def link_to(settings: StoreConfig) -> RedisLink:
    return RedisLink(settings.redis, settings.redis_password(), 0.5, tls=settings.redis_tls())


@pytest.mark.parametrize("mutual", [False, True])
async def test_a_run_over_tls_with_a_password(
    start_redis: StartRedis, certificates: Path, clock: Clock, tmp_path: Path, mutual: bool
) -> None:
    server = start_redis({"requirepass": "secret"})
    (tmp_path / "password").write_text("secret\n")
    pair: dict[str, Any] = {"redis_cert": f"{certificates}/client.pem", "redis_key": f"{certificates}/client.key"}
    async with TlsProxy(server.socket, certificates, mutual) as proxy:
        common: dict[str, Any] = {"redis": f"rediss://localhost:{proxy.port}/0"}
        common["redis_password_file"] = str(tmp_path / "password")
        trusted = {**common, "redis_ca": f"{certificates}/ca.pem"} | (pair if mutual else {})
        link = link_to(StoreConfig(**trusted))
        await link.check()
        run = Harness(RolloutStore(link, clock), clock, make_spec())
        listening = asyncio.create_task(run.store.wakeups.listen())
        await run.open()
        await run.fill(2)
        assert await run.leased() == [1, 2]
        listening.cancel()
        await asyncio.gather(listening, return_exceptions=True)
        await run.store.close()

        strangers: list[dict[str, Any]] = [common, {**common, "redis_ca": f"{certificates}/other.pem"} | pair]
        if mutual:
            strangers.append({**common, "redis_ca": f"{certificates}/ca.pem"})
        for stranger in strangers:
            link = link_to(StoreConfig(**stranger))
            with pytest.raises(DvlaError):
                await link.check()
            await link.close()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"redis": "redis://h:1", "redis_ca": "/x.pem"}, "for rediss://"),
        ({"redis": "rediss://h:1", "redis_cert": "/x.pem"}, "come together"),
        ({"redis": "rediss://h:1", "redis_ca": "/no/such.pem"}, "does not exist"),
    ],
)
def test_tls_settings_that_cannot_be(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        StoreConfig(**settings).redis_tls()


@pytest.fixture
def cluster(start_redis: StartRedis) -> list[tuple[RedisServer, int]]:
    """Three nodes on loopback ports, each with a third of the slots once `joined`."""
    nodes = []
    for _ in range(3):
        port = free_port()
        options = {"port": str(port), "bind": "127.0.0.1", "cluster-enabled": "yes", "cluster-node-timeout": "2000"}
        nodes.append((start_redis(options), port))
    return nodes


def free_port() -> int:
    """A loopback port that is free, as is the one of the cluster's bus, 10,000 above."""
    for port in Random().sample(range(20000, 50000), 100):
        with socket.socket() as one, socket.socket() as other:
            try:
                one.bind(("127.0.0.1", port))
                other.bind(("127.0.0.1", port + 10000))
            except OSError:
                continue
            return port
    raise AssertionError("no free port")


async def joined(nodes: list[tuple[RedisServer, int]]) -> str:
    """Make one cluster of them; the address of one."""
    clients: list[Any] = [Redis.from_url(server.url) for server, _ in nodes]
    for number, client in enumerate(clients):
        slots = range(number * 16384 // 3, (number + 1) * 16384 // 3)
        await client.execute_command("CLUSTER ADDSLOTS", *slots)
        await client.execute_command("CLUSTER SET-CONFIG-EPOCH", number + 1)
    for _, port in nodes[1:]:
        await clients[0].execute_command("CLUSTER MEET", "127.0.0.1", port)
    for client in clients:
        while b"cluster_state:ok" not in await raw(client, "CLUSTER INFO"):
            await asyncio.sleep(0.05)
        while (await raw(client, "CLUSTER NODES")).count(b"connected") < 3:
            await asyncio.sleep(0.05)
        await client.aclose()
    return f"redis://127.0.0.1:{nodes[0][1]}"


async def raw(client: Any, command: str) -> bytes:
    """A reply as bytes, whatever the driver makes of it."""
    reply = await client.execute_command(command)
    if isinstance(reply, dict):
        return " ".join(f"{key}:{value}" for key, value in reply.items()).encode()
    return reply if isinstance(reply, bytes) else str(reply).encode()


@pytest.fixture
async def clustered(cluster: list[tuple[RedisServer, int]], clock: Clock) -> AsyncIterator[Harness]:
    async with asyncio.timeout(60):
        link = RedisLink(await joined(cluster))
        await link.check()
    run = Harness(RolloutStore(link, clock), clock, make_spec(staleness=3, total_updates=1000))
    yield run
    await run.store.close()


async def test_a_run_in_a_cluster(clustered: Harness, cluster: list[tuple[RedisServer, int]]) -> None:
    """Control keys of a run lie on one node, bytes on all; the learner crashes, and nothing is lost or doubled."""
    run = clustered
    assert run.store.link.cluster
    listening = asyncio.create_task(run.store.wakeups.listen())
    await run.open()
    data = b"x" * (2**20 + 2**19)
    for job in await run.jobs(16):
        await run.append(job, float(job.key.member), data=data)
    groups = await run.lease()
    assert [group.group for group in groups] == list(range(1, 9))
    assert await run.fetch([claim for group in groups[:2] for claim in group.claims]) == [data] * 4
    spread = [await keys_of(server) for server, _ in cluster]
    assert all(any(key.startswith("dvla:blob:") for key in keys) for keys in spread)
    assert sum(any(f"{{{run.run}}}" in key for key in keys) for keys in spread) == 1

    await run.trained(1, [1, 2])
    await run.trained(2, [3, 4])
    await run.ack(1)
    assert list((await run.open(floor=run.epoch, resume=1)).rolled_back) == [3, 4]
    assert [(group.group, group.trained_update) for group in await run.lease()] == [(n, 0) for n in range(3, 9)]
    await run.nack(8)
    (letter,) = await run.letters()
    assert await run.replay(letter.id) == 8
    for update, pair in ((2, [3, 4]), (3, [5, 6]), (4, [7, *await run.leased()])):
        await run.trained(update, pair)
    assert await run.ack(4) == [3, 4, 5, 6, 7, 8]
    await run.store.sweep(run.run)
    assert (await run.stats()).bytes == 0
    assert not [key for server, _ in cluster for key in await keys_of(server) if key.startswith("dvla:blob:")]
    waiting = asyncio.create_task(run.lease(wait=20.0))
    await asyncio.sleep(0.1)
    assert await run.fill(1, 4) == [9]
    assert [group.group for group in await waiting] == [9]
    listening.cancel()
    await asyncio.gather(listening, return_exceptions=True)


async def keys_of(server: RedisServer) -> list[str]:
    client: Any = Redis.from_url(server.url)
    keys = [key.decode() for key in await client.keys("*")]
    await client.aclose()
    return keys


async def test_a_lost_node_is_waited_for(clustered: Harness, cluster: list[tuple[RedisServer, int]]) -> None:
    run = clustered
    run.store.link._patience = 0.5
    await run.open()
    (job, other) = await run.jobs(2)
    for server, _ in cluster:
        server.kill()
    with pytest.raises(Unavailable):
        await run.append(job)
    for server, _ in cluster:
        server.start()
    run.store.link._patience = 30.0
    await run.append(job)
    await run.append(other, 0.0)
    (group,) = await run.lease()
    assert await run.fetch(group.claims) == [repr(name(done)).encode() for done in (job, other)]
