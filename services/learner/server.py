"""Serves a learner: the gRPC server in the main thread, the training loop in one of its own."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

from dvla.v1 import learner_pb2_grpc

from services.common.locality import Vicinity
from services.common.server import RoleServer, until_stopped
from services.common.telemetry import Telemetry
from services.common.weights_client import WeightPublisher
from services.learner.assembly import build_loop
from services.learner.client import StoreClient
from services.learner.client_weights import highest_epoch
from services.learner.config import LearnerConfig
from services.learner.progress import Progress
from services.learner.servicer import LearnerServicer

PUBLISH_PATIENCE = 5.0
"""Seconds for which one publish is repeated before a newer version may take its place."""


async def serve(config: LearnerConfig) -> None:
    """Run a learner until its loop ends or SIGTERM comes; the loop finishes its update and writes a checkpoint."""
    telemetry, progress = Telemetry("learner", config.replica("learner")), Progress()
    server = RoleServer(config, telemetry)
    learner_pb2_grpc.add_LearnerServiceServicer_to_server(LearnerServicer(config, progress), server.grpc)
    await server.start()
    with ThreadPoolExecutor(1, "training") as lane:
        training = asyncio.get_running_loop().run_in_executor(lane, _train, config, progress, telemetry)
        try:
            # Shielded: a thread cannot be cancelled. It is asked to stop and ends its update in order.
            await until_stopped(asyncio.shield(training))
        finally:
            progress.stopping.set()
            await asyncio.wait([training])
            await server.stop()
    await training


def _train(config: LearnerConfig, progress: Progress, telemetry: Telemetry) -> None:
    security = config.security()
    vicinity = Vicinity("auto", config.shared_folder)
    store = StoreClient(config.store, security, config.run, config.episode_bytes, vicinity)
    publisher = WeightPublisher(
        config.weights,
        config.model,
        security=security,
        folder=config.shared_folder,
        patience=PUBLISH_PATIENCE,
        files=config.staging_files,
        rule=config.delta_rule,
    )
    try:
        loop = build_loop(config, store, publisher, progress, telemetry)
        loop.run(highest_epoch(config.weights, config.model, security, progress.stopping))
    finally:
        publisher.close()
        store.close()
        vicinity.close()
