"""LearnerService: progress, checkpoint on demand, stop. Decodes, asks `Progress`, encodes."""

import asyncio
from typing import Any

import grpc.aio
from dvla.v1 import learner_pb2, learner_pb2_grpc

from services.common.bundle_wire import version_to_proto
from services.learner.config import LearnerConfig
from services.learner.progress import Progress

Context = grpc.aio.ServicerContext[Any, Any]


class LearnerServicer(learner_pb2_grpc.LearnerServiceServicer):
    """Serves a `Progress`."""

    def __init__(self, config: LearnerConfig, progress: Progress) -> None:
        self._config, self._progress = config, progress

    async def GetProgress(
        self, request: learner_pb2.GetProgressRequest, context: Context
    ) -> learner_pb2.GetProgressResponse:
        """Progress now."""
        progress = self._progress
        return learner_pb2.GetProgressResponse(
            run=self._config.run,
            state=progress.state,
            version=version_to_proto(progress.version),
            total_updates=self._config.updates,
            published=version_to_proto(progress.published),
            checkpoint=version_to_proto(progress.checkpoint),
            metrics=progress.metrics(),
        )

    async def Checkpoint(
        self, request: learner_pb2.CheckpointRequest, context: Context
    ) -> learner_pb2.CheckpointResponse:
        """Wait for the next durable checkpoint."""
        version, path = await asyncio.wrap_future(self._progress.request_checkpoint())
        return learner_pb2.CheckpointResponse(version=version_to_proto(version), path=str(path))

    async def Stop(self, request: learner_pb2.StopRequest, context: Context) -> learner_pb2.StopResponse:
        """Ask the loop to end; the role follows when it has."""
        self._progress.stopping.set()
        return learner_pb2.StopResponse()
