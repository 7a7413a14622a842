"""Groups: order against the bias of early finishers, signal, failures, expiry."""

from random import Random

import pytest
from dvla.v1 import store_pb2 as s

from services.common.errors import Superseded
from tests.rollout.store.conftest import OpenRun
from tests.rollout.store.harness import Clock, Harness, name

pytestmark = pytest.mark.redis


async def test_groups_come_in_admission_order_whoever_finishes_first(open_run: OpenRun) -> None:
    run = await open_run(group_size=2, staleness=2)
    jobs = await run.jobs(12)
    for job in reversed(jobs[1:]):
        await run.append(job, float(job.key.member))
        assert await run.leased() == [], "the first group is not complete"
    assert (await run.stats()).complete_groups == 5
    await run.append(jobs[0], 0.0)
    assert await run.leased() == [1, 2, 3, 4, 5, 6]


async def test_short_episodes_are_not_trained_first(open_run: OpenRun) -> None:
    """Successful episodes are short. What is trained must have the same length and success as what was admitted."""
    run = await open_run(group_size=2, groups_per_update=2, staleness=3, total_updates=30)
    lengths, update, now = Random(5), 0, 0
    running: list[tuple[int, int, s.Job]] = []  # when it ends, how long it is, what it is
    held: list[int] = []
    while update < 30:
        for job in (await run.next_jobs(100, update)).jobs:
            steps = lengths.choice([3, 60])  # a quick success or a long failure
            running.append((now + steps, steps, job))
        running.sort(key=lambda item: item[0])
        now, steps, job = running.pop(0)
        await run.append(job, float(steps == 3), update, steps)
        held += await run.leased()
        if len(held) >= 2:
            update += 1
            await run.trained(update, held[:2])
            held = held[2:]
    stats = await run.stats()
    assert stats.counters["trained_episodes"] == 120
    trained = stats.sums["trained_success"] / stats.counters["trained_episodes"]
    admitted = Random(5)
    truth = sum(admitted.choice([3, 60]) == 3 for _ in range(120)) / 120
    assert trained == truth, "the first 120 admitted episodes, whatever their length"


@pytest.mark.parametrize(
    ("scores", "kept"),
    [
        ((0.0, 0.0), False),
        ((1.0, 1.0), False),
        ((0.35, 0.35), False),
        ((1 / 3, 1 / 3), False),
        ((0.0, -0.0), False),
        ((0.3, 0.1 + 0.2), True),  # differ in the last bit: compared exactly
        ((1e-300, 0.0), True),
        ((0.0, 1.0), True),
    ],
)
async def test_groups_without_signal_are_counted_and_replaced(
    open_run: OpenRun, scores: tuple[float, float], kept: bool
) -> None:
    run = await open_run(filter_uniform=True)
    for job, score in zip(await run.jobs(2), scores, strict=True):
        await run.append(job, score)
    assert await run.leased() == ([1] if kept else [])
    stats = await run.stats()
    assert stats.counters["discarded_uniform"] == (not kept)
    assert stats.counters["accepted"] == 2
    if not kept:
        assert stats.bytes == 0


async def test_without_the_filter_uniform_groups_are_delivered(open_run: OpenRun) -> None:
    run = await open_run(filter_uniform=False)
    for job in await run.jobs(2):
        await run.append(job, 1.0)
    assert await run.leased() == [1]


async def test_endless_failure_neither_stops_nor_fills_the_store(open_run: OpenRun) -> None:
    """A policy that never succeeds: no group has signal, version and memory stand still, and learning can start."""
    run = await open_run(filter_uniform=True, group_size=2)
    for _ in range(25):
        for job in await run.jobs(8):
            await run.append(job, 0.0)
    stats = await run.stats()
    assert (stats.update, stats.bytes, stats.counters["discarded_uniform"]) == (0, 0, 100)
    assert len(await run.fill(2)) == 2
    assert await run.leased() == [101, 102]


async def test_a_failing_member_scores_zero_in_the_end(open_run: OpenRun) -> None:
    run = await open_run(max_attempts=2, on_failure="zero")
    first, second = await run.jobs(2)
    await run.append(second, 1.0)
    await run.fail(first)
    (again,) = await run.jobs(1)
    assert name(again) == (1, 0, 2)
    await run.fail(again)
    (group,) = await run.lease()
    assert [claim.HasField("payload") for claim in group.claims] == [False, True]
    assert group.claims[0].key.member == 0
    assert (await run.counter("failed"), await run.counter("zeroed")) == (2, 1)
    await run.trained(1, [1])
    assert (await run.stats()).counters["trained_episodes"] == 1


async def test_a_failing_member_takes_its_group_with_it_if_the_run_says_so(open_run: OpenRun) -> None:
    run = await open_run(max_attempts=2, on_failure="discard")
    first, second = await run.jobs(2)
    await run.fail(first)
    (again,) = await run.jobs(1)
    await run.fail(again)
    with pytest.raises(Superseded):
        await run.append(second)
    assert await run.counter("discarded_failed") == 1
    assert {job.key.group for job in await run.jobs(100)} == {2, 3, 4, 5}
    assert await run.renew("w0") == 8, "the discarded group's grants are gone"


async def test_expiry_is_not_a_failure_of_the_start(open_run: OpenRun, clock: Clock) -> None:
    run = await open_run(max_attempts=1, group_size=1)
    for attempt in range(1, 6):
        (job,) = await run.jobs(1, worker=f"w{attempt}")
        assert name(job) == (1, 0, attempt)
        clock.forward(2000)
    assert (await run.stats()).counters["zeroed"] == 0


async def test_a_start_that_always_ends_its_worker_is_given_up(open_run: OpenRun, clock: Clock) -> None:
    run = await open_run(group_size=1, groups_per_update=1, staleness=0)
    for attempt in range(1, 9):
        assert [name(job) for job in await run.jobs(1, worker=f"w{attempt}")] == [(1, 0, attempt)]
        clock.forward(2000)
    assert await run.jobs(1) == []
    assert await run.leased() == [1]
    assert await run.counter("zeroed") == 1


async def test_a_renewed_grant_does_not_expire(open_run: OpenRun, clock: Clock) -> None:
    run = await open_run()
    (job,) = await run.jobs(1)
    for _ in range(5):
        clock.forward(900)
        assert await run.renew("w0") == 1
    clock.forward(900)
    await run.append(job)
    assert await run.counter("expired") == 0


async def test_all_grants_of_a_silent_worker_are_granted_again(open_run: OpenRun, clock: Clock) -> None:
    run: Harness = await open_run()
    lost = await run.jobs(5, worker="killed")
    clock.forward(1001)
    again = await run.jobs(5, worker="other")
    assert [name(job)[:2] for job in again] == [name(job)[:2] for job in lost]
    assert {job.key.attempt for job in again} == {2}
    assert (await run.stats()).workers == 1


async def test_an_append_shows_that_its_worker_lives(open_run: OpenRun, clock: Clock) -> None:
    run = await open_run()
    first, second = await run.jobs(2)
    clock.forward(900)
    await run.append(first)
    clock.forward(900)
    await run.jobs(1, worker="other")
    assert await run.counter("expired") == 0
    await run.append(second, 0.0)
