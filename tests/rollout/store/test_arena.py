"""Bytes in shared memory: granted with jobs, kept when accepted, served by any replica, adopted, lost, freed."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from dvla.v1 import store_pb2 as s

from services.common.errors import Exhausted, NotFound, Unavailable, Unsupported
from services.common.redis_server import RedisServer
from services.rollout.store import depot as depot_module
from services.rollout.store import owners as owners_module
from services.rollout.store.depot import Depot
from tests.rollout.store.harness import Clock, make_spec, name
from tests.rollout.store.sites import Network, Site

pytestmark = pytest.mark.redis
LARGEST = 4096
Open = Callable[..., Awaitable[list[Site]]]


@pytest.fixture
async def open_sites(redis_server: RedisServer, clock: Clock, tmp_path: Path) -> AsyncIterator[Open]:
    """Opens a run on so many nodes; worker "w0" is on the first, "w1" on the second."""
    sites: list[Site] = []

    async def open_sites(count: int = 1, strict: bool = True, **changes: Any) -> list[Site]:
        spec, network = make_spec(**{"episode_bytes": LARGEST} | changes), Network()
        for number in range(count):
            site = Site(redis_server.url, clock, spec, tmp_path / str(number), network, strict)
            site.workers(f"w{number}")
            await site.start()
            sites.append(site)
        reply = await sites[0].run.open()
        for site in sites:
            site.run.epoch = reply.epoch
        return sites

    yield open_sites
    for site in sites:
        await site.close()


def used(site: Site) -> int:
    return sum(arena.capacity - arena.free for arena in site.depot.arenas.values())


async def test_a_job_brings_room_for_the_largest_episode_and_an_append_returns_the_tail(open_sites: Open) -> None:
    (site,) = await open_sites()
    jobs = await site.run.jobs(2)
    assert [job.reserved.length for job in jobs] == [LARGEST] * 2
    assert used(site) == 2 * LARGEST
    before = await site.run.blobs()
    await site.run.append(jobs[0], data=b"x" * 100)
    assert used(site) == LARGEST + 128
    assert await site.run.blobs() == before, "nothing lies in Redis"
    assert (await site.run.append(jobs[0], data=b"x" * 100)).repeated is False  # its reply was lost: our own call
    await site.run.append(jobs[1], 0.0, data=b"y" * 64)
    (group,) = await site.run.lease()
    assert await site.run.fetch(group.claims) == [b"x" * 100, b"y" * 64]
    await site.run.trained(1, [1])
    await site.run.ack(1)
    for job in jobs:
        site.run.leave(job)
    site.depot.sweep()
    assert used(site) == 0


async def test_a_repeated_request_gets_the_same_rooms(open_sites: Open) -> None:
    (site,) = await open_sites()
    first = await site.run.next_jobs(3, call_id="one")
    again = await site.run.next_jobs(3, call_id="one")
    rooms = [{name(job): job.reserved.generation for job in reply.jobs} for reply in (first, again)]
    assert rooms[0] == rooms[1]
    assert used(site) == 3 * LARGEST


async def test_a_failed_job_gives_its_room_back(open_sites: Open) -> None:
    (site,) = await open_sites()
    (job,) = await site.run.jobs(1)
    site.run.leave(job)
    await site.run.fail(job)
    assert used(site) == 0


async def test_room_of_a_dead_worker_is_swept_and_that_of_a_living_one_is_not(
    open_sites: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(depot_module, "WRITER_SECONDS", 0.0)
    (site,) = await open_sites()
    dead, living = await site.run.jobs(2)
    site.run.leave(dead)  # the kernel frees its lock
    site.depot.sweep()
    assert used(site) == LARGEST
    await site.run.append(living)
    await site.run.append(dead)  # it was only slow: its bytes come as frames
    (group,) = await site.run.lease()
    assert await site.run.fetch(group.claims) == [repr(name(dead)).encode(), repr(name(living)).encode()]


async def test_where_bytes_may_lie_nowhere_else_jobs_wait_for_room(open_sites: Open) -> None:
    (site,) = await open_sites(group_size=1, groups_per_update=1, staleness=0)
    hog = [site.depot.allocate(LARGEST) for _ in range(1, 64) if next(iter(site.depot.arenas.values())).free >= LARGEST]
    assert (await site.run.next_jobs()).idle_reason == "memory"
    site.depot.release(hog)
    assert len(await site.run.jobs(1)) == 1


async def test_a_full_arena_gives_up_trained_bytes_and_then_falls_back_behind_them_visibly(open_sites: Open) -> None:
    (site,) = await open_sites(group_size=1, groups_per_update=1, staleness=1)
    for update in range(12):  # never acked, more than the arena holds
        (job,) = await site.run.jobs(1, update)
        await site.run.append(job, data=b"x" * LARGEST, update=update)
        site.run.leave(job)
        await site.run.trained(update + 1, await site.run.leased())
    assert await site.run.counter("evicted") > 0
    reply = await site.run.open(floor=site.run.epoch, resume=0)
    assert sorted([*reply.lost, *reply.rolled_back]) == list(range(1, 13))
    assert list(reply.lost) == sorted(reply.lost)
    assert len(reply.lost) == await site.run.counter("lost") > 0


async def test_an_arena_too_small_for_the_run_is_refused_with_the_size_needed(
    redis_server: RedisServer, clock: Clock, tmp_path: Path
) -> None:
    site = Site(redis_server.url, clock, make_spec(episode_bytes=LARGEST), tmp_path, Network(), True, 10 * LARGEST)
    await site.start()
    with pytest.raises(Unsupported, match=r"6 groups of 2 x 4096 bytes in flight: set arena_bytes to 94208 or more"):
        await site.run.open()
    site.run.spec.episode_bytes = 0
    with pytest.raises(Unsupported, match="names no largest episode"):
        await site.run.open()
    await site.close()


async def test_without_enough_room_the_rest_lies_in_redis(
    redis_server: RedisServer, clock: Clock, tmp_path: Path
) -> None:
    site = Site(redis_server.url, clock, make_spec(episode_bytes=LARGEST), tmp_path, Network(), False, 3 * LARGEST)
    site.workers("w0")
    await site.start()
    await site.run.open()
    jobs = await site.run.jobs(8)
    assert sum(job.HasField("reserved") for job in jobs) == 3
    for job in jobs:
        await site.run.append(job, float(job.key.member))
    groups = await site.run.lease()
    claims = [claim for group in groups for claim in group.claims]
    assert sorted(await site.run.fetch(claims)) == sorted(repr(name(job)).encode() for job in jobs)
    assert sum(bool(claim.owner) for claim in claims) == 3
    await site.close()


async def test_a_worker_that_knows_its_episodes_gets_no_more_room_than_they_take(open_sites: Open) -> None:
    (site,) = await open_sites()
    small, large = (await site.run.next_jobs(1, size=100)).jobs, (await site.run.next_jobs(1, size=9 * LARGEST)).jobs
    assert [job.reserved.length for job in (*small, *large)] == [100, LARGEST]


async def test_arenas_begin_small_and_grow_for_known_episodes_up_to_what_a_run_can_need(
    open_sites: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(depot_module, "FIRST_BYTES", 4 * LARGEST)
    (site,) = await open_sites(strict=False, group_size=4, groups_per_update=2, staleness=4)
    spec = site.run.spec
    unknown = await site.run.jobs(6)
    assert [job.HasField("reserved") for job in unknown] == [True] * 4 + [False] * 2
    assert site.depot.capacity == 4 * LARGEST
    known = (await site.run.next_jobs(34, size=LARGEST)).jobs
    assert len(known) > 20
    assert all(job.HasField("reserved") for job in known)
    assert len(site.depot.arenas) > 2
    while await site.depot.grow(spec, LARGEST):
        pass
    assert site.depot.capacity == depot_module.most_bytes(spec)


async def test_growth_ends_with_the_memory_that_is_free(open_sites: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(depot_module, "FIRST_BYTES", 4 * LARGEST)
    monkeypatch.setattr(depot_module, "_free", lambda folder: 16 * LARGEST)
    (site,) = await open_sites(strict=False, staleness=4)
    reply = await site.run.next_jobs(30, size=LARGEST)
    assert sum(job.HasField("reserved") for job in reply.jobs) == 5
    assert site.depot.capacity == 5 * LARGEST


@pytest.mark.parametrize("complete", [True, False])
async def test_a_complete_run_leaves_no_arena_and_a_stopped_one_leaves_its_bytes(
    open_sites: Open, tmp_path: Path, complete: bool
) -> None:
    (site,) = await open_sites(strict=False, total_updates=50)
    for job in await site.run.jobs(3):
        await site.run.append(job, float(job.key.member))
        site.run.leave(job)
    await site.run.lease()
    await site.run.close(complete)
    await site.store.close()
    assert bool(list((tmp_path / "0").glob("*.arena"))) is not complete


async def test_any_replica_serves_any_claim(open_sites: Open) -> None:
    one, two = await open_sites(2)
    jobs = [*await one.run.jobs(2, worker="w0"), *await two.run.jobs(2, worker="w1")]
    for job in jobs[:2]:
        await one.run.append(job, float(job.key.member), data=b"1" * 1000)
    for job in jobs[2:]:
        await two.run.append(job, float(job.key.member), data=b"2" * 2000)
    claims = [claim for group in await two.run.lease() for claim in group.claims]
    assert len({claim.owner for claim in claims}) == 2
    for site in (one, two):
        assert await site.run.fetch(claims) == [b"1" * 1000] * 2 + [b"2" * 2000] * 2
        near = s.FetchClaimsRequest(run=site.run.run, claims=claims, locality=site.vicinity.locality())
        kinds = [str(reply.begin.WhichOneof("location")) async for reply in site.store.fetch(near)]
        assert sorted(kinds) == ["inline", "inline", "shm", "shm"]


async def test_an_extent_of_another_replica_is_not_taken(open_sites: Open) -> None:
    one, two = await open_sites(2)
    (job,) = await one.run.jobs(1, worker="w0")
    two.run.rooms = one.run.rooms
    await two.run.append(job)  # refused, and sent as frames
    assert used(two) == 64
    with pytest.raises(Unsupported):
        two.depot.accept((one.run.run, "g:1", 0, 1), job.reserved, 64)


async def test_a_restarted_replica_adopts_its_arena(open_sites: Open) -> None:
    one, two = await open_sites(2)
    first, second = await one.run.jobs(2)
    await one.run.append(first)
    (arena,) = one.depot.arenas
    await one.crash()
    await one.restart()
    assert list(one.depot.arenas) == [arena]
    await one.run.append(second, 0.0)  # into the room that the one before gave it
    (group,) = await one.run.lease()
    assert {claim.owner for claim in group.claims} == {arena}
    assert await two.run.fetch(group.claims) == [repr(name(job)).encode() for job in (first, second)]


async def test_an_arena_of_another_redis_is_left_alone(tmp_path: Path) -> None:
    mine, theirs = Depot(str(tmp_path), True), Depot(str(tmp_path), True)
    mine.adopt("aaaa")
    await mine.prepare(make_spec(episode_bytes=LARGEST))
    mine.arenas.popitem()[1].close()
    assert theirs.adopt("bbbb") == []
    assert len(theirs.adopt("aaaa")) == 1
    theirs.close()
    assert not list(tmp_path.glob("*.arena")), "it was empty"


async def test_what_lay_on_a_lost_node_is_reported_and_collected_again(
    open_sites: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = await open_sites(2, staleness=2)
    for job in await one.run.jobs(9, worker="w0"):
        await one.run.append(job, float(job.key.member))
        one.run.leave(job)
    leased = await two.run.lease(2)
    await two.run.trained(1, [leased[0].group])
    one.lose()
    with pytest.raises(Unavailable, match="may be restarting"):
        await lost_fetch(two, leased[1])
    monkeypatch.setattr(owners_module, "GONE_SECONDS", 0.0)
    await two.store._miss_owners(two.run.run)
    with pytest.raises(NotFound, match="went with their node"):
        await two.run.fetch(leased[1].claims)
    await two.run.nack(leased[1].group, "its bytes are gone")
    assert await two.run.letters() == [], "there is nothing to replay"
    assert await two.run.leased() == []
    assert await two.run.counter("lost") == 4
    for job in await two.run.jobs(12, update=1, worker="w1"):
        await two.run.append(job, float(job.key.member), update=1)
    fresh = await two.run.lease()
    assert min(group.group for group in fresh) > 4
    assert list((await two.run.open(floor=two.run.epoch)).lost) == [leased[0].group]


async def lost_fetch(site: Site, group: s.Group) -> None:
    await site.store.link.client.delete(f"dvla:arena:{{{group.claims[0].owner}}}:address")  # expired
    await site.run.fetch(group.claims)


async def test_extents_that_no_claim_knows_are_freed(open_sites: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owners_module, "COMPARE_SECONDS", 0.0)
    (site,) = await open_sites()
    kept, loose = await site.run.jobs(2)
    await site.run.append(kept)
    site.depot.accept((site.run.run, "g:1", 1, 1), loose.reserved, LARGEST)  # and the replica died before its script
    site.run.leave(loose)
    await site.store.owners.compare()
    assert used(site) == LARGEST + 64, "its script may be on its way"
    await site.store.owners.compare()
    assert used(site) == 64


async def test_damaged_bytes_are_not_served(open_sites: Open) -> None:
    (site,) = await open_sites(group_size=1)
    (job,) = await site.run.jobs(1)
    await site.run.append(job, data=b"x" * 100)
    lease = site.run.rooms[name(job)][1]
    lease.view[3] = 7  # a worker that goes on writing after its append
    (group,) = await site.run.lease()
    with pytest.raises(NotFound, match="do not match"):
        await site.run.fetch(group.claims)


async def test_a_full_arena_refuses_frames_until_there_is_room(open_sites: Open) -> None:
    (site,) = await open_sites(group_size=1)
    (job,) = await site.run.jobs(1, worker="elsewhere")
    assert not job.HasField("reserved")
    (arena,) = site.depot.arenas.values()
    hog = []
    while arena.free >= 64:
        hog.append(site.depot.allocate(min(arena.free, LARGEST)))
    with pytest.raises(Exhausted):
        await site.run.append(job)
    site.depot.release(hog)
    await site.run.append(job)
    (group,) = await site.run.lease()
    assert await asyncio.wait_for(site.run.fetch(group.claims), 10) == [repr(name(job)).encode()]
