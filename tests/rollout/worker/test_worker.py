"""The worker among real services: episodes arrive whole, evaluations are exact, failures stay where they happen."""

import asyncio
import signal
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from dvla.v1 import sim_pb2, sim_pb2_grpc, store_pb2
from structlog.testing import capture_logs

from services.common.config import RoleConfig
from services.common.errors import NotFound, Unavailable, Unsupported
from services.common.redis_server import RedisServer
from services.common.server import RoleServer
from services.common.telemetry import Telemetry
from services.common.trajectory import instruction_text, validate
from services.common.wire import spec_to_proto
from services.rollout.worker import worker as worker_module
from services.rollout.worker.policy_runner import PolicyRunner
from services.rollout.worker.sampler import Sampler
from services.rollout.worker.worker import Asking, Worker
from services.sim.toy import ToySim
from tests.rollout.worker.fakes import SPEC, ScriptedDesk, ScriptedSession, make_job
from tests.rollout.worker.plant import Plant, plant, until

pytestmark = pytest.mark.redis
IN_FLIGHT = 8
"""Episodes that admission allows on the first version: 2 groups of 2 an update, staleness 1."""


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="dvla-") as name:
        yield Path(name)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_module, "LOOK_SECONDS", 0.1)
    monkeypatch.setattr(worker_module, "PAUSE_SECONDS", 0.05)
    monkeypatch.setattr(worker_module, "LONGEST_PAUSE_SECONDS", 0.1)


async def test_episodes_of_a_run_arrive_whole_and_follow_the_weights(folder: Path, redis_server: RedisServer) -> None:
    async with plant(folder, redis_server.url) as p:
        worker, _ = await p.worker(await p.sim("s0"), await p.sim("s1"))
        stats = await p.accepted(IN_FLIGHT)
        assert stats.counters["failed"] == stats.counters["superseded"] == 0
        groups = await p.lease()
        assert [group.group for group in groups] == [1, 2, 3, 4]
        for group, members in zip(groups, await p.trajectories(groups), strict=True):
            for claim, trajectory in zip(group.claims, members, strict=True):
                validate(trajectory)
                check_against_facts(trajectory, claim.episode)
                assert (trajectory["version"] == (p.epoch, 0)).all()
                assert instruction_text(trajectory) == "move the point to the goal"
            one, other = members
            np.testing.assert_array_equal(one["obs/state"][0], other["obs/state"][0])  # one start for the group
            assert not np.array_equal(one["action"][0], other["action"][0])  # but randomness of their own
        await until(reason_of(worker), lambda reason: reason in ("weights", "admission"))
        # The next update lets two more groups in, made by its version.
        await p.trained(1, groups[:2])
        await p.publish(1)
        await p.accepted(IN_FLIGHT + 4)
        groups = await p.lease()
        versions = {tuple(row) for ts in await p.trajectories(groups) for t in ts for row in t["version"].tolist()}
        assert versions == {(p.epoch, 1)}
        assert worker.telemetry.metrics()["episodes_accepted"] == IN_FLIGHT + 4
        seconds = worker.telemetry.lane("sampling").seconds()
        assert seconds["busy"] > 0
        assert seconds.get("admission", 0) + seconds.get("weights", 0) > 0


def reason_of(worker: Worker) -> Any:
    async def reason() -> str:
        return worker.idle_reason

    return reason


def check_against_facts(trajectory: dict[str, Any], facts: store_pb2.Episode) -> None:
    assert facts.steps == trajectory["executed"].sum() <= 10
    assert facts.score == float(trajectory["success"].any()) == float(facts.success_once)
    assert (facts.terminated, facts.truncated) == tuple(trajectory["ends"].tolist())
    assert facts.terminated == facts.success_once
    assert facts.backend == "toy/numpy x2"
    assert "final_obs/state" not in trajectory
    positions = trajectory["obs/state"][:, :2]
    moved = positions[0] + 0.15 * np.cumsum(trajectory["executed_action"].reshape(-1, 2), axis=0)
    starts = moved[4::5][: len(positions) - 1]  # after each full chunk, where nothing hit the wall
    inside = (np.abs(moved) < 1).all()
    if inside and len(positions) > 1:
        np.testing.assert_allclose(positions[1:], starts, atol=1e-5)


