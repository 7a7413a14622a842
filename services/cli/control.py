"""What the launcher asks of a running system: describe a simulator, follow versions, start and read evaluations.

Every call is short and safe to repeat; Unavailable means try again, which the launcher does while it supervises.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dvla.v1 import (
    common_pb2,
    learner_pb2,
    learner_pb2_grpc,
    sim_pb2,
    sim_pb2_grpc,
    store_pb2,
    store_pb2_grpc,
    weights_pb2,
    weights_pb2_grpc,
)

from services.common.bundle import Version
from services.common.channels import CALL_SECONDS, open_channel, translated
from services.common.spec import SimSpec
from services.common.wire import spec_from_proto

SHORT_SECONDS = 2.0
HOLD_SECONDS = 120.0


@dataclass(frozen=True)
class EpisodeResult:
    """One episode of an evaluation. failure: why it failed for good; it then counts as no success."""

    number: int
    task: str
    seed: int
    success_once: bool = False
    success_at_end: bool = False
    reward_sum: float = 0.0
    score: float = 0.0
    steps: int = 0
    backend: str = ""
    failure: str = ""


class Control:
    """Calls to the roles of one run, from the launcher's main thread."""

    def __init__(self, run: str, model: str, addresses: Mapping[str, str]) -> None:
        self.run, self.model = run, model
        self._channels = {name: open_channel(address) for name, address in addresses.items()}

    def close(self) -> None:
        """Close all channels."""
        for channel in self._channels.values():
            channel.close()

    def describe(self, sim: str) -> SimSpec:
        """What a simulator offers; raises Unavailable while it starts."""
        stub = sim_pb2_grpc.SimServiceStub(self._channels[sim])
        with translated(sim):
            return spec_from_proto(stub.Describe(sim_pb2.DescribeRequest(), timeout=SHORT_SECONDS).spec)

    def newest_version(self) -> Version | None:
        """The newest sealed version of the model."""
        stub = weights_pb2_grpc.WeightsServiceStub(self._channels["weights"])
        with translated("weights"):
            reply = stub.ListVersions(weights_pb2.ListVersionsRequest(), timeout=SHORT_SECONDS)
        sealed = [_version(v.version) for v in reply.versions if v.model == self.model and v.state == "sealed"]
        return max(sealed, default=None)

    def hold(self, version: Version, seconds: float = HOLD_SECONDS) -> None:
        """Keep a version readable for an evaluation."""
        stub = weights_pb2_grpc.WeightsServiceStub(self._channels["weights"])
        request = weights_pb2.HoldRequest(model=self.model, version=_proto(version), holder="dvla", seconds=seconds)
        with translated("weights"):
            stub.Hold(request, timeout=SHORT_SECONDS)

    def open_run(self, spec: store_pb2.RunSpec, update: int) -> int:
        """Open a run in place of a learner, as if `update` updates were made; returns its epoch."""
        stub = store_pb2_grpc.StoreServiceStub(self._channels["store"])
        with translated("store"):
            request = store_pb2.OpenRunRequest(spec=spec, resume_update=update)
            return stub.OpenRun(request, timeout=CALL_SECONDS).epoch

    def start_evaluation(self, name: str, version: Version, episodes: Sequence[tuple[str, int]]) -> None:
        """Have exactly these (task, seed) episodes run, each once, with exactly this version."""
        stub = store_pb2_grpc.StoreServiceStub(self._channels["store"])
        listed = [store_pb2.EvaluationEpisode(task=task, seed=seed) for task, seed in episodes]
        request = store_pb2.StartEvaluationRequest(
            run=self.run, evaluation=name, version=_proto(version), episodes=listed
        )
        with translated("store"):
            stub.StartEvaluation(request, timeout=CALL_SECONDS)

    def evaluation(self, name: str, wait_seconds: float) -> list[EpisodeResult]:
        """The results so far, after at most `wait_seconds`."""
        stub = store_pb2_grpc.StoreServiceStub(self._channels["store"])
        request = store_pb2.GetEvaluationRequest(run=self.run, evaluation=name, wait_seconds=wait_seconds)
        with translated("store"):
            reply = stub.GetEvaluation(request, timeout=SHORT_SECONDS + wait_seconds)
        return [_result(result) for result in reply.results]

    def updates_done(self) -> int:
        """Updates that the store has on record."""
        stub = store_pb2_grpc.StoreServiceStub(self._channels["store"])
        with translated("store"):
            return stub.GetRun(store_pb2.GetRunRequest(run=self.run), timeout=SHORT_SECONDS).update

    def complete_run(self) -> None:
        """Nothing of the run will be trained any more: its bytes can go."""
        stub = store_pb2_grpc.StoreServiceStub(self._channels["store"])
        with translated("store"):
            epoch = stub.GetRun(store_pb2.GetRunRequest(run=self.run), timeout=SHORT_SECONDS).epoch
            request = store_pb2.CloseRunRequest(run=self.run, epoch=epoch, complete=True)
            stub.CloseRun(request, timeout=SHORT_SECONDS)

    def stop_learner(self) -> None:
        """Ask the learner to end after the current update, with a checkpoint."""
        stub = learner_pb2_grpc.LearnerServiceStub(self._channels["learner"])
        with translated("learner"):
            stub.Stop(learner_pb2.StopRequest(), timeout=SHORT_SECONDS)


def _version(message: common_pb2.Version) -> Version:
    return Version(message.epoch, message.update)


def _proto(version: Version) -> common_pb2.Version:
    return common_pb2.Version(epoch=version.epoch, update=version.update)


def _result(result: store_pb2.EvaluationResult) -> EpisodeResult:
    facts = result.episode
    return EpisodeResult(
        number=result.number,
        task=result.what.task,
        seed=result.what.seed,
        success_once=facts.success_once and not result.failure,
        success_at_end=facts.success_at_end and not result.failure,
        reward_sum=facts.reward_sum,
        score=facts.score,
        steps=facts.steps,
        backend=facts.backend,
        failure=result.failure,
    )
