"""Redis that loses things: all of it, its stream, entries of the stream, its scripts, its process."""

import asyncio
from pathlib import Path

import pytest

from services.common.errors import NotFound
from services.rollout.store.machine import RolloutStore
from tests.rollout.conftest import StartRedis
from tests.rollout.store.conftest import OpenRun
from tests.rollout.store.harness import Clock, Harness, make_spec, new_store

pytestmark = pytest.mark.redis


async def wipe(run: Harness) -> None:
    """What a replaced Redis looks like to one run."""
    redis = run.store.link.client
    keys = await redis.keys(f"dvla:{{{run.run}}}:*")
    await redis.delete(*keys)


@pytest.mark.every_server
async def test_s19_a_run_goes_on_in_an_empty_redis(open_run: OpenRun) -> None:
    run = await open_run(staleness=1)
    await run.open(floor=4)  # epoch 5
    await run.fill(4)
    groups = await run.leased()
    await run.trained(1, groups[:2])
    await wipe(run)
    for call in (run.lease(), run.trained(2, groups[2:]), run.ack(1), run.next_jobs(), run.renew("w0")):
        with pytest.raises(NotFound, match="open it"):
            await call
    reply = await run.open(floor=run.epoch, resume=1)
    assert (reply.epoch, reply.update) == (6, 1)
    await run.trained(2, groups[2:])  # was being trained meanwhile; what it was made of is lost here, and counted
    assert await run.counter("lost") == 2
    fresh = await run.fill(2, 2)
    assert min(fresh) > max(groups), "old numbers may stand in a checkpoint as trained"
    assert await run.leased() == fresh
    await run.trained(3, fresh)
    assert await run.ack(3) == fresh


async def test_an_epoch_that_redis_never_granted_means_that_it_lost_its_data(open_run: OpenRun) -> None:
    run = await open_run()
    with pytest.raises(NotFound, match="knows epochs up to 1 only"):
        await run.lease(epoch=3)


async def test_s19_learners_racing_in_an_empty_redis(open_run: OpenRun, clock: Clock) -> None:
    """Each gets an epoch of its own, the group of consumers is made once, and only the last one is served."""
    run = await open_run()
    url = run.store.link.url
    await wipe(run)
    racers = [Harness(new_store(url, clock), clock, run.spec) for _ in range(3)]
    replies = await asyncio.gather(*(racer.open(floor=1) for racer in racers))
    assert sorted(reply.epoch for reply in replies) == [2, 3, 4]
    await run.fill(2)
    leased = await asyncio.gather(*(racer.leased() for racer in racers), return_exceptions=True)
    assert [groups for groups in leased if isinstance(groups, list)] == [[1 + 2**24, 2 + 2**24]]
    for racer in racers:
        await racer.store.close()


@pytest.mark.every_server
async def test_s18_a_trimmed_stream_loses_nothing(open_run: OpenRun) -> None:
    """S18: 50 unacked and 10 undelivered entries are trimmed, the consumer crashes; they were only pointers."""
    run = await open_run(groups_per_update=60, staleness=1)
    await run.fill(60)
    assert len(await run.leased(50)) == 50
    redis, stream = run.store.link.client, f"dvla:{{{run.run}}}:stream"
    await redis.xtrim(stream, maxlen=0, approximate=False)
    await run.open(floor=run.epoch)
    assert await run.leased() == list(range(1, 61))
    pending = await redis.xpending(stream, "learners")
    assert pending["pending"] == 60
    await run.trained(1, range(1, 61))
    await run.ack(1)
    assert (await redis.xpending(stream, "learners"))["pending"] == 0
    assert await run.counter("lost") == 0


async def test_entries_that_vanish_before_they_are_leased_come_back(open_run: OpenRun) -> None:
    run = await open_run()
    await run.fill(4)
    assert await run.leased(2) == [1, 2]
    await run.store.link.client.delete(f"dvla:{{{run.run}}}:stream")
    assert await run.leased() == [3, 4]
    await run.trained(1, [1, 2])
    await run.trained(2, [3, 4])
    assert await run.ack(2) == [1, 2, 3, 4]
    await run.fill(1, 2)
    assert await run.leased() == [5]


async def test_a_restarted_redis_with_data_loses_and_doubles_nothing(start_redis: StartRedis, clock: Clock) -> None:
    server = start_redis()
    store = new_store(server.url, clock)
    run = Harness(store, clock, make_spec())
    await run.open()
    first, *rest = await run.jobs(8)
    await run.append(first, 0.0)
    server.kill()
    appended = asyncio.create_task(run.append(rest[0], 1.0))
    await asyncio.sleep(0.2)
    assert not appended.done(), "it waits for Redis"
    server.start()
    assert not (await appended).repeated
    assert (await run.append(first, 0.0)).repeated
    for job in rest[1:]:
        await run.append(job, float(job.key.member))
    groups = await run.lease()
    assert [group.group for group in groups] == [1, 2, 3, 4]
    assert (await run.fetch(groups[0].claims)) == [b"(1, 0, 1)", b"(1, 1, 1)"]
    assert (await run.stats()).counters["accepted"] == 8
    await store.close()


async def test_two_replicas_act_as_one(open_run: OpenRun, clock: Clock) -> None:
    run = await open_run()
    other = Harness(new_store(run.store.link.url, clock), clock, run.spec)
    other.epoch = run.epoch
    jobs = [*await run.jobs(3), *await other.jobs(3, worker="w1"), *await run.jobs(9)]
    assert len({(job.key.group, job.key.member) for job in jobs}) == 8
    for index, job in enumerate(jobs):
        await (run, other)[index % 2].append(job, float(job.key.member))
    assert [await other.leased(1), await run.leased(2), await other.leased(9)] == [[1], [2, 3], [4]]
    await other.store.close()


async def test_scripts_survive_being_forgotten(store: RolloutStore, open_run: OpenRun) -> None:
    run = await open_run()
    await store.link.client.script_flush()
    assert len(await run.jobs(2)) == 2


def test_scripts_ship_with_the_package() -> None:
    import services.rollout.store.scripts as scripts

    assert {"append", "lease", "next_jobs", "open_run"} <= set(scripts.names())
    folder = Path(scripts.__file__).parent / "lua"
    assert {path.suffix for path in folder.iterdir()} == {".lua"}
