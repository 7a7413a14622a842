"""The client of the store against a small servicer of our own: what is repeated, what is not, and what is sent."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dvla.v1 import common_pb2, store_pb2, store_pb2_grpc

from services.common import codec
from services.common.config import RoleConfig
from services.common.errors import DvlaError, Exhausted, InvalidInput, NotFound, Superseded, Unavailable
from services.common.server import RoleServer
from services.common.spec import Array
from services.common.telemetry import Telemetry
from services.rollout.worker import client_store
from services.rollout.worker.client_store import StoreClient, version_of
from tests.rollout.worker.fakes import make_job


class Servicer(store_pb2_grpc.StoreServiceServicer):
    """Raises the errors in its list first, one per call, then answers; keeps what it was asked."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)
        self.asked: list[Any] = []
        self.arrays: list[dict[str, Array]] = []

    def _next(self, request: Any) -> None:
        self.asked.append(request)
        if self.errors:
            raise self.errors.pop(0)

    async def GetRun(self, request: store_pb2.GetRunRequest, context: Any) -> store_pb2.GetRunResponse:
        self._next(request)
        return store_pb2.GetRunResponse(spec=store_pb2.RunSpec(run=request.run, group_size=8))

    async def NextJobs(self, request: store_pb2.NextJobsRequest, context: Any) -> store_pb2.NextJobsResponse:
        self._next(request)
        return store_pb2.NextJobsResponse(jobs=[make_job(1)], index=2, live_workers=3)

    async def Renew(self, request: store_pb2.RenewRequest, context: Any) -> store_pb2.RenewResponse:
        self._next(request)
        return store_pb2.RenewResponse(grants=5)

    async def SetStart(self, request: store_pb2.SetStartRequest, context: Any) -> store_pb2.SetStartResponse:
        self._next(request)
        return store_pb2.SetStartResponse(start=b"first")

    async def FailJob(self, request: store_pb2.FailJobRequest, context: Any) -> store_pb2.FailJobResponse:
        self._next(request)
        return store_pb2.FailJobResponse()

    async def Append(
        self, request_iterator: AsyncIterator[store_pb2.AppendRequest], context: Any
    ) -> store_pb2.AppendResponse:
        first = await anext(request_iterator)
        self._next(first.begin)
        if not first.begin.HasField("payload"):
            assert [request async for request in request_iterator] == []
            return store_pb2.AppendResponse()
        payload = first.begin.payload
        assembler = codec.Assembler(payload, 1 << 30) if payload.WhichOneof("location") == "frames" else None
        async for request in request_iterator:
            assert assembler is not None
            assembler.add(request.frame)
        self.arrays.append(codec.decode(payload, assembler.buffer if assembler else None))
        return store_pb2.AppendResponse()


def playing(*errors: Exception) -> Servicer:
    """A servicer; the calls that it does not define answer UNIMPLEMENTED."""
    return Servicer(*errors)  # type: ignore[abstract]


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_store, "RETRY_SECONDS", (0.01,))
    monkeypatch.setattr(client_store, "WAIT_SECONDS", 0.01)


@asynccontextmanager
async def store(folder: Path, servicer: Servicer) -> AsyncIterator[StoreClient]:
    config = RoleConfig(listen=f"unix:{folder}/s", drain_seconds=0)
    server = RoleServer(config, Telemetry("store", "s"))
    store_pb2_grpc.add_StoreServiceServicer_to_server(servicer, server.grpc)
    await server.start()
    client = StoreClient(config.listen, config.security(), "r", "w-1")
    yield client
    await client.close()
    await server.stop()


async def test_the_run_is_waited_for_until_it_is_open(tmp_path: Path) -> None:
    servicer = playing(NotFound("no run 'r'"), Unavailable("redis is away"), NotFound("no run 'r'"))
    async with store(tmp_path, servicer) as client:
        assert (await client.run_spec()).group_size == 8
    assert len(servicer.asked) == 4
    assert servicer.asked[0].run == "r"


async def test_a_store_that_comes_up_late_is_waited_for(tmp_path: Path) -> None:
    client = StoreClient(f"unix:{tmp_path}/s", RoleConfig().security(), "r", "w-1")
    waiting = asyncio.create_task(client.run_spec())
    await asyncio.sleep(0.1)
    assert not waiting.done()
    async with store(tmp_path, playing()):
        assert (await asyncio.wait_for(waiting, 20)).run == "r"
    await client.close()


async def test_other_errors_of_the_first_call_end_the_wait(tmp_path: Path) -> None:
    async with store(tmp_path, playing(InvalidInput("run names have no '/'"))) as client:
        with pytest.raises(InvalidInput, match="run names have no '/'"):
            await client.run_spec()


async def test_jobs_are_asked_for_with_what_the_worker_holds(tmp_path: Path) -> None:
    servicer = playing()
    async with store(tmp_path, servicer) as client:
        reply = await client.next_jobs((2, 9), 4, 0.5)
        await client.next_jobs(None, 1, 0.0)
    assert (reply.index, reply.live_workers, reply.jobs[0].key.group) == (2, 3, 1)
    first, second = servicer.asked
    assert (first.run, first.worker, first.count, first.wait_seconds) == ("r", "w-1", 4, 0.5)
    assert version_of(first.version) == (2, 9)
    assert not second.HasField("version")


