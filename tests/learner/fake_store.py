"""A rollout store in memory behind real gRPC: the learner's half of the proto, with the real one's rules.

Groups appear when they are leased, so it never runs dry before the run's last update. It can lose everything
(`wipe`), fall back to an earlier state (`restore`), go away and come back on its socket.
"""

import copy
from collections.abc import Callable, Iterator
from concurrent import futures
from dataclasses import dataclass, field
from typing import Any, NoReturn

import grpc
from dvla.v1 import common_pb2, store_pb2, store_pb2_grpc

from services.common import codec
from services.learner.episodes import Member

Context = grpc.ServicerContext
Produce = Callable[[int], list[Member]]
CODES = grpc.StatusCode


@dataclass
class RunRecord:
    """What the store knows of a run. trained: group -> update."""

    spec: store_pb2.RunSpec
    epoch: int = 0
    update: int = 0
    last_group: int = 0
    live: list[int] = field(default_factory=list)
    leased: set[int] = field(default_factory=set)
    delivered: list[int] = field(default_factory=list)  # to the learner of this epoch, in order
    trained: dict[int, int] = field(default_factory=dict)
    acked: dict[int, int] = field(default_factory=dict)
    dead: dict[int, str] = field(default_factory=dict)
    discarded: dict[int, str] = field(default_factory=dict)
    finished: bool = False


