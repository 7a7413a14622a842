"""Long polls: woken by what they wait for, also when the wake-up is lost; never busy."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from services.common.errors import NotFound
from services.rollout.store.machine import RolloutStore
from services.rollout.store.waiting import Wakeups
from tests.rollout.store.conftest import OpenRun
from tests.rollout.store.harness import Clock, Harness, make_spec

pytestmark = pytest.mark.redis


@pytest.fixture
async def listening(store: RolloutStore, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[None]:
    """Wake-ups are heard, and nobody looks by himself."""
    monkeypatch.setattr("services.rollout.store.waiting.LOOK_SECONDS", 60.0)
    task = asyncio.create_task(store.wakeups.listen())
    yield
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@pytest.mark.usefixtures("listening")
async def test_a_worker_is_woken_when_an_update_makes_room(open_run: OpenRun) -> None:
    run = await open_run(staleness=1, groups_per_update=1)
    await run.fill(2)
    waiting = asyncio.create_task(run.next_jobs(1, update=1, worker="waiting", wait=30.0))
    await asyncio.sleep(0.05)
    await run.trained(1, (await run.leased())[:1])
    assert [job.key.group for job in (await waiting).jobs] == [3]


@pytest.mark.usefixtures("listening")
async def test_a_learner_is_woken_when_a_group_is_complete(open_run: OpenRun) -> None:
    run = await open_run()
    waiting = asyncio.create_task(run.lease(wait=30.0))
    await asyncio.sleep(0.05)
    await run.fill(1)
    assert [group.group for group in await waiting] == [1]


@pytest.mark.usefixtures("listening")
async def test_a_failed_job_wakes_another_worker(open_run: OpenRun) -> None:
    run = await open_run(staleness=0, groups_per_update=1)
    first, _ = await run.jobs(2)
    waiting = asyncio.create_task(run.next_jobs(1, worker="waiting", wait=30.0))
    await asyncio.sleep(0.05)
    await run.fail(first)
    assert [job.key.attempt for job in (await waiting).jobs] == [2]


@pytest.mark.usefixtures("listening")
async def test_closing_a_run_wakes_everybody(open_run: OpenRun) -> None:
    run = await open_run(staleness=0)
    await run.jobs(4)
    waiting = [asyncio.create_task(run.next_jobs(1, worker=f"w{n}", wait=30.0)) for n in range(3)]
    await asyncio.sleep(0.05)
    await run.close()
    assert [(await reply).idle_reason for reply in waiting] == ["finished"] * 3


async def test_without_wake_ups_waiters_look_by_themselves(
    open_run: OpenRun, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An expired grant publishes nothing until somebody looks."""
    monkeypatch.setattr("services.rollout.store.waiting.LOOK_SECONDS", 0.05)
    run = await open_run(staleness=0, groups_per_update=1)
    await run.jobs(2, worker="killed")
    waiting = asyncio.create_task(run.next_jobs(1, worker="waiting", wait=30.0))
    await asyncio.sleep(0.1)
    clock.forward(1001)
    assert [job.key.attempt for job in (await waiting).jobs] == [2]


async def test_a_wait_ends_with_the_reason(open_run: OpenRun) -> None:
    run = await open_run(staleness=0)
    await run.jobs(4)
    assert (await run.next_jobs(wait=0.05)).idle_reason == "admission"
    assert await run.lease(wait=0.05) == []


async def test_waiting_calls_the_store_rarely(store: RolloutStore, open_run: OpenRun) -> None:
    run = await open_run(staleness=0)
    await run.jobs(4)
    calls = []
    call = store.call

    async def counted(name: str, *rest: object) -> object:
        calls.append(name)
        return await call(name, *rest)  # type: ignore[arg-type]

    store.call = counted  # type: ignore[assignment, method-assign]
    await run.next_jobs(wait=1.5)
    assert calls.count("next_jobs") <= 3


async def test_a_stopping_store_answers_its_waiters(open_run: OpenRun) -> None:
    run = await open_run(staleness=0)
    await run.jobs(4)
    waiting = asyncio.create_task(run.next_jobs(wait=30.0))
    await asyncio.sleep(0.05)
    run.store.stop_waiting()
    assert (await waiting).idle_reason == "admission"


async def test_waiting_for_a_run_that_is_not_there_leaves_nothing(store: RolloutStore, clock: Clock) -> None:
    wakeups: Wakeups = store.wakeups
    run = Harness(store, clock, make_spec())
    with pytest.raises(NotFound):
        await run.next_jobs(wait=5.0)
    assert not any(key[0] == run.run for key in wakeups._events)
