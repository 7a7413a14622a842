"""Accepting trajectories once, whole, and only where they belong; giving their bytes back."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
from dvla.v1 import common_pb2 as c
from dvla.v1 import store_pb2 as s

from services.common.errors import InvalidInput, NotFound, Superseded, Unsupported
from services.rollout.store.blobs import BlobWriter
from services.rollout.store.upkeep import UPLOAD_SECONDS
from tests.rollout.store.conftest import OpenRun
from tests.rollout.store.harness import Clock, Harness, cut, make_episode, make_payload

pytestmark = pytest.mark.redis

MEGABYTE = bytes(range(256)) * 4096


def begin(job: s.Job, data: bytes = b"bytes", **changes: Any) -> s.AppendBegin:
    return s.AppendBegin(key=job.key, episode=make_episode(**changes), payload=make_payload(data))


@pytest.mark.parametrize("data", [b"small", MEGABYTE, MEGABYTE * 3 + b"tail"], ids=["inline", "1MiB", "3MiB+"])
async def test_bytes_come_back_as_they_were(open_run: OpenRun, data: bytes) -> None:
    run = await open_run(group_size=1)
    (job,) = await run.jobs(1)
    await run.append(job, data=data)
    (group,) = await run.lease()
    (claim,) = group.claims
    assert (claim.key, claim.payload.length, claim.episode.steps) == (job.key, len(data), 5)
    assert claim.payload.WhichOneof("location") is None
    assert await run.fetch([claim, claim]) == [data, data]


async def test_frames_of_any_size_are_joined(open_run: OpenRun) -> None:
    run = await open_run(group_size=1)
    (job,) = await run.jobs(1)
    data = MEGABYTE + b"x" * 777_777
    header = s.AppendBegin(key=job.key, episode=make_episode(), payload=make_payload(data, inline=False))
    header.payload.frames = 5
    await run.store.append(header, cut(data, 400_000))
    assert await run.fetch((await run.lease())[0].claims) == [data]


async def test_a_repeat_is_told_and_leaves_one_copy(open_run: OpenRun) -> None:
    run = await open_run(group_size=1)
    (job,) = await run.jobs(1)
    before = await run.blobs()
    assert not (await run.append(job, data=b"first")).repeated
    assert (await run.append(job, data=b"second")).repeated
    (group,) = await run.lease()
    assert await run.blobs() - before == {group.claims[0].blob}
    assert await run.fetch(group.claims) == [b"first"]
    assert await run.counter("repeated") == 1


async def test_an_older_attempt_is_superseded(open_run: OpenRun, clock: Clock) -> None:
    run = await open_run(group_size=1)
    (frozen,) = await run.jobs(1, worker="frozen")
    clock.forward(2000)
    (job,) = await run.jobs(1, worker="other")
    assert (job.key.group, job.key.attempt) == (1, 2)
    before = await run.blobs()
    with pytest.raises(Superseded, match="attempt 1 of g:1 member 0 is superseded: attempt 2 is the current one"):
        await run.append(frozen)
    assert await run.blobs() == before
    assert not (await run.append(job)).repeated
    with pytest.raises(Superseded):
        await run.append(frozen)
    assert await run.counter("superseded") == 2


async def test_an_expired_attempt_counts_until_another_is_granted(open_run: OpenRun, clock: Clock) -> None:
    run = await open_run(group_size=1, staleness=0, groups_per_update=1)
    (job,) = await run.jobs(1)
    clock.forward(2000)
    await run.renew("other")
    assert await run.counter("expired") == 1
    await run.append(job)
    assert (await run.next_jobs()).idle_reason == "admission", "its job is no longer free"


async def test_a_failed_attempt_does_not_count_afterwards(open_run: OpenRun) -> None:
    run = await open_run()
    (job,) = await run.jobs(1)
    await run.fail(job)
    await run.fail(job)
    with pytest.raises(Superseded):
        await run.append(job)
    assert await run.counter("failed") == 1


async def test_a_group_that_is_gone(open_run: OpenRun) -> None:
    run = await open_run(on_failure="discard", max_attempts=1)
    first, second = await run.jobs(2)
    await run.fail(first)
    with pytest.raises(Superseded, match="its group is gone"):
        await run.append(second)


@pytest.mark.parametrize("broken", ["hash", "short", "gap", "long", "no tensors", "beyond"])
async def test_a_payload_that_does_not_fit_is_refused_and_leaves_nothing(open_run: OpenRun, broken: str) -> None:
    run = await open_run(group_size=1)
    (job,) = await run.jobs(1)
    before = await run.blobs()
    data = MEGABYTE * 2
    header = s.AppendBegin(key=job.key, episode=make_episode(), payload=make_payload(data, inline=False))
    frames = {
        "short": cut(MEGABYTE),
        "gap": _gap(data),
        "long": cut(data + b"more"),
    }.get(broken, cut(data))
    if broken == "hash":
        header.payload.xxh3 ^= 1
    if broken == "no tensors":
        del header.payload.tensors[:]
    if broken == "beyond":
        header.payload.tensors[0].offset = len(data)
    with pytest.raises(InvalidInput):
        await run.store.append(header, frames)
    assert await run.blobs() == before
    assert await run.counter("invalid") == 1
    assert not (await run.append(job)).repeated, "the job can still be delivered"


async def _gap(data: bytes) -> AsyncIterator[c.Frame]:
    yield c.Frame(offset=0, data=data[: 2**20])
    yield c.Frame(offset=2**20 + 1, data=data[2**20 + 1 :])


@pytest.mark.parametrize("field", ["score", "reward_sum"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
async def test_values_that_are_not_finite_are_refused(open_run: OpenRun, field: str, value: float) -> None:
    run = await open_run()
    header = begin((await run.jobs(1))[0])
    setattr(header.episode, field, value)
    with pytest.raises(InvalidInput, match=rf"episode\.{field} = {value}"):
        await run.store.append(header, cut(b""))


async def test_facts_that_are_missing_are_refused(open_run: OpenRun) -> None:
    run = await open_run()
    (job,) = await run.jobs(1)
    header = begin(job, steps=0)
    with pytest.raises(InvalidInput, match="steps"):
        await run.store.append(header, cut(b""))
    header = begin(job)
    header.episode.ClearField("oldest")
    with pytest.raises(InvalidInput, match="oldest"):
        await run.store.append(header, cut(b""))
    header = begin(job)
    header.episode.oldest.update = 9
    with pytest.raises(InvalidInput, match="newer than"):
        await run.store.append(header, cut(b""))


async def test_an_oversize_trajectory_is_refused(open_run: OpenRun) -> None:
    run = await open_run(episode_bytes=100)
    (job,) = await run.jobs(1)
    with pytest.raises(InvalidInput, match=r"101 bytes; the run's largest episode is 100"):
        await run.append(job, data=b"x" * 101)
    await run.append(job, data=b"x" * 100)


async def test_locations_that_this_replica_cannot_read_are_refused(open_run: OpenRun) -> None:
    run = await open_run()
    header = begin((await run.jobs(1))[0])
    header.payload.shm.arena = "arena"
    with pytest.raises(InvalidInput, match="in an extent of 0"):
        await run.store.append(header, cut(b""))
    header.payload.shm.length = header.payload.length
    with pytest.raises(Unsupported, match="has no arena; send the bytes as frames"):
        await run.store.append(header, cut(b""))
    header.payload.cuda.offset = 0
    with pytest.raises(Unsupported, match="GPU memory"):
        await run.store.append(header, cut(b""))


async def test_an_abandoned_upload_is_swept(open_run: OpenRun, clock: Clock) -> None:
    run = await open_run()
    before = await run.blobs()
    writer = BlobWriter(run.store.link, run.run, 2 * len(MEGABYTE), 0)
    await writer.add(0, MEGABYTE)  # and then its store replica dies
    await run.store.sweep(run.run)
    assert await run.blobs() - before == {writer.name}
    clock.forward(UPLOAD_SECONDS + 1)
    await run.store.sweep(run.run)
    assert await run.blobs() == before
    assert await run.counter("orphans") == 1


async def test_accepted_bytes_are_never_swept(open_run: OpenRun, clock: Clock) -> None:
    run = await open_run(group_size=1)
    await run.fill(2)
    for _ in range(3):
        clock.forward(UPLOAD_SECONDS + 1)
        await run.store.sweep(run.run)
    assert len(await run.fetch([claim for group in await run.lease() for claim in group.claims])) == 2


async def test_fetch_tells_when_bytes_are_gone_or_damaged(open_run: OpenRun) -> None:
    run = await open_run(group_size=1)
    await run.fill(2)
    first, second = await run.lease()
    redis = run.store.link.client
    await redis.delete(f"dvla:blob:{first.claims[0].blob}:0")
    await redis.set(f"dvla:blob:{second.claims[0].blob}:0", "rotten")
    for group in (first, second):
        with pytest.raises(NotFound, match="nack its group"):
            await run.fetch(group.claims)


@pytest.mark.parametrize(
    "blob", ["", "dvla:{x}:meta", "../../etc/passwd", "0" * 32, "0" * 32 + "-0", "0" * 32 + "-9999999"]
)
async def test_fetch_reads_nothing_but_blobs(open_run: OpenRun, blob: str) -> None:
    run = await open_run()
    with pytest.raises(InvalidInput, match="names no stored bytes"):
        await run.fetch([s.Claim(payload=make_payload(b"x"), blob=blob)])


async def test_a_claim_without_bytes_cannot_be_fetched(open_run: OpenRun) -> None:
    run = await open_run(max_attempts=1, group_size=1)
    await run.fail((await run.jobs(1))[0])
    (group,) = await run.lease()
    assert not group.claims[0].HasField("payload")
    with pytest.raises(InvalidInput, match="failed for good"):
        await run.fetch(group.claims)


async def test_bytes_are_counted_and_freed(open_run: OpenRun) -> None:
    run = await open_run(group_size=1, groups_per_update=2)
    before = await run.blobs()
    for job in await run.jobs(2):
        await run.append(job, data=b"x" * 1000)
    assert (await run.stats()).bytes == 2000
    await run.trained(1, await run.leased())
    assert (await run.stats()).bytes == 2000, "kept until the checkpoint"
    await run.ack(1)
    assert (await run.stats()).bytes == 0
    assert await run.blobs() == before


async def test_accepted_sums_are_taken_before_any_filter(open_run: OpenRun) -> None:
    run = await open_run(filter_uniform=True)
    for score, steps in ((1.0, 3), (0.0, 9)):
        for job in await run.jobs(2):
            await run.append(job, score, steps=steps)
    stats = await run.stats()
    assert stats.counters["discarded_uniform"] == 2
    assert (stats.sums["accepted_success"], stats.sums["accepted_length"]) == (2, 24)
    assert (stats.counters["accepted"], stats.counters["accepted_steps"]) == (4, 24)


async def test_harness_uses_frames_for_large_payloads(open_run: OpenRun) -> None:
    """Guards the tests above: a payload over 256 KiB does not travel inline."""
    run: Harness = await open_run(group_size=1)
    (job,) = await run.jobs(1)
    with pytest.raises(InvalidInput, match="larger ones go as frames"):
        await run.store.append(begin(job, MEGABYTE), cut(b""))
