"""The learner: leases, updates, checkpoints, refusals, fencing, and its own death at any moment."""

import contextlib
from random import Random

import pytest
from dvla.v1 import store_pb2 as s

from services.common.errors import InvalidInput, NotFound, Superseded
from services.rollout.store.machine import RolloutStore
from tests.rollout.store.conftest import OpenRun
from tests.rollout.store.harness import Clock, Harness, make_spec

pytestmark = pytest.mark.redis


async def test_epochs_rise_above_the_floor_and_above_each_other(store: RolloutStore, clock: Clock) -> None:
    run = Harness(store, clock, make_spec())
    assert (await run.open(floor=7)).epoch == 8
    assert (await run.open(floor=3)).epoch == 9
    assert (await run.open(floor=20)).epoch == 21
    reply = await store.get_run(s.GetRunRequest(run=run.run))
    assert (reply.spec, reply.epoch, reply.update, reply.finished) == (run.spec, 21, 0, False)


async def test_every_call_of_an_older_epoch_is_refused(open_run: OpenRun) -> None:
    run = await open_run()
    await run.fill(2)
    groups = await run.leased()
    old = run.epoch
    await run.open(floor=old)
    for call in (
        run.lease(epoch=old),
        run.trained(1, groups, epoch=old),
        run.ack(0, epoch=old),
        run.nack(groups[0], epoch=old),
        run.store.close_run(s.CloseRunRequest(run=run.run, epoch=old)),
    ):
        with pytest.raises(Superseded, match="another learner"):
            await call
    assert (await run.stats()).update == 0


async def test_a_lease_repeated_from_a_cursor_gives_the_same_groups(open_run: OpenRun) -> None:
    run = await open_run()
    await run.fill(4)
    request = s.LeaseRequest(run=run.run, epoch=run.epoch, count=2, cursor="0-0")
    first = await run.store.lease(request)
    again = await run.store.lease(request)  # the first reply was lost
    assert [group.group for group in again.groups] == [group.group for group in first.groups] == [1, 2]
    request.cursor = first.cursor
    rest = await run.store.lease(request)
    assert [group.group for group in rest.groups] == [3, 4]
    request.cursor = "yesterday"
    with pytest.raises(InvalidInput, match="cursor 'yesterday'"):
        await run.store.lease(request)


async def test_a_discarded_group_is_counted_and_replaced_without_a_dead_letter(open_run: OpenRun) -> None:
    run = await open_run(filter_uniform=False)
    await run.fill(4)
    await run.leased()
    for _ in range(2):  # the first reply was lost
        with contextlib.suppress(NotFound):
            await run.nack(2, discard=True)
    stats = await run.stats()
    assert (stats.counters["discarded_batch"], stats.counters["dead"], await run.letters()) == (1, 0, [])
    assert await run.fill(1) == [5]
    await run.trained(1, [1, 3])
    await run.trained(2, [4, *await run.leased()])


async def test_without_a_cursor_each_group_is_leased_once(open_run: OpenRun) -> None:
    run = await open_run()
    await run.fill(4)
    assert [await run.leased(3), await run.leased(3), await run.leased(3)] == [[1, 2, 3], [4], []]


@pytest.mark.parametrize(
    ("update", "groups", "message"),
    [
        (2, [1, 2], "update 2 does not follow update 0; expected 1"),
        (1, [1, 99], "group 99 is not leased"),
        (1, [1, 3], "group 3 is not leased"),
        (1, [1, 4], "group 4 is not leased"),
        (1, [1, 1], "group 1 is named twice"),
    ],
)
async def test_an_update_that_cannot_be_is_refused_as_a_whole(
    open_run: OpenRun, update: int, groups: list[int], message: str
) -> None:
    run = await open_run()
    await run.fill(3)  # 3 is complete, 4 is open
    await run.jobs(1)
    assert await run.leased(2) == [1, 2]
    with pytest.raises(InvalidInput, match=message):
        await run.trained(update, groups)
    stats = await run.stats()
    assert (stats.update, stats.counters["trained"]) == (0, 0)


async def test_trained_and_ack_can_be_repeated(open_run: OpenRun) -> None:
    run = await open_run()
    await run.fill(2)
    groups = await run.leased()
    for _ in range(2):
        await run.trained(1, groups)
    assert await run.ack(1) == groups
    assert await run.ack(1) == []
    await run.trained(1, groups)
    assert await run.counter("trained") == 2
    with pytest.raises(InvalidInput, match="ahead of update 1"):
        await run.ack(2)


async def test_a_group_makes_one_update_only(open_run: OpenRun) -> None:
    run = await open_run()
    await run.fill(4)
    groups = await run.leased()
    await run.trained(1, groups[:2])
    with pytest.raises(InvalidInput, match="group 1 made update 1 already"):
        await run.trained(2, [groups[0], groups[2]])


async def test_staleness_is_that_of_the_oldest_weights(open_run: OpenRun) -> None:
    run = await open_run(staleness=3, groups_per_update=1)
    jobs = await run.jobs(8)
    for job in jobs:
        await run.append(job, float(job.key.member), 0)
    for update in range(1, 5):
        await run.trained(update, await run.leased(1))
    assert list((await run.stats()).staleness) == [1, 1, 1, 1]


