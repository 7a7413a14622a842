"""Everything that surrounds a worker, for real: store over Redis, weights server, toy simulators."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

from dvla.v1 import store_pb2, store_pb2_grpc

from services.common import codec
from services.common.bundle import Version, bundle
from services.common.channels import open_async_channel
from services.common.config import RoleConfig
from services.common.security import Security
from services.common.server import RoleServer
from services.common.telemetry import Telemetry
from services.common.trajectory import Trajectory
from services.common.weights_client import WeightPublisher
from services.policies.config import PolicyConfig
from services.policies.raw import to_arrays
from services.policies.registry import build_policy
from services.rollout.store.config import StoreConfig
from services.rollout.store.server import StoreServer
from services.rollout.worker.client_store import StoreClient
from services.rollout.worker.config import RolloutConfig
from services.rollout.worker.policy_runner import PolicyRunner
from services.rollout.worker.receiving import Receiver
from services.rollout.worker.worker import Worker
from services.sim.host import Host, HostConfig
from services.sim.servicer import SimServicer
from services.sim.servicer import add_to_server as add_sim_to_server
from services.sim.sharing import Sharing
from services.sim.toy import ToySim
from services.weights.config import WeightsConfig
from services.weights.server import WeightsServer

ROOT = Path(__file__).resolve().parents[3]
POLICY = PolicyConfig(family="tiny-oft", state_dim=4, action_dim=2, chunk=5)


class Plant:
    """Addresses are Unix sockets in `folder`. `run` is the run's name, `store` a client to ask and to lease with."""

    def __init__(self, folder: Path, stack: AsyncExitStack, redis_url: str) -> None:
        self.folder, self._stack, self._redis_url = folder, stack, redis_url
        self.run = f"run-{uuid4().hex[:12]}"
        self.weights, self.store_address = f"unix:{folder}/weights", f"unix:{folder}/store"
        self.epoch = 0

    async def start(self, **spec: Any) -> None:
        """Bring up store and weights server, and open the run: groups of 2, 2 an update, staleness 1."""
        store = StoreServer(StoreConfig(listen=self.store_address, redis=self._redis_url, drain_seconds=0))
        await store.start()
        self._stack.push_async_callback(store.stop)
        self._spawn(store.work())
        weights = WeightsServer(
            WeightsConfig(listen=self.weights, shared_folder=f"{self.folder}/shm", drain_seconds=0, keep=8)
        )
        await weights.start()
        self._stack.push_async_callback(weights.stop)
        self._spawn(weights.tend())
        channel = open_async_channel(self.store_address)
        self._stack.push_async_callback(channel.close)
        self.stub: Any = store_pb2_grpc.StoreServiceStub(channel)
        self.publisher = WeightPublisher(self.weights, "policy", folder=f"{self.folder}/shm")
        self._stack.callback(self.publisher.close)
        fields: dict[str, Any] = {
            "run": self.run,
            "group_size": 2,
            "groups_per_update": 2,
            "staleness": 1,
            "total_updates": 100,
            "seed_base": 1000,
            "max_attempts": 5,
            "on_failure": "zero",
            "model": "policy",
            "score": "success",
            "end_on_success": True,
            "grant_seconds": 30.0,
            "observation": ["state"],
            "same_start": True,
        } | spec
        tasks = fields.pop("tasks", ["reach"])
        self.spec = store_pb2.RunSpec(tasks=[store_pb2.TaskShare(task=t, weight=1) for t in tasks], **fields)
        opened = await self.stub.OpenRun(store_pb2.OpenRunRequest(spec=self.spec), timeout=20)
        self.epoch = opened.epoch
        await asyncio.to_thread(self.publisher.fence, self.epoch)
        await self.publish(0)

    async def publish(self, update: int, policy: PolicyConfig = POLICY) -> None:
        """A version with weights drawn from its number."""
        arrays, dtypes = to_arrays(build_policy(policy, seed=update).trainable_state())
        metadata = {"policy": json.dumps(policy.to_json())}
        sealed = bundle("policy", Version(self.epoch, update), arrays, dtypes, metadata)
        await asyncio.to_thread(self.publisher.publish, *sealed)

    async def sim(self, name: str, slots: int = 2, tasks: tuple[str, ...] = ("reach",), max_steps: int = 10) -> str:
        """A toy simulator in this process; its address."""
        address = f"unix:{self.folder}/{name}"
        host = Host(lambda: ToySim(slots, tasks, max_steps=max_steps), HostConfig(sessions=2, processes=0))
        sharing = Sharing("auto", str(self.folder), 2)
        server = RoleServer(RoleConfig(listen=address, drain_seconds=0), Telemetry("sim", name))
        add_sim_to_server(SimServicer(host, Telemetry("sim", name), sharing), server.grpc)
        await server.start()
        host.start()
        self._stack.callback(sharing.close)
        self._stack.push_async_callback(asyncio.to_thread, host.close)
        self._stack.push_async_callback(server.stop)
        return address

    def sim_process(self, name: str, slots: int = 2) -> tuple[str, subprocess.Popen[bytes]]:
        """A toy simulator as a process of its own; ends with the test."""
        address = f"unix:{self.folder}/{name}"
        flags = ("--sim=toy", "--tasks=reach", f"--slots={slots}", "--processes=0", "--max-steps=10")
        return address, self.process("services.sim", f"--listen={address}", *flags)

    def process(self, module: str, *flags: str) -> subprocess.Popen[bytes]:
        """A role as a process of its own; ends with the test."""
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        command = (sys.executable, "-m", module, *flags)
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE)
        self._stack.callback(_end, process)
        return process

    def settings(self, *sims: str) -> RolloutConfig:
        """A worker's settings."""
        return RolloutConfig(
            listen=f"unix:{self.folder}/w", run=self.run, store=self.store_address, weights=self.weights, sims=sims
        )

    async def worker(self, *sims: str, name: str = "w0") -> tuple[Worker, "asyncio.Task[None]"]:
        """A worker in this process, running; cancelled at the end of the test."""
        config, telemetry = self.settings(*sims), Telemetry("rollout", name)
        store = StoreClient(config.store, Security(), self.run, name)
        self._stack.push_async_callback(store.close)
        runner = PolicyRunner(telemetry, config.max_batch, config.threads, config.device)
        self._stack.push_async_callback(asyncio.to_thread, runner.close)
        receiver = Receiver(config.weights, Security(), "policy", runner, telemetry, config.device)
        receiver.start()
        self._stack.push_async_callback(asyncio.to_thread, receiver.close)
        spec = await store.run_spec()
        await asyncio.wait_for(receiver.first(), 30)
        worker = Worker(config, telemetry, store, runner, receiver, spec)
        return worker, self._spawn(worker.run())

    async def stats(self) -> store_pb2.GetStatsResponse:
        """Counters of the run."""
        reply: store_pb2.GetStatsResponse = await self.stub.GetStats(
            store_pb2.GetStatsRequest(run=self.run), timeout=20
        )
        return reply

    async def accepted(self, count: int) -> store_pb2.GetStatsResponse:
        """Wait until so many episodes have been accepted."""
        stats: store_pb2.GetStatsResponse = await until(self.stats, lambda s: s.counters["accepted"] >= count)
        return stats

    async def lease(self, count: int = 100) -> list[store_pb2.Group]:
        """Complete groups."""
        request = store_pb2.LeaseRequest(run=self.run, epoch=self.epoch, count=count, wait_seconds=5)
        return list((await self.stub.Lease(request, timeout=20)).groups)

    async def trained(self, update: int, groups: list[store_pb2.Group]) -> None:
        """An update was made of these groups."""
        numbers = [group.group for group in groups]
        request = store_pb2.TrainedRequest(run=self.run, epoch=self.epoch, update=update, groups=numbers)
        await self.stub.Trained(request, timeout=20)

    async def trajectories(self, groups: list[store_pb2.Group]) -> list[list[Trajectory]]:
        """The episodes of each group."""
        claims = [claim for group in groups for claim in group.claims]
        out: list[Trajectory] = []
        begin, data = None, bytearray()
        async for message in self.stub.Fetch(store_pb2.FetchClaimsRequest(run=self.run, claims=claims), timeout=60):
            if message.WhichOneof("message") == "begin":
                begin, data = message.begin, bytearray(message.begin.inline)
            else:
                data += message.frame.data
            assert begin is not None
            if len(data) == begin.length:
                out.append(codec.decode(begin, bytes(data)))
        return [out[index : index + 2] for index in range(0, len(out), 2)]

    def _spawn(self, work: Awaitable[None]) -> "asyncio.Task[None]":
        task: asyncio.Task[None] = asyncio.ensure_future(work)

        async def end() -> None:
            task.cancel()
            await asyncio.wait([task])

        self._stack.push_async_callback(end)
        return task


@asynccontextmanager
async def plant(folder: Path, redis_url: str, **spec: Any) -> AsyncIterator[Plant]:
    """Store, weights server and an open run; whatever is added to it ends with it."""
    async with AsyncExitStack() as stack:
        made = Plant(folder, stack, redis_url)
        await made.start(**spec)
        yield made


async def until(ask: Callable[[], Awaitable[Any]], good: Callable[[Any], bool], seconds: float = 60.0) -> Any:
    """Ask again and again until the answer is good; the answer."""
    async with asyncio.timeout(seconds):
        while True:
            answer = await ask()
            if good(answer):
                return answer
            await asyncio.sleep(0.02)


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    process.communicate()
