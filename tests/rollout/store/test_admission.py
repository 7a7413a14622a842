"""Which jobs are granted to whom: the admission rule, order, tasks, seeds, and the reasons for idling."""

from typing import Any

import pytest
from dvla.v1 import store_pb2 as s

from services.common.errors import InvalidInput, NotFound
from services.common.seeds import TRAINING, training_seed
from services.rollout.store.jobs import seed_of
from services.rollout.store.machine import RolloutStore
from tests.rollout.store.conftest import OpenRun
from tests.rollout.store.harness import Clock, Harness, make_spec, name, version

pytestmark = pytest.mark.redis


@pytest.mark.parametrize("staleness", [0, 1, 2])
async def test_grants_stop_at_the_bound_and_go_on_as_updates_are_made(open_run: OpenRun, staleness: int) -> None:
    run = await open_run(staleness=staleness, groups_per_update=2, group_size=3)
    granted = await run.next_jobs(1000)
    assert len(granted.jobs) == (staleness + 1) * 2 * 3
    assert (await run.next_jobs()).idle_reason == "admission"
    for job in granted.jobs:
        await run.append(job, float(job.key.member))
    assert (await run.next_jobs()).idle_reason == "admission", "complete groups still count until they are trained"
    await run.trained(1, (await run.leased())[:2])
    assert (await run.next_jobs(update=0)).idle_reason == "weights"
    assert len(await run.jobs(1000, update=1)) == 2 * 3


async def test_a_worker_with_old_weights_gets_only_what_will_be_trained_in_time(open_run: OpenRun) -> None:
    run = await open_run(staleness=1, groups_per_update=1, group_size=1)
    for update in (1, 2, 3):
        await run.fill(1, update - 1)
        await run.trained(update, await run.leased())
    assert (await run.next_jobs(update=1)).idle_reason == "weights"
    assert [job.key.group for job in await run.jobs(9, update=2)] == [4]
    assert [job.key.group for job in await run.jobs(9, update=3)] == [5]


async def test_weights_of_a_rolled_back_update_count_as_the_newest(open_run: OpenRun) -> None:
    run = await open_run(staleness=0)
    assert len(await run.jobs(1000, update=37)) == 4


async def test_a_worker_without_weights_waits_for_them(open_run: OpenRun) -> None:
    run = await open_run()
    assert (await run.next_jobs(update=None)).idle_reason == "weights"


async def test_nothing_is_admitted_beyond_the_last_update(open_run: OpenRun) -> None:
    run = await open_run(staleness=9, groups_per_update=2, group_size=1, total_updates=3)
    assert sorted({job.key.group for job in await run.jobs(1000)}) == [1, 2, 3, 4, 5, 6]
    assert (await run.next_jobs()).idle_reason == "admission"


async def test_a_discarded_group_is_replaced(open_run: OpenRun) -> None:
    run = await open_run(staleness=0, groups_per_update=1, filter_uniform=True)
    for job in await run.jobs(2):
        await run.append(job, 1.0)
    assert [name(job) for job in await run.jobs(9)] == [(2, 0, 1), (2, 1, 1)]


async def test_free_members_of_older_groups_come_first(open_run: OpenRun) -> None:
    run = await open_run()
    jobs = await run.jobs(8)
    await run.fail(jobs[5])
    await run.fail(jobs[2])
    assert [name(job) for job in await run.jobs(9)] == [(2, 0, 2), (3, 1, 2)]


async def test_tasks_take_turns_by_weight(open_run: OpenRun) -> None:
    run = await open_run(tasks={"Push": 2.0, "Pick": 1.0}, staleness=5, group_size=1)
    tasks = [job.task for job in await run.jobs(9)]
    assert tasks[:3] == ["Push", "Push", "Pick"]
    assert tasks == tasks[:3] * 3


async def test_members_of_a_group_share_task_and_seed(open_run: OpenRun) -> None:
    run = await open_run(tasks={"Push": 1.0, "Pick": 1.0}, seed_base=7)
    jobs = await run.jobs(8)
    assert [(job.task, job.seed) for job in jobs[::2]] == [(job.task, job.seed) for job in jobs[1::2]]
    assert [job.seed for job in jobs[::2]] == [training_seed(7, group) for group in (1, 2, 3, 4)]
    assert all(job.end_on_success for job in jobs)


@pytest.mark.parametrize("base", [0, 2**31, 2**64 - 1])
@pytest.mark.parametrize("group", [1, 2**30, 2**53])
def test_no_seed_leaves_the_training_range(base: int, group: int) -> None:
    assert seed_of(base, group) in TRAINING


async def test_the_first_start_state_counts_and_travels_with_later_jobs(open_run: OpenRun) -> None:
    run = await open_run()
    first, second = await run.jobs(2)
    assert first.start == b""
    assert await run.set_start(1, b"start of w0") == b"start of w0"
    assert await run.set_start(1, b"start of w1") == b"start of w0"
    await run.fail(second)
    assert (await run.jobs(1))[0].start == b"start of w0"
    with pytest.raises(NotFound, match="group 99"):
        await run.set_start(99, b"x")
    with pytest.raises(InvalidInput, match="0 bytes"):
        await run.set_start(1, b"")


async def test_workers_learn_their_place_in_order_of_arrival(open_run: OpenRun, clock: Clock) -> None:
    run = await open_run()
    places = [(await run.next_jobs(worker=worker)) for worker in ("b", "a", "c", "b")]
    assert [(reply.index, reply.live_workers) for reply in places] == [(0, 1), (1, 2), (2, 3), (0, 3)]
    clock.forward(600)
    await run.renew("a")
    clock.forward(600)
    reply = await run.next_jobs(worker="a")
    assert (reply.index, reply.live_workers) == (0, 1)


