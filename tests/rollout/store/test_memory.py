"""Redis with a memory limit: refused early, never evicted, always able to train, ack and free."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from redis.exceptions import OutOfMemoryError

from services.common.errors import Exhausted, Unsupported
from services.rollout.store.memory import OVERHEAD, REFUSE_SHARE
from services.rollout.store.redis_client import RedisLink
from services.rollout.store.validate import required_memory
from tests.rollout.conftest import StartRedis
from tests.rollout.store.harness import Clock, Harness, make_spec, new_store

pytestmark = pytest.mark.redis

LIMIT = 64 * 2**20
EPISODE = b"x" * 2**20


@pytest.fixture
async def limited(start_redis: StartRedis, clock: Clock) -> AsyncIterator[Harness]:
    """A run in a Redis of 64 MB."""
    store = new_store(start_redis({"maxmemory": str(LIMIT)}).url, clock)
    run = Harness(store, clock, make_spec(group_size=1, groups_per_update=1, staleness=200, total_updates=1000))
    await run.open()
    yield run
    await store.close()


async def fill_up(run: Harness) -> int:
    """Append until the store refuses; returns how many were accepted."""
    accepted, refusal = 0, ""
    for job in await run.jobs(100):
        try:
            await run.append(job, data=EPISODE)
        except Exhausted as error:
            refusal = str(error)
            break
        accepted += 1
    assert "appends are refused from 85%" in refusal
    return accepted


@pytest.mark.every_server
async def test_s17_a_full_store_refuses_appends_and_loses_nothing(limited: Harness) -> None:
    accepted = await fill_up(limited)
    assert 30 < accepted < 60
    groups = await limited.lease(1000)
    assert len(groups) == accepted
    for update, group in enumerate(groups, 1):
        assert await limited.fetch(group.claims) == [EPISODE]
        await limited.trained(update, [group.group])
    assert len(await limited.ack(accepted)) == accepted
    for _ in range(100):  # Redis frees in the background
        if await limited.store.memory.share(fresh=True) < REFUSE_SHARE:
            break
        await asyncio.sleep(0.02)
    assert await limited.fill(5, accepted) != []


@pytest.mark.every_server
async def test_every_call_works_when_redis_is_at_its_limit(limited: Harness, clock: Clock) -> None:
    """Another tenant took the rest: commands that grow are refused, the scripts are not."""
    run = limited
    await run.fill(4)
    groups = await run.lease(3)
    redis = run.store.link.client
    await redis.config_set("maxmemory", "100kb")
    with pytest.raises(OutOfMemoryError):
        await redis.set("other", "x")
    await run.store.memory.share(fresh=True)
    assert (await run.next_jobs()).idle_reason == "memory"
    assert len(await run.lease()) == 1
    await run.trained(1, [groups[0].group])
    await run.nack(groups[1].group)
    assert len(await run.ack(1)) == 1
    assert len(await run.letters()) == 1
    await run.open(floor=run.epoch, resume=1)
    assert (await run.leased())[0] == groups[2].group
    assert await run.replay((await run.letters())[0].id) == groups[1].group
    clock.forward(5000)
    await run.store.sweep(run.run)
    assert await run.renew("w0") == 0
    assert (await run.stats()).counters["acked"] == 1
    await run.close()


async def test_under_pressure_the_oldest_trained_bytes_go_first(limited: Harness) -> None:
    run = limited
    accepted = await fill_up(run)
    groups = await run.leased(1000)
    for update, group in enumerate(groups, 1):
        await run.trained(update, [group])
    await run.store.make_room(run.run)
    assert await run.store.memory.share(fresh=True) < REFUSE_SHARE
    evicted = await run.counter("evicted")
    assert 0 < evicted < accepted
    reply = await run.open(floor=run.epoch)  # and now the learner falls back to the start
    assert list(reply.lost) == groups[:evicted]
    assert list(reply.rolled_back) == groups[evicted:]
    leased = await run.lease(1000)
    assert await run.fetch([claim for group in leased for claim in group.claims]) == [EPISODE] * len(reply.rolled_back)


async def test_an_append_makes_room_for_itself(limited: Harness) -> None:
    run = limited
    for job in await run.jobs(16):
        await run.append(job, data=EPISODE)
    for update, number in enumerate(await run.leased(), 1):
        await run.trained(update, [number])
    (job,) = await run.jobs(1, update=16)
    await run.store.memory.share(fresh=True)
    await run.store.link.client.config_set("maxmemory", int(run.store.memory.used / 0.9))
    await run.store.memory.share(fresh=True)
    await run.append(job, data=EPISODE, update=16)
    assert 0 < await run.counter("evicted") < 16
    (group,) = await run.lease()
    assert await run.fetch(group.claims) == [EPISODE]


@pytest.mark.parametrize("policy", ["allkeys-lru", "volatile-ttl"])
async def test_s17_a_redis_that_evicts_is_refused(start_redis: StartRedis, clock: Clock, policy: str) -> None:
    url = start_redis({"maxmemory-policy": policy}).url
    link = RedisLink(url)
    with pytest.raises(Unsupported, match=f"maxmemory-policy '{policy}'.*set maxmemory-policy noeviction"):
        await link.check()
    await link.close()
    run = Harness(new_store(url, clock), clock, make_spec())
    with pytest.raises(Unsupported, match="noeviction"):
        await run.open()
    await run.store.close()


async def test_a_redis_too_small_for_the_run_is_refused_with_the_size_needed(limited: Harness, clock: Clock) -> None:
    spec = make_spec(group_size=8, groups_per_update=4, staleness=1, episode_bytes=10**6)
    needed = required_memory(spec)
    assert needed >= 3 * 4 * 8 * 10**6 * OVERHEAD
    with pytest.raises(Unsupported, match=f"set maxmemory of Redis to {needed} bytes"):
        await Harness(limited.store, clock, spec).open()