@pytest.mark.parametrize("error", [Unavailable("away"), NotFound("no run")])
async def test_asking_for_jobs_and_renewing_are_not_repeated_by_themselves(tmp_path: Path, error: DvlaError) -> None:
    servicer = playing(error, error)
    async with store(tmp_path, servicer) as client:
        with pytest.raises(type(error)):
            await client.next_jobs(None, 1, 0.0)
        with pytest.raises(type(error)):
            await client.renew()
        assert await client.renew() == 5
    assert len(servicer.asked) == 3


async def test_a_start_is_stored_whatever_stands_in_the_way(tmp_path: Path) -> None:
    servicer = playing(Unavailable("away"), Unavailable("away"))
    async with store(tmp_path, servicer) as client:
        assert await client.set_start(7, b"mine") == b"first"
        assert {(request.group, request.start) for request in servicer.asked} == {(7, b"mine")}
        servicer.errors = [NotFound("group 7 is not live")]
        with pytest.raises(NotFound, match="group 7 is not live"):
            await client.set_start(7, b"mine")


def trajectory(megabytes: float) -> dict[str, Array]:
    return {
        "reward": np.arange(6, dtype=np.float32).reshape(2, 3),
        "obs/rgb": np.random.default_rng(0).integers(0, 255, int(megabytes * 2**20)).astype(np.uint8),
    }


@pytest.mark.parametrize("megabytes", [0.01, 2.5])
async def test_an_episode_arrives_whole_however_often_it_takes(tmp_path: Path, megabytes: float) -> None:
    servicer = playing(Unavailable("away"), Exhausted("redis is above 85 %"), Exhausted("still"))
    job, sent = make_job(3), trajectory(megabytes)
    async with store(tmp_path, servicer) as client:
        assert await client.append(job, store_pb2.Episode(steps=6, score=1.0), sent)
    assert len(servicer.asked) == 4
    [received] = servicer.arrays
    assert received.keys() == sent.keys()
    for name, array in sent.items():
        np.testing.assert_array_equal(received[name], array)
    begin = servicer.asked[-1]
    assert begin.key == job.key
    assert begin.episode.steps == 6
    assert begin.payload.xxh3 != 0


async def test_an_evaluation_sends_its_facts_only(tmp_path: Path) -> None:
    servicer = playing()
    async with store(tmp_path, servicer) as client:
        assert await client.append(make_job(3, evaluate=True), store_pb2.Episode(steps=6), None)
    [begin] = servicer.asked
    assert begin.evaluation == "e"
    assert not begin.HasField("payload")


@pytest.mark.parametrize("error", [Superseded("attempt 2 is the current one"), NotFound("no such group")])
@pytest.mark.parametrize("megabytes", [0.01, 8])
async def test_an_episode_that_comes_too_late_does_not_count(
    tmp_path: Path, error: DvlaError, megabytes: float
) -> None:
    # However early it is refused: gRPC may lose the status of a call that it still writes to.
    async with store(tmp_path, playing(*[error] * 100)) as client:
        assert await client.append(make_job(3), store_pb2.Episode(), trajectory(megabytes)) is False


async def test_a_malformed_episode_is_refused_at_once(tmp_path: Path) -> None:
    servicer = playing(InvalidInput("hash mismatch"))
    async with store(tmp_path, servicer) as client:
        with pytest.raises(InvalidInput, match="hash mismatch"):
            await client.append(make_job(3), store_pb2.Episode(), trajectory(0.01))
    assert len(servicer.asked) == 1


@pytest.mark.parametrize("error", [Superseded("attempt 2 is the current one"), NotFound("gone"), None])
async def test_a_void_job_is_reported_until_it_is_heard(tmp_path: Path, error: DvlaError | None) -> None:
    servicer = playing(Unavailable("away"), *([error] if error else []))
    async with store(tmp_path, servicer) as client:
        await client.fail(make_job(3, evaluate=True), "the robot fell")
        assert len(servicer.asked) == 2
        await client.fail(make_job(3, evaluate=True), "the robot fell", outside=True)
    key = common_pb2.JobKey(run="r", group=3, attempt=1)
    causes = (store_pb2.FAIL_CAUSE_JOB, store_pb2.FAIL_CAUSE_OUTSIDE)
    assert servicer.asked[-2:] == [
        store_pb2.FailJobRequest(key=key, evaluation="e", reason="the robot fell", cause=cause) for cause in causes
    ]


async def test_an_episode_outlives_a_restart_of_the_store(tmp_path: Path) -> None:
    client = StoreClient(f"unix:{tmp_path}/s", RoleConfig().security(), "r", "w-1")
    appending = asyncio.create_task(client.append(make_job(1), store_pb2.Episode(), trajectory(0.01)))
    await asyncio.sleep(0.1)
    assert not appending.done()
    async with store(tmp_path, playing()):
        assert await asyncio.wait_for(appending, 20)
    appending = asyncio.create_task(client.append(make_job(2), store_pb2.Episode(), trajectory(3)))
    await asyncio.sleep(0.1)
    assert not appending.done()
    async with store(tmp_path, playing()):
        assert await asyncio.wait_for(appending, 20)
    await client.close()