async def test_an_evaluation_has_each_of_its_episodes_once_with_its_own_version(
    folder: Path, redis_server: RedisServer
) -> None:
    async with plant(folder, redis_server.url) as p:
        await p.publish(1)
        episodes = [store_pb2.EvaluationEpisode(task="reach", seed=2**31 + n) for n in range(7)]
        results = {}
        sims = [await p.sim("s0", slots=3), await p.sim("s1", slots=1)]
        for name, update in (("old", 0), ("again", 0), ("new", 1)):
            version = {"epoch": p.epoch, "update": update}
            request = store_pb2.StartEvaluationRequest(run=p.run, evaluation=name, version=version, episodes=episodes)  # type: ignore[arg-type]
            await p.stub.StartEvaluation(request, timeout=20)
        worker, _ = await p.worker(*sims)
        for name, update in (("old", 0), ("again", 0), ("new", 1)):

            async def ask(name: str = name) -> store_pb2.GetEvaluationResponse:
                request = store_pb2.GetEvaluationRequest(run=p.run, evaluation=name, wait_seconds=5)
                reply: store_pb2.GetEvaluationResponse = await p.stub.GetEvaluation(request, timeout=20)
                return reply

            reply = await until(ask, lambda reply: len(reply.results) >= 7)
            assert [result.number for result in reply.results] == list(range(1, 8))
            assert [result.what.seed for result in reply.results] == [2**31 + n for n in range(7)]
            for result in reply.results:
                assert not result.failure
                assert (result.episode.oldest.update, result.episode.newest.update) == (update, update)
                assert result.episode.truncated  # to the horizon, whether it succeeded or not
                assert result.episode.steps == 10
            results[name] = [result.episode.reward_sum for result in reply.results]
        assert results["old"] == results["again"]  # whatever slot, session and batch they ran in
        assert worker.policy.version == (p.epoch, 1)


async def test_a_killed_simulator_costs_only_its_own_episodes(folder: Path, redis_server: RedisServer) -> None:
    async with plant(folder, redis_server.url, staleness=100) as p:
        address, process = p.sim_process("doomed", slots=4)
        worker, task = await p.worker(await p.sim("s0"), address)
        await until(sessions_of(worker), lambda sessions: sessions == 4)
        await p.accepted((await p.stats()).counters["accepted"] + 10)
        process.send_signal(signal.SIGKILL)
        with capture_logs() as logs:
            await until(metric_of(worker, "episodes_given_back"), lambda jobs: jobs > 0)
            admitted = (await p.stats()).counters["admitted"]
            groups: list[store_pb2.Group] = []
            while len(groups) < admitted:  # every group that was live at that moment is completed
                groups += await p.lease()
        assert [group.group for group in groups] == list(range(1, len(groups) + 1))
        assert {len(group.claims) for group in groups} == {2}
        stats, metrics = await p.stats(), worker.telemetry.metrics()
        again = sum(claim.key.attempt - 1 for group in groups for claim in group.claims)
        assert again == stats.counters["given_back"] == metrics["episodes_given_back"]
        assert metrics["episodes_lost"] <= again <= 8  # two sessions of four slots
        assert stats.counters["failed"] == stats.counters["zeroed"] == stats.counters["expired"] == 0
        assert not task.done()
        assert {line["address"] for line in logs if line["event"] == "simulator lost"} == {address}
        # A replacement under the same address is found by itself.
        _, process = p.sim_process("doomed", slots=4)
        await until(sessions_of(worker), lambda sessions: sessions == 4)


def sessions_of(worker: Worker) -> Any:
    async def sessions() -> int:
        return len(worker._sessions)

    return sessions


async def test_a_worker_that_is_stopped_gives_its_jobs_back(folder: Path, redis_server: RedisServer) -> None:
    async with plant(folder, redis_server.url, staleness=30, grant_seconds=1000.0) as p:
        _, task = await p.worker(await p.sim("s0", slots=4))
        await p.accepted(2)
        task.cancel()
        await asyncio.wait([task])
        stats = await p.stats()
        assert stats.granted_jobs == 0
        assert stats.counters["given_back"] > 0
        assert stats.counters["failed"] == 0
        _, other = await p.worker(await p.sim("s1", slots=4), name="w1")
        await p.accepted(stats.counters["accepted"] + 10)
        assert not other.done()


