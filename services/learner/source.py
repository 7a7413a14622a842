"""What the learner needs of a store, without gRPC: `client.StoreClient` is one, tests bring others."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from dvla.v1 import store_pb2

from services.learner.episodes import Member


@dataclass(frozen=True)
class Opened:
    """The granted epoch, the run's update number, groups put back to live, and groups that are lost for good."""

    epoch: int
    update: int
    rolled_back: tuple[int, ...]
    lost: tuple[int, ...]


@dataclass(frozen=True)
class LeasedGroup:
    """A complete group, not fetched yet. trained_update: the update that it made already, or 0."""

    group: int
    task: str
    trained_update: int
    claims: tuple[store_pb2.Claim, ...]


@dataclass(frozen=True)
class StoreStats:
    """Counters of the run, as the store names them; see GetStatsResponse."""

    open_groups: int = 0
    complete_groups: int = 0
    workers: int = 0
    counters: Mapping[str, int] = field(default_factory=dict)
    sums: Mapping[str, float] = field(default_factory=dict)

    def counter(self, name: str) -> int:
        """A counter, 0 before it first counted."""
        return self.counters.get(name, 0)

    def sum(self, name: str) -> float:
        """A sum."""
        return self.sums.get(name, 0.0)


class Store(Protocol):
    """The calls of one run's learner; see `client.StoreClient`."""

    def open(self, spec: store_pb2.RunSpec, floor: int, resume_update: int) -> Opened:
        """Open the run, or open it again."""

    def lease(self, epoch: int, count: int, wait_seconds: float) -> list[LeasedGroup]:
        """Complete groups in admission order. After an error, the next call is answered as this one would have been."""

    def fetch(self, group: LeasedGroup) -> list[Member]:
        """A group's members with their trajectories."""

    def trained(self, epoch: int, update: int, groups: Sequence[int]) -> None:
        """Record an update."""

    def ack(self, epoch: int, checkpoint_update: int) -> int:
        """Free what a durable checkpoint contains."""

    def nack(self, epoch: int, group: int, reason: str, discard: bool = False) -> None:
        """Refuse a group; discard: it is replaced without a dead letter."""

    def stats(self) -> StoreStats:
        """Counters of the run."""

    def close_run(self, epoch: int) -> None:
        """End the run."""
