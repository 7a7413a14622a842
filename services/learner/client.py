"""Client of the rollout store, for threads. Raises the domain's errors; every call has a deadline."""

from collections.abc import Iterator, Sequence

from dvla.v1 import common_pb2, store_pb2, store_pb2_grpc

from services.common import codec
from services.common.channels import CALL_SECONDS, open_channel, translated
from services.common.errors import InvalidInput, NotFound
from services.common.locality import Vicinity
from services.common.security import Security
from services.common.trajectory import Trajectory
from services.learner.episodes import Member
from services.learner.extents import ExtentReader
from services.learner.source import LeasedGroup, Opened, StoreStats

BULK_SECONDS = 60.0
FIRST = "0-0"
"""Cursor of an epoch's first lease."""


class StoreClient:
    """The store as the learner of one run sees it. Calls name the epoch that they are made for."""

    def __init__(
        self, address: str, security: Security, run: str, episode_bytes: int, vicinity: Vicinity | None = None
    ) -> None:
        self._run, self._limit = run, episode_bytes
        self._reader = ExtentReader(vicinity)
        self._peer = f"store {address}"
        self._channel = open_channel(address, security)
        self._stub = store_pb2_grpc.StoreServiceStub(self._channel)
        self._at = (0, "")  # (epoch, cursor) after the last answered lease

    def open(self, spec: store_pb2.RunSpec, floor: int, resume_update: int) -> Opened:
        """Open the run, or open it again, and get an epoch above `floor`."""
        request = store_pb2.OpenRunRequest(spec=spec, floor_epoch=floor, resume_update=resume_update)
        with translated(self._peer):
            reply = self._stub.OpenRun(request, timeout=CALL_SECONDS)
        return Opened(reply.epoch, reply.update, tuple(reply.rolled_back), tuple(reply.lost))

    def lease(self, epoch: int, count: int, wait_seconds: float) -> list[LeasedGroup]:
        """Up to `count` complete groups in admission order, after at most `wait_seconds`.

        A call that failed may have leased some: the next one gets them, because it asks from the same place on.
        """
        cursor = self._at[1] if self._at[0] == epoch else FIRST
        request = store_pb2.LeaseRequest(
            run=self._run, epoch=epoch, count=count, wait_seconds=wait_seconds, cursor=cursor
        )
        with translated(self._peer):
            reply = self._stub.Lease(request, timeout=CALL_SECONDS + wait_seconds)
        self._at = (epoch, reply.cursor)
        return [LeasedGroup(g.group, g.task, g.trained_update, tuple(g.claims)) for g in reply.groups]

    def fetch(self, group: LeasedGroup) -> list[Member]:
        """All members of a group with their trajectories.

        Raises InvalidInput where bytes do not fit their header or hash, NotFound where they are gone.
        """
        present = [claim for claim in group.claims if claim.HasField("payload")]
        trajectories = iter(self._fetch(present)) if present else iter(())
        return [_member(claim, next(trajectories) if claim.HasField("payload") else None) for claim in group.claims]

    def trained(self, epoch: int, update: int, groups: Sequence[int]) -> None:
        """Record that these groups made this update. Safe to repeat."""
        self._reader.let_go()
        request = store_pb2.TrainedRequest(run=self._run, epoch=epoch, update=update, groups=groups)
        with translated(self._peer):
            self._stub.Trained(request, timeout=CALL_SECONDS)

    def ack(self, epoch: int, checkpoint_update: int) -> int:
        """Free what was trained up to a durable checkpoint; returns the number of groups. Safe to repeat."""
        request = store_pb2.AckRequest(run=self._run, epoch=epoch, checkpoint_update=checkpoint_update)
        with translated(self._peer):
            return len(self._stub.Ack(request, timeout=CALL_SECONDS).groups)

    def nack(self, epoch: int, group: int, reason: str, discard: bool = False) -> None:
        """Refuse a leased group, or discard it without a dead letter; one that is gone already is fine."""
        request = store_pb2.NackRequest(run=self._run, epoch=epoch, group=group, reason=reason, discard=discard)
        try:
            with translated(self._peer):
                self._stub.Nack(request, timeout=CALL_SECONDS)
        except NotFound:
            return

    def stats(self) -> StoreStats:
        """Counters of the run."""
        with translated(self._peer):
            reply = self._stub.GetStats(store_pb2.GetStatsRequest(run=self._run), timeout=CALL_SECONDS)
        return StoreStats(
            open_groups=reply.open_groups,
            complete_groups=reply.complete_groups,
            workers=reply.workers,
            counters=dict(reply.counters),
            sums=dict(reply.sums),
        )

    def close_run(self, epoch: int) -> None:
        """End the run: workers are sent home."""
        with translated(self._peer):
            self._stub.CloseRun(store_pb2.CloseRunRequest(run=self._run, epoch=epoch), timeout=CALL_SECONDS)

    def close(self) -> None:
        """Close the channel; calls in flight end with Unavailable."""
        self._reader.let_go()
        self._channel.close()

    def _fetch(self, claims: Sequence[store_pb2.Claim]) -> Iterator[Trajectory]:
        """The trajectories of these claims, in order."""
        self._reader.let_go()
        request = store_pb2.FetchClaimsRequest(run=self._run, claims=claims, locality=self._reader.locality())
        with translated(self._peer):
            stream = self._stub.Fetch(request, timeout=BULK_SECONDS)
            for claim in claims:
                yield self._read(stream, claim)

    def _read(self, stream: Iterator[store_pb2.FetchClaimsResponse], claim: store_pb2.Claim) -> Trajectory:
        payload = _next(stream, claim).begin
        if payload.WhichOneof("location") == "shm":
            trajectory = self._reader.read(claim, payload.shm)
            if trajectory is not None:
                return trajectory
            plain = store_pb2.FetchClaimsRequest(run=self._run, claims=[claim])
            return self._read(self._stub.Fetch(plain, timeout=BULK_SECONDS), claim)
        if payload.length != claim.payload.length or payload.WhichOneof("location") not in ("inline", "frames"):
            raise InvalidInput(
                f"{_name(claim)} came as {payload.length} bytes {payload.WhichOneof('location')}; "
                f"expected {claim.payload.length} bytes inline or in frames"
            )
        payload.xxh3 = claim.payload.xxh3 or payload.xxh3  # what the producer hashed, not what travelled
        return codec.receive(payload, lambda: _next(stream, claim).frame, self._limit)


def _next(stream: Iterator[store_pb2.FetchClaimsResponse], claim: store_pb2.Claim) -> store_pb2.FetchClaimsResponse:
    message = next(stream, None)
    if message is None:
        raise InvalidInput(f"the bytes of {_name(claim)} ended early")
    return message


def _name(claim: store_pb2.Claim) -> str:
    key: common_pb2.JobKey = claim.key
    return f"member {key.member} of group {key.group}"


def _member(claim: store_pb2.Claim, trajectory: Trajectory | None) -> Member:
    facts = claim.episode
    return Member(
        score=facts.score if trajectory is not None else 0.0,
        steps=facts.steps,
        reward_sum=facts.reward_sum,
        success_once=facts.success_once,
        success_at_end=facts.success_at_end,
        trajectory=trajectory,
    )
