"""One rollout worker, wired: store, weights, policy, simulators and the role's server."""

import asyncio
import uuid

import torch

from services.common.errors import ConfigError
from services.common.locality import Vicinity
from services.common.server import RoleServer, until_stopped
from services.common.telemetry import Telemetry
from services.rollout.worker.client_store import StoreClient
from services.rollout.worker.config import RolloutConfig
from services.rollout.worker.policy_runner import PolicyRunner
from services.rollout.worker.receiving import Receiver
from services.rollout.worker.worker import Worker


def prepare(config: RolloutConfig) -> None:
    """Set up torch; raises ConfigError if the device is not here."""
    torch.set_num_threads(config.threads)
    if config.device != "cpu" and not torch.cuda.is_available():
        raise ConfigError(f"device = {config.device!r}, but torch finds no GPU here; use --device cpu or a CUDA build")


async def serve(config: RolloutConfig) -> None:
    """Wire a worker, run it until SIGTERM or its end, and give its jobs back."""
    name = config.replica("rollout")
    telemetry = Telemetry("rollout", name)
    telemetry.lane("sampling", "weights")  # until the run is open and its first weights are here
    server = RoleServer(config, telemetry)
    await server.start(serving=False)
    # Unique for each process: a restarted worker must not look like its predecessor.
    process, vicinity = f"{name}-{uuid.uuid4().hex[:8]}", Vicinity("auto", config.shared_folder)
    store = StoreClient(config.store, config.security(), config.run, process, vicinity)
    runner = PolicyRunner(telemetry, config.max_batch, config.threads, config.device)
    try:
        await until_stopped(_work(config, server, telemetry, store, runner))
    finally:
        await server.stop()
        await store.close()
        vicinity.close()
        runner.close()


async def _work(
    config: RolloutConfig, server: RoleServer, telemetry: Telemetry, store: StoreClient, runner: PolicyRunner
) -> None:
    spec = await store.run_spec()
    receiver = Receiver(
        config.weights,
        config.security(),
        spec.model,
        runner,
        telemetry,
        config.device,
        config.spare_policy,
        config.shared_folder,
    )
    receiver.start()
    try:
        await receiver.first()
        await server.serving(True)
        await Worker(config, telemetry, store, runner, receiver, spec).run()
    finally:
        await asyncio.to_thread(receiver.close)
