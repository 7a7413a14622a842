"""The store as a process: gRPC on a Unix socket, errors as status codes, start, drain and refusal."""

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from dvla.v1 import common_pb2 as c
from dvla.v1 import store_pb2 as s
from dvla.v1 import store_pb2_grpc

from services.common.channels import open_async_channel, open_channel
from services.common.redis_server import RedisServer
from services.rollout.store.config import StoreConfig
from services.rollout.store.server import StoreServer
from tests.rollout.conftest import StartRedis
from tests.rollout.store.harness import make_episode, make_payload, make_spec, version

pytestmark = pytest.mark.redis

if TYPE_CHECKING:
    Stub = store_pb2_grpc.StoreServiceAsyncStub
else:
    Stub = store_pb2_grpc.StoreServiceStub  # the asynchronous one exists for type checkers only


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="dvla-") as name:
        yield Path(name)


@pytest.fixture
async def server(redis_server: RedisServer, folder: Path) -> AsyncIterator[StoreServer]:
    server = StoreServer(StoreConfig(listen=f"unix:{folder}/store.sock", redis=redis_server.url))
    await server.start()
    work = asyncio.create_task(server.work())
    yield server
    work.cancel()
    await asyncio.gather(work, return_exceptions=True)
    await server.stop()


@pytest.fixture
async def stub(server: StoreServer, folder: Path) -> AsyncIterator[Stub]:
    channel = open_async_channel(f"unix:{folder}/store.sock")
    yield store_pb2_grpc.StoreServiceStub(channel)
    await channel.close()


async def open_run(stub: Stub, **changes: Any) -> tuple[str, int]:
    spec = make_spec(**changes)
    return spec.run, (await stub.OpenRun(s.OpenRunRequest(spec=spec), timeout=10)).epoch


async def messages(job: s.Job, data: bytes) -> AsyncIterator[s.AppendRequest]:
    inline = len(data) < 2**18
    payload = make_payload(data, inline)
    yield s.AppendRequest(begin=s.AppendBegin(key=job.key, episode=make_episode(), payload=payload))
    for offset in range(0, 0 if inline else len(data), 2**20):
        yield s.AppendRequest(frame=c.Frame(offset=offset, data=data[offset : offset + 2**20]))


async def next_jobs(stub: Stub, run: str, count: int = 1, wait: float = 0.0) -> s.NextJobsResponse:
    request = s.NextJobsRequest(run=run, worker="w", version=version(0), count=count, wait_seconds=wait)
    return await stub.NextJobs(request, timeout=wait + 10)


async def test_s20_a_60_megabyte_rollout_goes_through_and_comes_back(stub: Stub) -> None:
    run, epoch = await open_run(stub, group_size=1)
    (job,) = (await next_jobs(stub, run)).jobs
    data = os.urandom(2**20) * 60
    await stub.Append(messages(job, data), timeout=60)
    (group,) = (await stub.Lease(s.LeaseRequest(run=run, epoch=epoch, count=1), timeout=10)).groups
    stream = stub.Fetch(s.FetchClaimsRequest(run=run, claims=group.claims), timeout=60)
    first, *rest = [message async for message in stream]
    assert first.begin.frames == len(rest) == 60
    assert b"".join(message.frame.data for message in rest) == data
    await stub.Trained(s.TrainedRequest(run=run, epoch=epoch, update=1, groups=[1]), timeout=10)
    await stub.Ack(s.AckRequest(run=run, epoch=epoch, checkpoint_update=1), timeout=10)


async def test_errors_arrive_as_their_status(stub: Stub) -> None:
    run, epoch = await open_run(stub)
    (job,) = (await next_jobs(stub, run)).jobs
    await stub.FailJob(s.FailJobRequest(key=job.key, reason="x"), timeout=10)
    cases: list[tuple[Any, grpc.StatusCode, str]] = [
        (stub.GetRun(s.GetRunRequest(run="absent"), timeout=10), grpc.StatusCode.NOT_FOUND, "not open yet"),
        (stub.Lease(s.LeaseRequest(run=run, epoch=epoch - 1), timeout=10), grpc.StatusCode.ABORTED, "another learner"),
        (stub.Append(messages(job, b"late"), timeout=10), grpc.StatusCode.ABORTED, "superseded"),
        (stub.Append(frames_only(), timeout=10), grpc.StatusCode.INVALID_ARGUMENT, "must be `begin`"),
        (stub.Append(begin_twice(job), timeout=10), grpc.StatusCode.INVALID_ARGUMENT, "frames only"),
        (
            stub.OpenRun(s.OpenRunRequest(spec=make_spec(group_size=0)), timeout=10),
            grpc.StatusCode.INVALID_ARGUMENT,
            "group_size = 0",
        ),
    ]
    for call, code, words in cases:
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await call
        assert error.value.code() == code
        assert words in str(error.value.details())


async def frames_only() -> AsyncIterator[s.AppendRequest]:
    yield s.AppendRequest(frame=c.Frame(data=b"x"))


async def begin_twice(job: s.Job) -> AsyncIterator[s.AppendRequest]:
    async for message in messages(job, b"x" * 2**19):
        yield message
        yield message