async def test_the_process_ends_with_zero_on_sigterm_and_gives_its_jobs_back(
    folder: Path, redis_server: RedisServer
) -> None:
    async with plant(folder, redis_server.url, staleness=50, grant_seconds=1000.0) as p:
        flags = (f"--listen=unix:{folder}/w", f"--run={p.run}", f"--store={p.store_address}", f"--weights={p.weights}")
        process = p.process("services.rollout.worker", *flags, f"--sims={await p.sim('s0', slots=4)}")
        await p.accepted(2)
        process.send_signal(signal.SIGTERM)
        _, stderr = await asyncio.to_thread(process.communicate, timeout=30)
        assert process.returncode == 0, stderr.decode()
        assert b"Traceback" not in stderr
        stats = await p.stats()
        assert stats.granted_jobs == 0


async def test_an_unfit_simulator_ends_the_worker_with_one_clear_error(folder: Path, redis_server: RedisServer) -> None:
    async with plant(folder, redis_server.url, tasks=["reach", "mirror"]) as p:
        _, task = await p.worker(await p.sim("s0", tasks=("reach",)))
        with pytest.raises(Unsupported, match=r"simulator unix:.* does not know task 'mirror'; it offers \['reach'\]"):
            await asyncio.wait_for(task, 30)
    async with plant(folder, redis_server.url, observation=["state", "rgb/top"]) as p:
        _, task = await p.worker(await p.sim("s1"))
        with pytest.raises(Unsupported, match=r"does not offer \['rgb/top'\], which the policy reads"):
            await asyncio.wait_for(task, 30)


class Liar(sim_pb2_grpc.SimServiceServicer):
    """A simulator that opens sessions and then answers nonsense."""

    async def Describe(self, request: sim_pb2.DescribeRequest, context: Any) -> sim_pb2.DescribeResponse:
        return sim_pb2.DescribeResponse(spec=spec_to_proto(ToySim().spec), slots_per_session=2)

    async def MakeStart(self, request: sim_pb2.MakeStartRequest, context: Any) -> sim_pb2.MakeStartResponse:
        return sim_pb2.MakeStartResponse(state=ToySim().make_start("reach", request.seed))

    async def Session(
        self, request_iterator: AsyncIterator[sim_pb2.SessionRequest], context: Any
    ) -> AsyncIterator[sim_pb2.SessionResponse]:
        yield sim_pb2.SessionResponse(opened=sim_pb2.SessionOpened(slots=2))
        async for _ in request_iterator:
            yield sim_pb2.SessionResponse(advanced=sim_pb2.Advanced())


async def test_a_simulator_that_misbehaves_does_not_stop_the_others(folder: Path, redis_server: RedisServer) -> None:
    async with plant(folder, redis_server.url, staleness=4, max_attempts=1000) as p:
        address = f"unix:{folder}/liar"
        server = RoleServer(RoleConfig(listen=address, drain_seconds=0), Telemetry("sim", "liar"))
        sim_pb2_grpc.add_SimServiceServicer_to_server(Liar(), server.grpc)
        await server.start()
        worker, task = await p.worker(await p.sim("s0"), address)
        with capture_logs() as logs:
            await p.accepted(5 * 2 * 2)
            await until(metric_of(worker, "sessions_failed"), lambda failed: failed >= 2)
        assert not task.done()
        errors = [line for line in logs if line["event"] == "session failed"]
        assert {line["address"] for line in errors} == {address}
        assert "no finite first observation" in errors[0]["reason"]
        await server.stop()


def metric_of(worker: Worker, name: str) -> Any:
    async def metric() -> float:
        return worker.telemetry.metrics().get(name, 0.0)

    return metric


async def test_two_workers_share_the_simulators(folder: Path, redis_server: RedisServer) -> None:
    async with plant(folder, redis_server.url, staleness=100) as p:
        sims = [await p.sim(f"s{n}") for n in range(3)]
        one, _ = await p.worker(*sims)
        await until(sessions_of(one), lambda sessions: sessions == 6)
        two, task = await p.worker(*sims, name="w1")
        await until(sessions_of(two), lambda sessions: sessions == 2)
        await until(sessions_of(one), lambda sessions: sessions == 4)
        task.cancel()
        await asyncio.wait([task])
        assert (await p.stats()).counters["zeroed"] == 0


# Without services ---------------------------------------------------------------------------------------------


