"""Evaluations: exactly the listed episodes, each once, with the pinned version."""

import asyncio

import pytest
from dvla.v1 import store_pb2 as s

from services.common.errors import InvalidInput, NotFound, Superseded
from tests.rollout.store.conftest import OpenRun
from tests.rollout.store.harness import Clock, Harness, version

pytestmark = pytest.mark.redis


async def start(run: Harness, episodes: int, evaluation: str = "at-3", update: int = 3, seed: int = 0) -> None:
    await run.store.start_evaluation(
        s.StartEvaluationRequest(
            run=run.run,
            evaluation=evaluation,
            version=version(update),
            episodes=[s.EvaluationEpisode(task="Push", seed=seed + n) for n in range(episodes)],
        )
    )


async def results(run: Harness, evaluation: str = "at-3", wait: float = 0.0) -> s.GetEvaluationResponse:
    request = s.GetEvaluationRequest(run=run.run, evaluation=evaluation, wait_seconds=wait)
    return await run.store.get_evaluation(request)


@pytest.mark.parametrize("workers", [1, 3, 8])
async def test_each_episode_runs_once_also_when_a_worker_is_lost(open_run: OpenRun, clock: Clock, workers: int) -> None:
    """S04: W workers, one lost on the way: each seed is used exactly once."""
    run = await open_run()
    await start(run, 24, seed=5000)
    assert len(await run.jobs(5, None, "lost")) == 5
    clock.forward(2000)
    seeds = []
    while jobs := [job for w in range(workers) for job in (await run.next_jobs(3, None, f"w{w}")).jobs]:
        for job in jobs:
            assert (job.kind, job.evaluation, job.version) == (s.JOB_KIND_EVALUATE, "at-3", version(3))
            assert not job.end_on_success
            seeds.append(job.seed)
            await run.append(job, float(job.seed % 2), 3)
    assert sorted(seeds) == list(range(5000, 5024))
    reply = await results(run)
    assert (reply.total, reply.version) == (24, version(3))
    assert [result.number for result in reply.results] == list(range(1, 25))
    assert [result.what.seed for result in reply.results] == list(range(5000, 5024))
    assert [result.episode.score for result in reply.results] == [float(seed % 2) for seed in range(5000, 5024)]


async def test_evaluation_comes_first_and_outside_admission(open_run: OpenRun) -> None:
    run = await open_run(staleness=0, groups_per_update=1)
    await run.jobs(100)
    assert (await run.next_jobs()).idle_reason == "admission"
    await start(run, 2)
    assert [job.evaluation for job in await run.jobs(5)] == ["at-3", "at-3"]
    assert (await run.stats()).counters["admitted"] == 1


async def test_earlier_evaluations_come_first(open_run: OpenRun) -> None:
    run = await open_run()
    await start(run, 12, "first")
    await start(run, 2, "second")
    jobs = await run.jobs(14, None)
    assert [(job.evaluation, job.key.group) for job in jobs] == [
        *[("first", number) for number in range(1, 13)],
        *[("second", number) for number in (1, 2)],
    ]


async def test_starting_it_again_changes_nothing_and_another_list_is_refused(open_run: OpenRun) -> None:
    run = await open_run()
    await start(run, 2)
    await start(run, 2)
    assert len(await run.jobs(9, None)) == 2
    for episodes, update in ((3, 3), (2, 4)):
        with pytest.raises(InvalidInput, match="at-3 exists"):
            await start(run, episodes, update=update)
    with pytest.raises(InvalidInput, match="lists 0 episodes"):
        await start(run, 0, "empty")
    with pytest.raises(NotFound, match="no evaluation"):
        await results(run, "never")


async def test_an_episode_of_another_version_is_refused(open_run: OpenRun) -> None:
    run = await open_run()
    await start(run, 1)
    (job,) = await run.jobs(1, None)
    with pytest.raises(InvalidInput, match="version 1/3 only; it has 1/2"):
        await run.append(job, update=2)
    assert not (await run.append(job, update=3)).repeated
    assert (await run.append(job, update=3)).repeated


async def test_failures_are_retried_up_to_the_limit(open_run: OpenRun) -> None:
    run = await open_run(max_attempts=2)
    await start(run, 2)
    first, second = await run.jobs(2, None)
    await run.fail(first)
    (again,) = await run.jobs(9, None)
    assert (again.key.group, again.key.attempt) == (1, 2)
    with pytest.raises(Superseded):
        await run.append(first, update=3)
    await run.fail(again, "no such task")
    await run.append(second, 1.0, 3)
    reply = await results(run)
    assert [(result.number, result.failure, result.HasField("episode")) for result in reply.results] == [
        (1, "no such task", False),
        (2, "", True),
    ]
    assert await run.jobs(9, None) == []


async def test_waiting_for_the_end(open_run: OpenRun) -> None:
    run = await open_run()
    await start(run, 2)
    listening = asyncio.create_task(run.store.wakeups.listen())
    waiting = asyncio.create_task(results(run, wait=30.0))
    for job in await run.jobs(2, None):
        assert not waiting.done()
        await run.append(job, 1.0, 3)
    assert len((await waiting).results) == 2
    listening.cancel()
    await asyncio.gather(listening, return_exceptions=True)
