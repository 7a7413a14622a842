"""LearnerService over a Unix socket, served by the shared role server."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest
from dvla.v1 import learner_pb2, learner_pb2_grpc

from services.common.bundle import Version
from services.common.channels import open_async_channel
from services.common.server import RoleServer
from services.common.telemetry import Telemetry
from services.learner.progress import Progress
from services.learner.servicer import LearnerServicer
from tests.learner.data import small_config
from tests.learner.harness import Bench


async def test_progress_checkpoint_and_stop(make_bench: Callable[..., Bench]) -> None:
    folder = make_bench().folder
    progress = Progress()
    config = small_config(folder, listen=f"unix:{folder}/learner")
    server = RoleServer(config, Telemetry("learner", "test"))
    learner_pb2_grpc.add_LearnerServiceServicer_to_server(LearnerServicer(config, progress), server.grpc)
    await server.start()
    async with open_async_channel(config.listen) as channel:
        stub = learner_pb2_grpc.LearnerServiceStub(channel)
        reply = await stub.GetProgress(learner_pb2.GetProgressRequest(), timeout=10)
        assert (reply.run, reply.state, reply.total_updates) == ("test", "starting", 6)
        assert not reply.HasField("version")

        progress.version, progress.published = Version(2, 7), Version(2, 6)
        progress.show({"loss": 0.25})
        reply = await stub.GetProgress(learner_pb2.GetProgressRequest(), timeout=10)
        assert (reply.version.update, reply.published.update, dict(reply.metrics)) == (7, 6, {"loss": 0.25})

        asked = asyncio.ensure_future(stub.Checkpoint(learner_pb2.CheckpointRequest(), timeout=10))
        while not progress.requested:
            await asyncio.sleep(0.01)
        (future,) = progress.requests()
        future.set_result((Version(2, 7), Path("/somewhere/2-7")))
        assert (await asked).path == "/somewhere/2-7"

        gone = asyncio.ensure_future(stub.Checkpoint(learner_pb2.CheckpointRequest(), timeout=0.1))
        while not progress.requested:
            await asyncio.sleep(0.01)
        with pytest.raises(grpc.aio.AioRpcError):
            await gone
        await asyncio.sleep(0.2)  # the server hears of the cancellation a moment later
        assert progress.requests() == ()

        waiting = asyncio.ensure_future(stub.Checkpoint(learner_pb2.CheckpointRequest(), timeout=10))
        while not progress.requested:
            await asyncio.sleep(0.01)
        await stub.Stop(learner_pb2.StopRequest(), timeout=10)
        assert progress.stopping.is_set()
        progress.close()
        for call in (waiting, stub.Checkpoint(learner_pb2.CheckpointRequest(), timeout=10)):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call
            assert refused.value.code() == grpc.StatusCode.UNAVAILABLE
    await server.stop()