async def test_every_call_of_the_contract_is_served(stub: Stub) -> None:
    run, epoch = await open_run(stub, group_size=1)
    calls = {
        "Renew": s.RenewRequest(run=run, worker="w"),
        "Nack": s.NackRequest(run=run, epoch=epoch, group=1),
        "SetStart": s.SetStartRequest(run=run, group=2, start=b"x"),
        "GetStats": s.GetStatsRequest(run=run),
        "ListDead": s.ListDeadRequest(run=run),
        "Inspect": s.InspectRequest(run=run),
        "GetEvaluation": s.GetEvaluationRequest(run=run, evaluation="e"),
        "StartEvaluation": s.StartEvaluationRequest(
            run=run, evaluation="e", version=version(0), episodes=[s.EvaluationEpisode(task="Push")]
        ),
        "ReplayDead": s.ReplayDeadRequest(run=run, id="1-1"),
        "CloseRun": s.CloseRunRequest(run=run, epoch=epoch),
    }
    codes = {}
    for rpc, request in calls.items():
        try:
            await getattr(stub, rpc)(request, timeout=10)
            codes[rpc] = "OK"
        except grpc.aio.AioRpcError as error:
            codes[rpc] = error.code().name
    missing = dict.fromkeys(("Nack", "SetStart", "GetEvaluation", "ReplayDead"), "NOT_FOUND")
    assert codes == dict.fromkeys(calls, "OK") | missing


async def test_an_upload_that_is_cut_off_counts_for_nothing(stub: Stub) -> None:
    run, _ = await open_run(stub, group_size=1)
    (job,) = (await next_jobs(stub, run)).jobs

    async def stalled() -> AsyncIterator[s.AppendRequest]:
        source = messages(job, b"x" * 2**22)
        yield await anext(source)
        yield await anext(source)
        await asyncio.Event().wait()

    call = stub.Append(stalled(), timeout=10)
    await asyncio.sleep(0.2)
    call.cancel()
    assert (await stub.GetStats(s.GetStatsRequest(run=run), timeout=10)).counters["accepted"] == 0
    assert not (await stub.Append(messages(job, b"whole"), timeout=10)).repeated


async def test_many_failures_for_good_raise_an_alarm(server: StoreServer, stub: Stub) -> None:
    run, _ = await open_run(stub, group_size=1, max_attempts=1)
    for number, job in enumerate((await next_jobs(stub, run, 4)).jobs):
        assert f"{run}/alarm" not in server.telemetry.facts
        await stub.FailJob(s.FailJobRequest(key=job.key, reason="x"), timeout=10)
        await server.report()
        if number == 1:
            break
    assert server.telemetry.facts[f"{run}/alarm"].startswith("2 jobs were given up")
    assert server.telemetry.metrics()[f"{run}/zeroed"] == 2


async def test_background_work_ends_whenever_it_is_cancelled(redis_server: RedisServer, folder: Path) -> None:
    """Also while it connects: a driver that swallows the cancellation would keep the process alive for ever."""
    for attempt in range(25):
        server = StoreServer(StoreConfig(listen=f"unix:{folder}/store.sock", redis=redis_server.url))
        work = asyncio.create_task(server.work())
        for _ in range(attempt):
            await asyncio.sleep(0)
        work.cancel()
        done, _ = await asyncio.wait([work], timeout=10)
        assert done
        await server.stop()


def start_process(redis: str, listen: str, *flags: str) -> subprocess.Popen[str]:
    root = Path(__file__).parents[3]
    return subprocess.Popen(
        [sys.executable, "-m", "services.rollout.store", "--redis", redis, "--listen", listen, *flags],
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": f"{root}:{root / 'protos/gen'}"},
        cwd=root,
    )


def test_a_process_serves_drains_and_ends_with_zero(redis_server: RedisServer, folder: Path) -> None:
    listen = f"unix:{folder}/store.sock"
    process = start_process(redis_server.url, listen)
    with open_channel(listen) as channel:
        grpc.channel_ready_future(channel).result(timeout=30)
        stub = store_pb2_grpc.StoreServiceStub(channel)
        spec = make_spec(staleness=0)
        stub.OpenRun(s.OpenRunRequest(spec=spec), timeout=10)
        request = s.NextJobsRequest(run=spec.run, worker="w", version=version(0), count=99, wait_seconds=30)
        assert len(stub.NextJobs(request, timeout=10).jobs) == 4
        waiting = stub.NextJobs.future(request, timeout=40)
        stub.GetStats(s.GetStatsRequest(run=spec.run), timeout=10)
        process.send_signal(signal.SIGTERM)
        assert waiting.result().idle_reason == "admission", "answered, not cut off"
    assert process.wait(20) == 0


def test_a_redis_that_is_absent_or_evicts_ends_the_process_with_one_line(start_redis: StartRedis, folder: Path) -> None:
    evicting = start_redis({"maxmemory-policy": "allkeys-lru"}).url
    cases = [
        (f"unix://{folder}/absent.sock", 2, "absent.sock cannot be reached"),
        (evicting, 2, "set maxmemory-policy noeviction"),
        ("ftp://x", 2, "redis = 'ftp://x'; expected unix://"),
    ]
    for redis, code, words in cases:
        process = start_process(redis, f"unix:{folder}/s.sock", "--redis-patience-seconds", "0.3")
        _, errors = process.communicate(timeout=30)
        assert (process.returncode, words in errors) == (code, True), errors
        assert "Traceback" not in errors
