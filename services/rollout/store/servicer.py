"""The gRPC face of the store: decode, call, encode."""

from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
from dvla.v1 import common_pb2, store_pb2, store_pb2_grpc

from services.common.errors import InvalidInput
from services.rollout.store.machine import RolloutStore

Context = grpc.aio.ServicerContext[Any, Any]


class StoreServicer(store_pb2_grpc.StoreServiceServicer):
    """Serves a `RolloutStore`; see store.proto for what each call means and which errors it has."""

    def __init__(self, store: RolloutStore) -> None:
        self._store = store

    async def Append(
        self, request_iterator: AsyncIterator[store_pb2.AppendRequest], context: Context
    ) -> store_pb2.AppendResponse:
        """Accept an episode."""
        first = await anext(request_iterator, None)
        if first is None or first.WhichOneof("message") != "begin":
            raise InvalidInput("the first message of an append must be `begin`")
        return await self._store.append(first.begin, _frames(request_iterator))

    async def Lease(self, request: store_pb2.LeaseRequest, context: Context) -> store_pb2.LeaseResponse:
        """Lease complete groups."""
        return await self._store.lease(request)

    async def Fetch(
        self, request: store_pb2.FetchClaimsRequest, context: Context
    ) -> AsyncIterator[store_pb2.FetchClaimsResponse]:
        """Stream the bytes of claims."""
        async for response in self._store.fetch(request):
            yield response

    async def OpenRun(self, request: store_pb2.OpenRunRequest, context: Context) -> store_pb2.OpenRunResponse:
        """Open or re-open a run."""
        return await self._store.open_run(request)

    async def GetRun(self, request: store_pb2.GetRunRequest, context: Context) -> store_pb2.GetRunResponse:
        """Spec and state of a run."""
        return await self._store.get_run(request)

    async def CloseRun(self, request: store_pb2.CloseRunRequest, context: Context) -> store_pb2.CloseRunResponse:
        """End a run."""
        return await self._store.close_run(request)

    async def NextJobs(self, request: store_pb2.NextJobsRequest, context: Context) -> store_pb2.NextJobsResponse:
        """Grant jobs."""
        return await self._store.next_jobs(request, request.request_id)

    async def Renew(self, request: store_pb2.RenewRequest, context: Context) -> store_pb2.RenewResponse:
        """Keep grants alive."""
        return await self._store.renew(request)

    async def SetStart(self, request: store_pb2.SetStartRequest, context: Context) -> store_pb2.SetStartResponse:
        """Store a start state, once."""
        return await self._store.set_start(request)

    async def FailJob(self, request: store_pb2.FailJobRequest, context: Context) -> store_pb2.FailJobResponse:
        """A job is void."""
        return await self._store.fail_job(request)

    async def Trained(self, request: store_pb2.TrainedRequest, context: Context) -> store_pb2.TrainedResponse:
        """Record an update."""
        return await self._store.trained(request)

    async def Ack(self, request: store_pb2.AckRequest, context: Context) -> store_pb2.AckResponse:
        """Free what a checkpoint holds."""
        return await self._store.ack(request)

    async def Nack(self, request: store_pb2.NackRequest, context: Context) -> store_pb2.NackResponse:
        """Refuse a group."""
        return await self._store.nack(request)

    async def StartEvaluation(
        self, request: store_pb2.StartEvaluationRequest, context: Context
    ) -> store_pb2.StartEvaluationResponse:
        """Queue an evaluation."""
        return await self._store.start_evaluation(request)

    async def GetEvaluation(
        self, request: store_pb2.GetEvaluationRequest, context: Context
    ) -> store_pb2.GetEvaluationResponse:
        """Results of an evaluation."""
        return await self._store.get_evaluation(request)

    async def GetStats(self, request: store_pb2.GetStatsRequest, context: Context) -> store_pb2.GetStatsResponse:
        """Counters and gauges."""
        return await self._store.get_stats(request)

    async def Inspect(self, request: store_pb2.InspectRequest, context: Context) -> store_pb2.InspectResponse:
        """What lies in the store."""
        return await self._store.inspect(request)

    async def ListDead(self, request: store_pb2.ListDeadRequest, context: Context) -> store_pb2.ListDeadResponse:
        """Dead letters."""
        return await self._store.list_dead(request)

    async def ReplayDead(self, request: store_pb2.ReplayDeadRequest, context: Context) -> store_pb2.ReplayDeadResponse:
        """Put a dead group back."""
        return await self._store.replay_dead(request)


async def _frames(requests: AsyncIterator[store_pb2.AppendRequest]) -> AsyncIterator[common_pb2.Frame]:
    async for request in requests:
        if request.WhichOneof("message") != "frame":
            raise InvalidInput("after `begin`, an append has frames only")
        yield request.frame
