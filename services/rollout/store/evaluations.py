"""Evaluations: a fixed list of episodes, each decided exactly once, pinned to a version, outside admission."""

import xxhash
from dvla.v1 import common_pb2, store_pb2

from services.common.errors import InvalidInput
from services.rollout.store.base import StoreBase
from services.rollout.store.keys import check_name
from services.rollout.store.validate import MAX_EPISODES, version_text


class EvaluationCalls(StoreBase):
    """Calls about evaluations."""

    async def start_evaluation(self, request: store_pb2.StartEvaluationRequest) -> store_pb2.StartEvaluationResponse:
        """Queue the episodes of an evaluation. Idempotent by name."""
        run, name = check_name("run", request.run), check_name("evaluation", request.evaluation)
        if not 1 <= len(request.episodes) <= MAX_EPISODES:
            raise InvalidInput(
                f"evaluation {name!r} lists {len(request.episodes)} episodes; expected 1..{MAX_EPISODES}"
            )
        if not request.HasField("version"):
            raise InvalidInput(f"evaluation {name!r} names no version")
        if any(not episode.task for episode in request.episodes):
            raise InvalidInput(f"evaluation {name!r} has an episode without a task")
        digest = xxhash.xxh3_128_hexdigest(request.SerializeToString(deterministic=True))
        pairs = [part for episode in request.episodes for part in (episode.task, str(episode.seed))]
        await self.remember(run)  # it may be over, and left alone
        await self.call("start_evaluation", run, name, version_text(request.version), digest, *pairs)
        return store_pb2.StartEvaluationResponse()

    async def get_evaluation(self, request: store_pb2.GetEvaluationRequest) -> store_pb2.GetEvaluationResponse:
        """The results so far, after waiting for the end."""
        run, name = check_name("run", request.run), check_name("evaluation", request.evaluation)

        async def look() -> tuple[bool, store_pb2.GetEvaluationResponse]:
            version, total, results = await self.call("get_evaluation", run, name)
            epoch, update = map(int, version.split(b"/"))
            response = store_pb2.GetEvaluationResponse(
                version=common_pb2.Version(epoch=epoch, update=update),
                total=int(total),
                results=[_result(*result) for result in results],
            )
            return len(results) == response.total, response

        return await self.wakeups.poll(run, "evals", request.wait_seconds, look)


def _result(number: int, episode: bytes, failure: bytes, task: bytes, seed: bytes) -> store_pb2.EvaluationResult:
    return store_pb2.EvaluationResult(
        number=number,
        what=store_pb2.EvaluationEpisode(task=task.decode(), seed=int(seed)),
        episode=store_pb2.Episode.FromString(episode) if episode else None,
        failure=failure.decode(),
    )