async def test_a_repeated_call_gets_the_same_jobs(open_run: OpenRun) -> None:
    run = await open_run()
    first = await run.next_jobs(3, call_id="one")
    again = await run.next_jobs(3, call_id="one")
    assert sorted(map(name, again.jobs)) == sorted(map(name, first.jobs))
    assert not {name(job) for job in (await run.next_jobs(3, call_id="two")).jobs} & set(map(name, first.jobs))


async def test_a_grant_that_its_worker_never_heard_of_ends_in_spite_of_renewals(
    open_run: OpenRun, clock: Clock
) -> None:
    run = await open_run(grant_seconds=10.0)
    await run.jobs(1)  # the reply is lost
    for _ in range(25):
        clock.forward(8)
        await run.renew("w0")
    assert [name(job) for job in await run.jobs(1)] == [(1, 0, 2)]


async def test_a_finished_run_grants_nothing(open_run: OpenRun) -> None:
    run = await open_run()
    await run.close()
    assert (await run.next_jobs()).idle_reason == "finished"
    await run.open(floor=run.epoch)
    assert len(await run.jobs(1)) == 1, "a run that was closed early can be resumed"


async def test_a_closed_run_still_evaluates(open_run: OpenRun) -> None:
    run = await open_run()
    await run.jobs(1)
    await run.close()
    episodes = [s.EvaluationEpisode(task="Push", seed=2**31)]
    request = s.StartEvaluationRequest(run=run.run, evaluation="final", version=version(0), episodes=episodes)
    await run.store.start_evaluation(request)
    (job,) = await run.jobs(5)
    assert job.evaluation == "final"
    await run.append(job)
    assert (await run.next_jobs()).idle_reason == "finished"


async def test_what_was_not_the_jobs_fault_does_not_count_against_its_attempts(open_run: OpenRun) -> None:
    run = await open_run(max_attempts=2, group_size=1)
    for attempt in range(1, 32):
        (job,) = await run.jobs(1)
        assert name(job) == (1, 0, attempt)
        await run.give_back(job)
        await run.give_back(job)  # the first reply was lost
    (job,) = await run.jobs(1)
    await run.fail(job)
    stats = await run.stats()
    assert [stats.counters[c] for c in ("given_back", "failed", "zeroed")] == [31, 1, 0]
    (job,) = await run.jobs(1)
    await run.give_back(job, "this start ended 32 simulators")
    assert await run.counter("zeroed") == 1


async def test_a_run_closed_after_its_last_update_keeps_no_bytes(open_run: OpenRun) -> None:
    run = await open_run(total_updates=1, groups_per_update=1, staleness=1)
    await run.fill(1)
    await run.trained(1, await run.leased())
    await run.ack(1)
    stats = await run.stats()
    assert (stats.bytes, stats.leased_groups) == (0, 0)
    await run.close()
    assert (await run.next_jobs(update=1)).idle_reason == "finished"


async def test_a_run_is_swept_until_nothing_is_left_to_do(open_run: OpenRun, clock: Clock) -> None:
    run = await open_run(total_updates=1, groups_per_update=1, staleness=0)
    await run.fill(1)
    await run.trained(1, await run.leased())
    await run.close()
    await run.store.sweep(run.run)
    assert run.run in await run.store.runs(), "bytes are kept until the checkpoint"
    await run.ack(1)
    clock.forward(2000)  # its workers leave
    await run.store.sweep(run.run)
    assert run.run not in await run.store.runs()
    await run.open(floor=run.epoch)
    assert run.run in await run.store.runs()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"run": "no/slash"}, "run 'no/slash'"),
        ({"group_size": 0}, "group_size = 0; expected 1"),
        ({"groups_per_update": 0}, "groups_per_update = 0"),
        ({"total_updates": 0}, "total_updates = 0"),
        ({"max_attempts": 0}, "max_attempts = 0"),
        ({"on_failure": "ignore"}, "on_failure = 'ignore'; expected 'zero' or 'discard'"),
        ({"score": "best"}, "score = 'best'"),
        ({"grant_seconds": 0.0}, "grant_seconds = 0"),
        ({"tasks": {}}, "tasks = "),
        ({"tasks": {"Push": 0.0}}, "weight of task 'Push' = 0.0; expected above 0"),
        ({"tasks": {"Push": float("nan")}}, "weight of task 'Push' = nan"),
        ({"group_size": 1, "filter_uniform": True}, "filter_uniform needs group_size of 2"),
        ({"model": ""}, "model ''"),
    ],
)
async def test_an_impossible_spec_is_refused_by_name(
    store: RolloutStore, clock: Clock, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidInput, match=message):
        await Harness(store, clock, make_spec(**change)).open()


async def test_another_spec_under_the_same_name_is_refused(
    open_run: OpenRun, store: RolloutStore, clock: Clock
) -> None:
    run = await open_run(staleness=1)
    with pytest.raises(InvalidInput, match=r"staleness \(stored 1, given 3\)"):
        await Harness(store, clock, make_spec(run.run, staleness=3)).open()


async def test_a_run_that_is_not_there(store: RolloutStore, clock: Clock) -> None:
    run = Harness(store, clock, make_spec())
    for call in (run.next_jobs(), run.renew("w0"), run.stats(), run.lease(epoch=1), run.set_start(1, b"x")):
        with pytest.raises(NotFound, match="not open yet"):
            await call
