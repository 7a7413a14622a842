"""What the learner does when the store misbehaves: bad data, outages, lost data, a successor, silence."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest

from services.common.bundle import Version
from services.common.errors import ConfigError, DvlaError, Superseded
from services.learner.episodes import Member
from tests.learner.data import without_data
from tests.learner.harness import Bench

Make = Callable[..., Bench]


def until(condition: Callable[[], object], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "this never came true"
        time.sleep(0.01)


@contextmanager
def running(bench: Bench) -> Iterator[threading.Thread]:
    """A learner in a thread; what it raises is kept in `bench.error`."""
    loop = bench.learner()

    def body() -> None:
        try:
            loop.run(0)
        except DvlaError as error:
            bench.error = error

    thread = threading.Thread(target=body)
    thread.start()
    try:
        yield thread
    finally:
        bench.progress.stopping.set()
        thread.join(60)
        assert not thread.is_alive()


def spoiled(bench: Bench, number: int, change: Callable[[list[Member]], list[Member]]) -> None:
    """Let group `number` of epoch 0 be made differently."""
    bench.made[number] = change(bench.produce(number))


def test_only_the_offender_is_refused_and_training_goes_on(make_bench: Make) -> None:
    """S10: one member holds a NaN; its group goes to the dead letters with the reason, nobody else suffers."""
    bench = make_bench(updates=3)

    def poison(members: list[Member]) -> list[Member]:
        trajectory = dict(members[1].trajectory or {})
        trajectory["log_prob"] = np.full_like(trajectory["log_prob"], np.nan)
        return [members[0], replace(members[1], trajectory=trajectory), *members[2:]]

    spoiled(bench, 3, poison)
    assert bench.run()
    bench.assert_exactly_once()
    assert list(bench.store.run.dead) == [3]
    assert "member 1 of group 3: 'log_prob' holds a value that is not finite" in bench.store.run.dead[3]
    assert bench.telemetry.metrics()["groups_refused"] == 1


def test_bytes_that_do_not_match_their_hash_are_refused(make_bench: Make) -> None:
    bench = make_bench(updates=2)
    bench.store.spoil = lambda group, data: bytes([data[0] ^ 1]) + data[1:] if group == 2 else data
    assert bench.run()
    assert list(bench.store.run.dead) == [2]
    assert "hash" in bench.store.run.dead[2]
    bench.assert_exactly_once()


def test_members_without_data_train_with_their_group(make_bench: Make) -> None:
    bench = make_bench(updates=2)
    spoiled(bench, 1, lambda members: [*members[:2], without_data(members[2])])
    assert bench.run()
    bench.assert_exactly_once()
    assert not bench.store.run.dead


def test_batches_without_signal_make_no_version_until_scores_vary(make_bench: Make) -> None:
    """S13: nothing to learn from in 12 groups; no crash, no step, no version; then learning starts by itself."""
    bench = make_bench(updates=2, filter_uniform=False)
    for number in range(1, 13):
        spoiled(bench, number, lambda members: [replace(member, score=0.35) for member in members])
    assert bench.run()
    assert sorted(bench.store.run.discarded) == list(range(1, 13))
    assert "no signal" in bench.store.run.discarded[5]
    assert not bench.store.run.dead
    assert list(bench.weights.sealed) == [Version(1, 0), Version(1, 1), Version(1, 2)]
    assert bench.telemetry.metrics()["batches_without_signal"] == 6
    bench.assert_exactly_once()


def test_a_store_outage_only_delays(make_bench: Make) -> None:
    bench = make_bench(updates=4)
    with running(bench) as thread:
        until(lambda: bench.store.run.update >= 1 if bench.store.record else False)
        bench.store.stop()
        time.sleep(0.3)
        bench.store.start()
        thread.join(60)
    bench.assert_exactly_once()
    assert bench.progress.state == "finished"


def test_groups_whose_lease_reply_was_lost_come_again_in_order(make_bench: Make) -> None:
    """The store took them for leased and the learner never saw them: they must not be stuck, nor be overtaken."""
    bench = make_bench(updates=6)
    bench.store.lose_leases = 2
    assert bench.run()
    bench.assert_exactly_once()
    assert [group for groups in bench.surviving().values() for group in groups] == list(range(1, 13))


def test_an_empty_redis_is_opened_again_with_a_higher_epoch(make_bench: Make) -> None:
    """S19: the run is lost; the learner keeps its number, and goes on in an epoch above its own."""
    bench = make_bench(updates=6)
    with running(bench) as thread:
        until(lambda: bench.store.record is not None and bench.store.run.update >= 2)
        bench.store.wipe()
        thread.join(60)
    assert bench.progress.state == "finished"
    assert bench.store.run.update == 6
    assert bench.store.run.epoch == 2
    history = bench.surviving()
    assert sorted(history) == [1, 2, 3, 4, 5, 6]
    groups = [group for update in history.values() for group in update]
    assert len(groups) == len(set(groups))
    assert list(bench.weights.sealed) == sorted(bench.weights.sealed)
    assert bench.weights.newest == Version(2, 6)


def test_redis_that_fell_back_gets_no_group_trained_twice(make_bench: Make) -> None:
    bench = make_bench(updates=6, checkpoint_updates=0)
    with running(bench) as thread:
        until(lambda: bench.store.record is not None and bench.store.run.update >= 1)
        earlier = bench.store.snapshot()
        until(lambda: bench.store.run.update >= 3)
        bench.store.restore(earlier)
        thread.join(60)
    assert bench.progress.state == "finished"
    bench.assert_exactly_once()


def test_a_successor_ends_this_learner_with_a_clear_line(make_bench: Make) -> None:
    bench = make_bench(updates=50)
    with running(bench) as thread:
        until(lambda: bench.store.record is not None and bench.store.run.update >= 1)
        bench.store.run.epoch += 1
        thread.join(60)
    assert isinstance(bench.error, Superseded)
    assert "another learner has epoch 2" in str(bench.error)
    assert bench.progress.state == "failed"


def test_another_spec_is_a_setting_error(make_bench: Make) -> None:
    bench = make_bench(updates=4)
    bench.run(stop_after=1)
    bench.config = replace(bench.config, group_size=4)
    with pytest.raises(ConfigError, match="run 'test' cannot be opened"):
        bench.run()


def test_a_starved_learner_says_so_and_gives_up_when_told(make_bench: Make) -> None:
    """S30: no group arrives."""
    bench = make_bench(starved_seconds=0.2, give_up_seconds=1.0)
    bench.store.paused = True
    with running(bench) as thread:
        until(lambda: "without a group" in bench.telemetry.facts.get("starved", ""))
        thread.join(60)
    assert "no group for" in str(bench.error)


def test_a_policy_that_always_succeeds_ends_the_run(make_bench: Make) -> None:
    bench = make_bench(updates=500, stop_at_success=0.9)
    bench.store.paused = True
    with running(bench) as thread:
        until(lambda: "GetStats" in bench.store.calls)
        bench.store.counters["accepted"] += 100
        bench.store.sums["accepted_success"] += 95.0
        thread.join(60)
    assert bench.progress.state == "finished"
    assert bench.store.run.finished