async def test_a_refused_group_is_kept_for_a_person_and_replaced(open_run: OpenRun) -> None:
    run = await open_run(staleness=0)
    await run.fill(2)
    await run.leased()
    await run.nack(1, "reward is nan")
    await run.nack(1, "reward is nan")
    (letter,) = await run.letters()
    assert (letter.group, letter.reason) == (1, "reward is nan")
    assert await run.fill(1) == [3]
    await run.trained(1, [2, *await run.leased()])
    assert await run.replay(letter.id) == 1
    assert await run.letters() == []
    (group,) = await run.lease()
    assert (group.group, await run.fetch(group.claims)) == (1, [b"(1, 0, 1)", b"(1, 1, 1)"])
    with pytest.raises(NotFound, match="no dead letter"):
        await run.replay(letter.id)


async def test_only_leased_groups_can_be_refused(open_run: OpenRun) -> None:
    run = await open_run()
    await run.fill(2)
    with pytest.raises(InvalidInput, match="not leased"):
        await run.nack(1)
    await run.trained(1, await run.leased())
    with pytest.raises(InvalidInput, match="was trained"):
        await run.nack(1)
    with pytest.raises(NotFound, match="no group 77"):
        await run.nack(77)


async def test_a_dead_letter_whose_bytes_are_gone_cannot_be_replayed(open_run: OpenRun) -> None:
    run = await open_run()
    await run.fill(1)
    (group,) = await run.lease()
    await run.nack(1)
    await run.store.link.client.delete(f"dvla:blob:{group.claims[1].blob}:0")
    with pytest.raises(NotFound, match="bytes of group 1 are gone"):
        await run.replay((await run.letters())[0].id)
    assert len(await run.letters()) == 1


async def test_a_group_that_ends_every_learner_is_refused_in_the_end(open_run: OpenRun) -> None:
    run = await open_run(group_size=1)
    await run.fill(2)
    for _ in range(32):
        assert (await run.leased())[0] == 1
        await run.open(floor=run.epoch)
    assert await run.leased() == []
    assert [letter.reason for letter in await run.letters()] == ["delivered 32 times without being trained"] * 2


async def test_after_a_crash_the_checkpoint_decides_what_was_trained(open_run: OpenRun) -> None:
    run = await open_run(staleness=2, groups_per_update=1)
    await run.fill(3)
    groups = await run.leased()
    for update in (1, 2, 3):
        await run.trained(update, [groups[update - 1]])
    await run.ack(1)
    reply = await run.open(floor=run.epoch, resume=2)
    assert (reply.update, list(reply.rolled_back), list(reply.lost)) == (2, [3], [])
    assert [(group.group, group.trained_update) for group in await run.lease()] == [(2, 2), (3, 0)]
    stats = await run.stats()
    assert (stats.counters["trained"], stats.counters["rolled_back"], list(stats.staleness)) == (2, 1, [1, 1, 0])
    await run.trained(3, [3])
    assert await run.ack(3) == [2, 3]


async def test_falling_back_behind_an_ack_reports_the_lost_groups(open_run: OpenRun) -> None:
    run = await open_run(staleness=2, groups_per_update=1)
    await run.fill(3)
    for update, group in enumerate(await run.leased(), 1):
        await run.trained(update, [group])
    await run.ack(2)
    reply = await run.open(floor=run.epoch, resume=0)
    assert (list(reply.rolled_back), list(reply.lost)) == ([3], [1, 2])
    assert await run.counter("lost") == 2
    assert list((await run.open(floor=run.epoch, resume=0)).lost) == [], "reported once"


async def test_a_learner_that_died_before_it_said_what_it_trained(open_run: OpenRun) -> None:
    """Its checkpoint is ahead of the store; it names the groups of the missing update afterwards."""
    run = await open_run(groups_per_update=1, staleness=1)
    await run.fill(2)
    await run.leased()
    assert (await run.open(floor=run.epoch, resume=1)).update == 1
    assert [(group.group, group.trained_update) for group in await run.lease()] == [(1, 0), (2, 0)]
    await run.trained(1, [1])
    assert await run.ack(1) == [1]
    await run.trained(2, [2])


@pytest.mark.every_server
async def test_s29_five_crashes_in_a_run_train_every_group_once(open_run: OpenRun) -> None:
    """Killed at any instant between lease, update, report, checkpoint and ack (S29)."""
    chance = Random(29)
    run = await open_run(group_size=2, groups_per_update=2, staleness=1, total_updates=40)
    crashes = set(chance.sample(range(5, 150), 5))
    weights: dict[int, list[int]] = {}  # what the current weights were made of: update -> groups
    saved: dict[int, list[int]] = {}
    held: list[int] = []
    for instant in range(400):
        if len(saved) == 40:
            break
        await run.fill(4, len(weights))
        if instant in crashes:
            weights = dict(saved)
            await run.open(floor=run.epoch, resume=len(saved))
            trained = {number: update for update, numbers in saved.items() for number in numbers}
            held = []
            for group in await run.lease():
                if group.group not in trained:
                    held.append(group.group)
                elif not group.trained_update:
                    await run.trained(trained[group.group], [group.group])
            await run.ack(len(saved))
        held += await run.leased()
        deed = chance.choice(["train", "train and say", "save", "save and ack"])
        if deed.startswith("train") and len(held) >= 2 and len(weights) < 40:
            weights[len(weights) + 1], held = held[:2], held[2:]
            if deed == "train":
                continue  # a crash now finds the store uninformed
        for update in range((await run.stats()).update + 1, len(weights) + 1):
            await run.trained(update, weights[update])
        if deed.startswith("save"):
            saved = dict(weights)
        if deed == "save and ack":
            await run.ack(len(saved))
    trained_groups = [number for numbers in saved.values() for number in numbers]
    assert sorted(trained_groups) == list(range(1, 81))
    assert await run.counter("lost") == 0
