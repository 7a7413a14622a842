"""Episodes reach the store in the background, at most so many at a time; a refused one gives its job back."""

import asyncio

import numpy as np
import pytest
from dvla.v1 import store_pb2
from structlog.testing import capture_logs

from services.common.errors import DvlaError, InvalidInput
from services.common.telemetry import Telemetry
from services.common.trajectory import Trajectory
from services.rollout.worker.delivery import Deliveries
from services.rollout.worker.episode import Episode, facts
from tests.rollout.worker.fakes import make_chunk, make_job, make_outcome


class Store:
    """Takes an episode when told to."""

    def __init__(self, error: Exception | None = None, counts: bool = True) -> None:
        self.error, self.counts = error, counts
        self.open = asyncio.Event()
        self.appended: list[tuple[int, Trajectory | None]] = []
        self.failed: list[tuple[int, str]] = []

    async def append(self, job: store_pb2.Job, episode: store_pb2.Episode, trajectory: Trajectory | None) -> bool:
        await self.open.wait()
        if self.error:
            raise self.error
        self.appended.append((job.key.group, trajectory))
        return self.counts

    async def fail(self, job: store_pb2.Job, reason: str) -> None:
        self.failed.append((job.key.group, reason))


def an_episode(number: int, evaluate: bool = False) -> tuple[store_pb2.Job, store_pb2.Episode, Trajectory]:
    job = make_job(number, evaluate=evaluate)
    episode, outcome = Episode(job, "", True, {"state": np.zeros(2, np.float32)}), make_outcome(truncated=True)
    episode.add(make_chunk(), outcome)
    trajectory = episode.trajectory(outcome)
    return job, facts(trajectory, "success", "toy", "w"), trajectory


async def test_sampling_goes_on_until_too_many_are_on_their_way() -> None:
    store, telemetry = Store(), Telemetry("rollout", "w")
    deliveries = Deliveries(store, telemetry, pending=2)
    for number in range(2):
        await asyncio.wait_for(deliveries.add(*an_episode(number)), 5)
    third = asyncio.create_task(deliveries.add(*an_episode(2)))
    await asyncio.sleep(0.01)
    assert not third.done()
    store.open.set()
    await asyncio.wait_for(third, 5)
    await deliveries.flush(5)
    assert [number for number, _ in store.appended] == [0, 1, 2]
    assert telemetry.metrics() == {"episodes_accepted": 3}


async def test_a_delivery_cancelled_while_it_waits_for_room_took_nothing() -> None:
    store = Store()
    deliveries = Deliveries(store, Telemetry("rollout", "w"), pending=1)
    await deliveries.add(*an_episode(0))
    waiting = asyncio.create_task(deliveries.add(*an_episode(1)))
    await asyncio.sleep(0.01)
    waiting.cancel()
    await asyncio.wait([waiting])
    store.open.set()
    await deliveries.flush(5)
    assert [number for number, _ in store.appended] == [0]
    await asyncio.wait_for(deliveries.add(*an_episode(2)), 5)  # the room is free again


async def test_evaluations_send_facts_only_and_late_episodes_are_counted() -> None:
    store, telemetry = Store(counts=False), Telemetry("rollout", "w")
    deliveries = Deliveries(store, telemetry, pending=2)
    store.open.set()
    await deliveries.add(*an_episode(0))
    await deliveries.add(*an_episode(1, evaluate=True))
    await deliveries.flush(5)
    assert store.appended[0][1] is not None
    assert store.appended[1] == (1, None)
    assert telemetry.metrics() == {"episodes_superseded": 2}


@pytest.mark.parametrize("error", [InvalidInput("payload too large"), DvlaError("INTERNAL: a bug there")])
async def test_a_refused_episode_gives_its_job_back(error: DvlaError) -> None:
    store, telemetry = Store(error), Telemetry("rollout", "w")
    deliveries = Deliveries(store, telemetry, pending=1)
    store.open.set()
    with capture_logs() as logs:
        await deliveries.add(*an_episode(3))
        await deliveries.flush(5)
    assert store.failed == [(3, f"refused: {error}")]
    assert [line["event"] for line in logs] == ["episode refused"]
    assert telemetry.metrics() == {"episodes_refused": 1}


async def test_an_episode_that_a_learner_must_not_see_is_never_sent() -> None:
    store, telemetry = Store(), Telemetry("rollout", "w")
    deliveries = Deliveries(store, telemetry, pending=1)
    store.open.set()
    job, told, trajectory = an_episode(4)
    trajectory["log_prob"][0, 0, 0] = np.nan
    await deliveries.add(job, told, trajectory)
    await deliveries.flush(5)
    assert not store.appended
    assert store.failed == [(4, "refused: 'log_prob' holds a value that is not finite")]


async def test_a_bug_on_the_way_is_logged_and_leaves_room_for_the_next() -> None:
    store = Store(ZeroDivisionError("a bug"))
    deliveries = Deliveries(store, Telemetry("rollout", "w"), pending=1)
    store.open.set()
    with capture_logs() as logs:
        for number in range(2):
            await asyncio.wait_for(deliveries.add(*an_episode(number)), 5)
        await deliveries.flush(5)
        await asyncio.sleep(0)
    assert [line["event"] for line in logs] == ["episode not handed over"] * 2


async def test_flush_waits_no_longer_than_it_may() -> None:
    deliveries = Deliveries(Store(), Telemetry("rollout", "w"), pending=1)
    await deliveries.add(*an_episode(0))
    await asyncio.wait_for(deliveries.flush(0.01), 5)