class FakeStore(store_pb2_grpc.StoreServiceServicer):
    """`produce(group)` makes the members of a group, the same ones each time it is asked."""

    def __init__(self, address: str, produce: Produce) -> None:
        self.address, self._produce = address, produce
        self.record: RunRecord | None = None
        self.paused = False
        self.lose_leases = 0
        self.calls: list[str] = []
        self.counters: dict[str, int] = {"accepted": 0, "accepted_steps": 0}
        self.sums: dict[str, float] = {"accepted_success": 0.0, "accepted_length": 0.0}
        self.spoil: Callable[[int, bytes], bytes] = lambda group, data: data
        self._server: grpc.Server | None = None

    # The world around it

    def start(self) -> None:
        server = grpc.server(futures.ThreadPoolExecutor(8), options=(("grpc.so_reuseport", 0),))
        store_pb2_grpc.add_StoreServiceServicer_to_server(self, server)
        assert server.add_insecure_port(self.address)
        server.start()
        self._server = server

    def stop(self) -> None:
        if self._server is not None:
            self._server.stop(0).wait()
            self._server = None

    def wipe(self) -> None:
        """Redis is replaced by an empty one."""
        self.record = None

    def snapshot(self) -> RunRecord | None:
        return copy.deepcopy(self.record)

    def restore(self, record: RunRecord | None) -> None:
        """Redis falls back to what it had written."""
        self.record = copy.deepcopy(record)

    @property
    def run(self) -> RunRecord:
        assert self.record is not None
        return self.record

    def history(self) -> dict[int, list[int]]:
        """Groups by the update that trained them, acked or not."""
        out: dict[int, list[int]] = {}
        for group, update in (self.run.trained | self.run.acked).items():
            out.setdefault(update, []).append(group)
        return {update: sorted(groups) for update, groups in sorted(out.items())}

    # The service

    def OpenRun(self, request: store_pb2.OpenRunRequest, context: Context) -> store_pb2.OpenRunResponse:
        self.calls.append("OpenRun")
        if self.record is None:
            self.record = RunRecord(request.spec, update=request.resume_update, last_group=request.floor_epoch << 24)
        record = self.record
        if record.spec != request.spec:
            _abort(context, CODES.INVALID_ARGUMENT, "another spec")
        back = sorted(group for group, update in record.trained.items() if update > request.resume_update)
        lost = sorted(group for group, update in record.acked.items() if update > request.resume_update)
        for group in back:
            del record.trained[group]
            record.live.append(group)
            record.leased.add(group)
        record.live.sort()
        record.acked = {group: update for group, update in record.acked.items() if group not in lost}
        record.epoch = max(record.epoch, request.floor_epoch) + 1
        record.update, record.finished = request.resume_update, False
        record.delivered.clear()
        return store_pb2.OpenRunResponse(epoch=record.epoch, update=record.update, rolled_back=back, lost=lost)

    def Lease(self, request: store_pb2.LeaseRequest, context: Context) -> store_pb2.LeaseResponse:
        record = self._fenced(request.epoch, context)
        if self.paused:
            return store_pb2.LeaseResponse()
        place = int((request.cursor or f"{len(record.delivered)}-0").removesuffix("-0"))
        known = record.leased | set(record.trained)
        del record.delivered[place:]  # in replies that were lost
        wanted = [group for group in sorted(known) if group not in record.delivered]
        wanted += [group for group in record.live if group not in record.leased and group not in wanted]
        room = (record.spec.total_updates - record.update) * record.spec.groups_per_update - len(record.live)
        while len(wanted) < request.count and room > 0:
            record.last_group += 1
            record.live.append(record.last_group)
            wanted.append(record.last_group)
            room -= 1
        given = wanted[: request.count]
        record.leased |= {group for group in given if group in record.live}
        record.delivered += given
        if given and self.lose_leases:
            self.lose_leases -= 1
            _abort(context, CODES.UNAVAILABLE, "the reply was lost")
        groups = [self._group(record, group) for group in given]
        return store_pb2.LeaseResponse(groups=groups, cursor=f"{len(record.delivered)}-0")

    def Fetch(self, request: store_pb2.FetchClaimsRequest, context: Context) -> Iterator[store_pb2.FetchClaimsResponse]:
        self._known(context)
        for claim in request.claims:
            member = self._produce(claim.key.group)[claim.key.member]
            assert member.trajectory is not None
            payload, rest = codec.encode(member.trajectory)
            if payload.WhichOneof("location") == "inline":
                payload.inline = self.spoil(claim.key.group, payload.inline)
            yield store_pb2.FetchClaimsResponse(begin=payload)
            for frame in codec.frames(rest):
                yield store_pb2.FetchClaimsResponse(frame=frame)

    def Trained(self, request: store_pb2.TrainedRequest, context: Context) -> store_pb2.TrainedResponse:
        self.calls.append(f"Trained {request.update}")
        record = self._fenced(request.epoch, context)
        if request.update > record.update + 1:
            _abort(context, CODES.INVALID_ARGUMENT, f"expected update {record.update + 1}")
        for group in request.groups:
            if record.trained.get(group, request.update) != request.update:
                _abort(context, CODES.INVALID_ARGUMENT, f"group {group} made another update")
            if group in record.live and group not in record.leased:
                _abort(context, CODES.INVALID_ARGUMENT, f"group {group} is not leased")
            if group not in record.trained and group not in record.live and request.update > record.update:
                _abort(context, CODES.INVALID_ARGUMENT, f"group {group} is not leased")
        for group in request.groups:
            if group in record.live:
                record.live.remove(group)
                record.leased.discard(group)
                record.trained[group] = request.update
        record.update = max(record.update, request.update)
        return store_pb2.TrainedResponse()

    def Ack(self, request: store_pb2.AckRequest, context: Context) -> store_pb2.AckResponse:
        self.calls.append(f"Ack {request.checkpoint_update}")
        record = self._fenced(request.epoch, context)
        if request.checkpoint_update > record.update:
            _abort(context, CODES.INVALID_ARGUMENT, "ahead")
        freed = [group for group, update in record.trained.items() if update <= request.checkpoint_update]
        for group in freed:
            record.acked[group] = record.trained.pop(group)
        return store_pb2.AckResponse(groups=freed)

    def Nack(self, request: store_pb2.NackRequest, context: Context) -> store_pb2.NackResponse:
        record = self._fenced(request.epoch, context)
        if request.group not in record.live:
            _abort(context, CODES.NOT_FOUND, f"no group {request.group}")
        record.live.remove(request.group)
        record.leased.discard(request.group)
        (record.discarded if request.discard else record.dead)[request.group] = request.reason
        return store_pb2.NackResponse()

    def CloseRun(self, request: store_pb2.CloseRunRequest, context: Context) -> store_pb2.CloseRunResponse:
        self._fenced(request.epoch, context).finished = True
        return store_pb2.CloseRunResponse()

    def GetStats(self, request: store_pb2.GetStatsRequest, context: Context) -> store_pb2.GetStatsResponse:
        self._known(context)
        self.calls.append("GetStats")
        return store_pb2.GetStatsResponse(workers=1, counters=self.counters, sums=self.sums)

    def _group(self, record: RunRecord, number: int) -> store_pb2.Group:
        claims = []
        for index, member in enumerate(self._produce(number)):
            claim = store_pb2.Claim(key=common_pb2.JobKey(run="test", group=number, member=index, attempt=1))
            if member.trajectory is not None:
                payload, _ = codec.encode(member.trajectory, hashed=True)
                claim.payload.CopyFrom(
                    common_pb2.Payload(tensors=payload.tensors, length=payload.length, xxh3=payload.xxh3)
                )
                claim.episode.CopyFrom(
                    store_pb2.Episode(
                        steps=member.steps,
                        score=member.score,
                        reward_sum=member.reward_sum,
                        success_once=member.success_once,
                        success_at_end=member.success_at_end,
                    )
                )
                self.counters["accepted"] += 1
                self.counters["accepted_steps"] += member.steps
                self.sums["accepted_success"] += member.success_once
                self.sums["accepted_length"] += member.steps
            claims.append(claim)
        return store_pb2.Group(group=number, task="reach", claims=claims, trained_update=record.trained.get(number, 0))

    def _known(self, context: Context) -> RunRecord:
        if self.record is None:
            _abort(context, CODES.NOT_FOUND, "no such run")
        return self.record

    def _fenced(self, epoch: int, context: Context) -> RunRecord:
        record = self._known(context)
        if epoch < record.epoch:
            _abort(context, CODES.ABORTED, f"another learner has epoch {record.epoch}")
        if epoch > record.epoch:
            _abort(context, CODES.NOT_FOUND, "an epoch that was never granted here")
        return record


def _abort(context: Any, code: grpc.StatusCode, text: str) -> NoReturn:
    context.abort(code, text)
    raise AssertionError("abort raises")
