"""Asks all roles of a run how they do, a few times a second, all at once and with short deadlines.

A role that does not answer is left out of the sample: it is being restarted, or it is still starting.
"""

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Protocol, TypeVar

import grpc
from dvla.v1 import common_pb2, learner_pb2, learner_pb2_grpc, role_pb2, role_pb2_grpc, store_pb2, store_pb2_grpc

from services.cli.samples import BUSY, EvaluationSample, LearnerSample, RoleSample, Sample, StoreSample
from services.common.channels import open_channel

STATUS_SECONDS = 1.0
"""Deadline of one question; a busy two-core machine answers late, a dead role at once."""

Reply = TypeVar("Reply", covariant=True)


class _Future(Protocol[Reply]):
    def result(self) -> Reply: ...


class RunClient:
    """Questions to the roles of one run. addresses: child name -> address; "store" and "learner" are asked more."""

    def __init__(self, run: str, addresses: Mapping[str, str]) -> None:
        self._run = run
        self.channels = {name: open_channel(address) for name, address in addresses.items()}
        self._roles = {name: role_pb2_grpc.RoleServiceStub(channel) for name, channel in self.channels.items()}
        self.facts: dict[str, Mapping[str, str]] = {}

    def ask(self, t: float, stage: str, evaluation: str = "", restarts: Mapping[str, int] | None = None) -> Sample:
        """One sample: every role's status, the store's statistics, the learner's progress."""
        pending = {}
        for name, stub in self._roles.items():
            with suppress(ValueError):  # it was dropped just now, and its channel closed
                pending[name] = stub.GetStatus.future(role_pb2.GetStatusRequest(), STATUS_SECONDS)
        store, learner, results = self._store(), self._learner(), self._evaluation(evaluation)
        roles = {}
        for name, future in pending.items():
            reply = _answer(future)
            if reply is not None:
                roles[name] = _role(reply)
                self.facts[name] = dict(reply.facts)
        return Sample(t, stage, roles, store, learner, results, dict(restarts or {}))

    def add(self, name: str, address: str) -> None:
        """Ask one more role. From any thread."""
        channel = open_channel(address)
        self.channels = {**self.channels, name: channel}
        self._roles = {**self._roles, name: role_pb2_grpc.RoleServiceStub(channel)}

    def drop(self, name: str) -> None:
        """Ask this role no more. From any thread."""
        channel = self.channels[name]
        self.channels = {other: kept for other, kept in self.channels.items() if other != name}
        self._roles = {other: stub for other, stub in self._roles.items() if other != name}
        channel.close()

    def close(self) -> None:
        """Close all channels."""
        for channel in self.channels.values():
            channel.close()

    def _store(self) -> StoreSample | None:
        if "store" not in self.channels:
            return None
        stub = store_pb2_grpc.StoreServiceStub(self.channels["store"])
        reply = _answer(stub.GetStats.future(store_pb2.GetStatsRequest(run=self._run), STATUS_SECONDS))
        return None if reply is None else _store(reply)

    def _learner(self) -> LearnerSample | None:
        if "learner" not in self.channels:
            return None
        stub = learner_pb2_grpc.LearnerServiceStub(self.channels["learner"])
        reply = _answer(stub.GetProgress.future(learner_pb2.GetProgressRequest(), STATUS_SECONDS))
        return None if reply is None else _learner(reply)

    def _evaluation(self, name: str) -> EvaluationSample | None:
        if not name or "store" not in self.channels:
            return None
        stub = store_pb2_grpc.StoreServiceStub(self.channels["store"])
        request = store_pb2.GetEvaluationRequest(run=self._run, evaluation=name)
        reply = _answer(stub.GetEvaluation.future(request, STATUS_SECONDS))
        if reply is None:
            return None
        wins = sum(result.episode.success_once for result in reply.results)
        return EvaluationSample(name, reply.total, len(reply.results), wins)


class Poller(threading.Thread):
    """Takes a sample every `interval` seconds and hands it to `listener`, until stopped."""

    def __init__(self, take: Callable[[], Sample], listener: Callable[[Sample], None], interval: float = 0.5) -> None:
        super().__init__(name="status", daemon=True)
        self._take, self._listener, self._interval = take, listener, interval
        self._stopping = threading.Event()

    def run(self) -> None:
        """Poll until stopped."""
        while not self._stopping.is_set():
            began = time.monotonic()
            self._listener(self._take())
            self._stopping.wait(max(0.05, self._interval - (time.monotonic() - began)))

    def stop(self) -> None:
        """End after the sample under way."""
        self._stopping.set()
        if self.is_alive():
            self.join(timeout=3 * STATUS_SECONDS)


def _answer(future: _Future[Reply]) -> Reply | None:
    try:
        return future.result()
    except grpc.RpcError:
        return None  # not there (yet, or for the moment): the sample says so by leaving it out


def _role(reply: role_pb2.GetStatusResponse) -> RoleSample:
    lanes = {lane.name: {BUSY: lane.busy_seconds, **lane.idle_seconds} for lane in reply.lanes}
    return RoleSample(reply.role, reply.pid, lanes, dict(reply.metrics), dict(reply.facts))


def _store(reply: store_pb2.GetStatsResponse) -> StoreSample:
    return StoreSample(
        update=reply.update,
        open_groups=reply.open_groups,
        complete_groups=reply.complete_groups,
        leased_groups=reply.leased_groups,
        granted_jobs=reply.granted_jobs,
        workers=reply.workers,
        bytes=reply.bytes,
        redis_used=reply.redis_used,
        counters=dict(reply.counters),
        sums=dict(reply.sums),
        staleness=tuple(reply.staleness),
    )


def _learner(reply: learner_pb2.GetProgressResponse) -> LearnerSample:
    return LearnerSample(
        state=reply.state,
        version=_version(reply.version),
        published=_version(reply.published),
        checkpoint=_version(reply.checkpoint),
        total_updates=reply.total_updates,
        metrics=dict(reply.metrics),
    )


def _version(version: common_pb2.Version) -> tuple[int, int]:
    return version.epoch, version.update
