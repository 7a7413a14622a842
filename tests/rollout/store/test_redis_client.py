"""The connection to Redis: lost replies, idle reads, absence, wrong addresses and passwords."""

import asyncio
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
from dvla.v1 import store_pb2 as s

from services.common.errors import ConfigError, Unavailable
from services.common.redis_server import RedisServer
from services.rollout.store.redis_client import RedisLink
from tests.rollout.conftest import StartRedis
from tests.rollout.store.conftest import OpenRun
from tests.rollout.store.harness import Clock, Harness, make_spec, name, new_store
from tests.rollout.store.proxy import SwallowingProxy

pytestmark = pytest.mark.redis


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="dvla-") as name:
        yield Path(name)


@pytest.mark.every_server
async def test_s15_lost_replies_double_nothing(redis_server: RedisServer, folder: Path, clock: Clock) -> None:
    """S15: 1,000 uploads; 1 in 20 replies to any script call is lost after it was executed."""
    chance = Random(15)
    spec = make_spec(group_size=10, groups_per_update=4, staleness=1, total_updates=25)
    async with SwallowingProxy(
        folder / "p.sock", redis_server.socket, lambda data: b"EVALSHA" in data and chance.random() < 0.05
    ) as proxy:
        run = Harness(new_store(proxy.url, clock), clock, spec)
        await run.open()
        trained: list[int] = []
        update, held = 0, []
        while update < 25:
            for job in await run.jobs(40, update):
                await run.append(job, float(job.key.member), update)
            held += await run.lease_from_cursor()
            if len(held) >= 4:
                update += 1
                await run.trained(update, held[:4])
                trained += held[:4]
                held = held[4:]
        stats = await run.stats()
        assert proxy.swallowed > 10
        assert trained == list(range(1, 101))
        assert stats.counters["trained_episodes"] == 1000
        assert stats.counters["accepted"] == 1000 + 10 * stats.complete_groups
        assert (stats.counters["superseded"], stats.counters["expired"]) == (0, 0)
        await run.store.close()


@pytest.mark.every_server
async def test_s16_idle_reads_neither_fail_nor_reconnect(
    redis_server: RedisServer, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S16: silence for many ping intervals; one subscription, no error, and then the first group at once."""
    monkeypatch.setattr("services.rollout.store.waiting._PING_SECONDS", 0.1)
    store = new_store(redis_server.url, clock)
    run = Harness(store, clock, make_spec(group_size=1))
    await run.open()
    (job,) = await run.jobs(1)
    listening = asyncio.create_task(store.wakeups.listen())
    waiting = asyncio.create_task(run.lease(wait=30.0))
    await asyncio.sleep(0.5)
    redis = store.link.client
    before = (await redis.info("stats"))["total_connections_received"]
    await asyncio.sleep(1.5)
    assert (await redis.info("stats"))["total_connections_received"] == before
    assert not waiting.done()
    await run.append(job)
    assert [group.group for group in await waiting] == [1]
    listening.cancel()
    await asyncio.gather(listening, return_exceptions=True)
    await store.close()


async def test_an_absent_redis_is_named_within_the_patience(folder: Path) -> None:
    link = RedisLink(f"unix://{folder}/nobody.sock", patience=0.3)
    with pytest.raises(ConfigError, match=r"nobody\.sock cannot be reached for connect"):
        await link.check()
    await link.close()


async def test_calls_fail_with_unavailable_while_redis_is_away_and_work_again(
    start_redis: StartRedis, clock: Clock
) -> None:
    server = start_redis()
    run = Harness(new_store(server.url, clock, patience=0.3), clock, make_spec())
    await run.open()
    server.kill()
    for call in (run.next_jobs(), run.lease(), run.stats(), run.renew("w0")):
        with pytest.raises(Unavailable):
            await call
    server.start()
    assert len(await run.jobs(2)) == 2
    await run.store.close()


async def test_a_frozen_redis_ends_no_call_for_ever_and_loses_nothing(
    start_redis: StartRedis, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped, it accepts connections and answers nothing; woken, it executes what it was sent, also repeated calls."""
    monkeypatch.setattr("services.rollout.store.redis_client.COMMAND_SECONDS", 0.2)
    server = start_redis()
    run = Harness(new_store(server.url, clock, patience=0.5), clock, make_spec())
    await run.open()
    first, second = await run.jobs(2)
    server.signal(signal.SIGSTOP)
    with pytest.raises(Unavailable, match="no answer in time"):
        await run.append(first, 0.0)
    server.signal(signal.SIGCONT)
    await run.append(first, 0.0)
    await run.append(second, 1.0)
    (group,) = await run.lease()
    assert await run.fetch(group.claims) == [repr(name(job)).encode() for job in (first, second)]
    assert await run.counter("accepted") == 2
    await run.store.close()


@pytest.mark.parametrize("url", ["http://host", "localhost:6379", ""])
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="is no address"):
        RedisLink(url)


async def test_a_password_in_the_address_is_never_shown(folder: Path) -> None:
    link = RedisLink(f"unix://user:secret@{folder}/nobody.sock", patience=0.1)
    with pytest.raises(ConfigError) as error:
        await link.check()
    assert "secret" not in str(error.value)
    assert "user:***@" in str(error.value)
    await link.close()


async def test_passwords(start_redis: StartRedis) -> None:
    server = start_redis({"requirepass": "secret"})
    for password, accepted in (("secret", True), ("wrong", False), ("", False)):
        link = RedisLink(server.url, password, patience=0.3)
        if accepted:
            await link.check()
        else:
            with pytest.raises(ConfigError, match="redis_password_file"):
                await link.check()
        await link.close()


async def test_a_cancelled_call_leaves_a_usable_connection(open_run: OpenRun) -> None:
    run = await open_run()
    for _ in range(20):
        call = asyncio.create_task(run.stats())
        await asyncio.sleep(0)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
    assert [name(job) for job in await run.jobs(1)] == [(1, 0, 1)]
    assert (await run.store.get_run(s.GetRunRequest(run=run.run))).epoch == 1