class QuietStore:
    """Answers with what it is given."""

    def __init__(self, answer: store_pb2.NextJobsResponse | Exception) -> None:
        self.answer = answer
        self.worker = "w"
        self.asked: list[str] = []

    async def set_start(self, group: int, start: bytes) -> bytes:
        return start

    async def next_jobs(
        self, version: Any, count: int, wait_seconds: float, request_id: str = ""
    ) -> store_pb2.NextJobsResponse:
        self.asked.append(request_id)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@pytest.fixture
def runner() -> Iterator[PolicyRunner]:
    runner = PolicyRunner(Telemetry("rollout", "w"), 8, 1, "cpu")
    yield runner
    runner.close()


def alone(answer: store_pb2.NextJobsResponse | Exception, runner: PolicyRunner, folder: Path) -> Worker:
    settings = Plant.settings
    made = object.__new__(Plant)
    made.folder, made.run, made.store_address, made.weights = folder, "r", "unix:/s", "unix:/w"
    store: Any = QuietStore(answer)
    return Worker(settings(made, "unix:/sim"), Telemetry("rollout", "w"), store, runner, None, store_pb2.RunSpec())  # type: ignore[arg-type]


async def test_a_finished_run_is_asked_for_at_leisure(runner: PolicyRunner, folder: Path) -> None:
    finished = store_pb2.NextJobsResponse(idle_reason="finished", index=0, live_workers=1)
    worker = alone(finished, runner, folder)
    asking = asyncio.create_task(worker.take_jobs(4, 3600.0, Asking()))
    await asyncio.sleep(0.05)
    assert not asking.done()  # the store answers at once, so it is we who wait
    assert worker.idle_reason == "finished"
    asking.cancel()
    assert await worker.take_jobs(4, 0.0, Asking()) == []  # but never while episodes run


@pytest.mark.parametrize("error", [Unavailable("store: connection refused"), NotFound("no run 'r'")])
async def test_a_store_that_is_away_or_has_lost_the_run_is_waited_for(
    runner: PolicyRunner, folder: Path, error: Exception
) -> None:
    worker = alone(error, runner, folder)
    assert await worker.take_jobs(4, 1.0, Asking()) == []
    assert worker.idle_reason == "store"


async def test_an_unanswered_request_for_jobs_is_repeated_as_the_same_request(
    runner: PolicyRunner, folder: Path
) -> None:
    worker, asking = alone(Unavailable("reply lost"), runner, folder), Asking()
    store: Any = worker.store
    await worker.take_jobs(4, 0.0, asking)
    store.answer = store_pb2.NextJobsResponse(idle_reason="admission")
    await worker.take_jobs(4, 0.0, asking)
    await worker.take_jobs(4, 0.0, asking)
    first, repeated, next_one = store.asked
    assert first == repeated != next_one


@pytest.mark.parametrize("answered", [False, True])
async def test_jobs_granted_in_a_lost_reply_are_given_back_too(
    runner: PolicyRunner, folder: Path, answered: bool
) -> None:
    worker, asking = alone(Unavailable("reply lost"), runner, folder), Asking()
    store: Any = worker.store
    await worker.take_jobs(4, 0.0, asking)
    store.answer = store_pb2.NextJobsResponse(jobs=[make_job(1), make_job(2)])
    if answered:
        await worker.take_jobs(4, 0.0, asking)
        store.answer = AssertionError("it was answered, so nothing is unknown")
    desk, session = ScriptedDesk([], Random(0), asyncio.Event()), ScriptedSession(4, {}, Random(0))
    await worker._give_back(Sampler(session, SPEC, desk, desk.draining), asking, "session ended")
    assert desk.failed == ([] if answered else [1, 2])
    assert desk.given_back == len(desk.failed)


async def test_the_sampling_lane_says_what_it_waits_for(runner: PolicyRunner, folder: Path) -> None:
    worker = alone(store_pb2.NextJobsResponse(idle_reason="admission"), runner, folder)
    assert set(worker.telemetry.lane("sampling").seconds()) == {"start", "sim"}
    await worker.take_jobs(1, 0.0, Asking())
    worker.sampling(1, False)
    worker.sampling(2, True)
    worker.sampling(1, True)
    worker.sampling(2, False)
    lane = worker.telemetry.lane("sampling")
    assert set(lane.seconds()) == {"start", "sim", "admission", "busy"}
    assert lane.set("x") == "busy"
    worker.sampling(1, False)
    assert lane.set("x") == "admission"
    worker._sessions.clear()
    worker._account()
    assert lane.set("x") == "sim"
