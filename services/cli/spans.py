"""Collects what the lanes of all roles did when, on one clock, into `spans.jsonl` of the run folder.

A line: {"who": child, "pid": ..., "lane": ..., "spans": [[state, start, end], ...]}, in seconds since the run began.
Processes of one boot share the monotonic clock. The clock of another machine is set by the answer that came back
quickest: it is wrong by at most half that time, whatever the wall clocks say.
"""

import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import grpc
from dvla.v1 import role_pb2, role_pb2_grpc

from services.common.process import boot_id

ASK_SECONDS = 1.0
COLLECT_SECONDS = 2.0
"""How often spans are fetched; a lane may change 2,000 times a second before some are missed."""
FILE_BYTES = 32 << 20
"""A run keeps its newest spans: up to so many bytes, and the file before that."""


@dataclass(frozen=True)
class Span:
    """One lane of one process in one state, from start to end in seconds since the run began."""

    who: str
    pid: int
    lane: str
    state: str
    start: float
    end: float


@dataclass
class _Peer:
    """What was read of one process. offset: seconds to add to its clock to get ours; trip: how sure that is."""

    pid: int = 0
    first: dict[str, int] = field(default_factory=dict)
    until: dict[str, float] = field(default_factory=dict)
    offset: float = 0.0
    trip: float = float("inf")

    def set_clock(self, reply: role_pb2.GetSpansResponse, asked: float, heard: float) -> None:
        """Better our idea of its clock."""
        if reply.boot_id == boot_id():
            self.offset, self.trip = 0.0, 0.0
        elif heard - asked < self.trip:
            self.trip = heard - asked
            self.offset = (asked + heard) / 2 - reply.monotonic_seconds

    def read(self, who: str, reply: role_pb2.GetSpansResponse, zero: float) -> Iterator[Span]:
        """The spans of an answer that were not read before; one that is still open as far as it goes."""
        shift = self.offset - zero
        for lane in reply.lanes:
            ends = [*lane.begins[1:], reply.monotonic_seconds]
            known = self.until.get(lane.name, float("-inf"))
            for begin, end, state in zip(lane.begins, ends, lane.states, strict=True):
                if end > known:
                    start = max(begin, known)
                    yield Span(who, reply.pid, lane.name, lane.names[state], start + shift, end + shift)
            self.first[lane.name] = lane.first + len(lane.begins) - 1
            self.until[lane.name] = reply.monotonic_seconds


class SpanReader:
    """Reads spans from roles, again and again. zero: this machine's monotonic clock when the run began."""

    def __init__(self, channels: Mapping[str, grpc.Channel], zero: float) -> None:
        self.follow(channels)
        self._peers: dict[str, _Peer] = {}
        self._zero = zero

    def follow(self, channels: Mapping[str, grpc.Channel]) -> None:
        """Read from these roles from now on."""
        self._stubs = {name: role_pb2_grpc.RoleServiceStub(channel) for name, channel in channels.items()}

    def collect(self) -> list[Span]:
        """What is new since the last call; a role that does not answer is left out until it does."""
        stubs = self._stubs
        with ThreadPoolExecutor(min(16, max(1, len(stubs)))) as pool:
            return [span for spans in pool.map(self._ask, stubs, stubs.values()) for span in spans]

    def _ask(self, name: str, stub: role_pb2_grpc.RoleServiceStub) -> list[Span]:
        peer = self._peers.setdefault(name, _Peer())
        asked = time.monotonic()
        try:
            reply = stub.GetSpans(role_pb2.GetSpansRequest(first=peer.first), timeout=ASK_SECONDS)
        except (grpc.RpcError, ValueError):
            return []  # it is starting, or gone for the moment; ValueError: its channel has just been closed
        heard = time.monotonic()
        if reply.pid != peer.pid and peer.pid:  # another process has taken its place: ask again from its beginning
            self._peers[name] = _Peer(reply.pid)
            return self._ask(name, stub)
        peer.pid = reply.pid
        peer.set_clock(reply, asked, heard)
        return list(peer.read(name, reply, self._zero))


class SpanFile:
    """`spans.jsonl`, bounded: the newest `limit` bytes and the file before that."""

    def __init__(self, path: Path, limit: int = FILE_BYTES) -> None:
        self._path, self._limit = path, limit

    def add(self, spans: Iterable[Span]) -> None:
        """Append, one line per lane."""
        lanes: dict[tuple[str, int, str], list[list[str | float]]] = {}
        for span in spans:
            lane = lanes.setdefault((span.who, span.pid, span.lane), [])
            lane.append([span.state, round(span.start, 6), round(span.end, 6)])
        lines = [
            json.dumps({"who": who, "pid": pid, "lane": lane, "spans": rows}, separators=(",", ":")) + "\n"
            for (who, pid, lane), rows in lanes.items()
        ]
        if self._path.exists() and self._path.stat().st_size > self._limit:
            os.replace(self._path, before(self._path))
        with self._path.open("a") as file:
            file.writelines(lines)


def before(path: Path) -> Path:
    """Where the older spans are."""
    return path.with_suffix(".before.jsonl")


def read_spans(path: Path) -> list[Span]:
    """All spans that are kept, by lane in the order of time, with the pieces of one span joined."""
    lanes: dict[tuple[str, int, str], list[Span]] = {}
    for file in (before(path), path):
        if not file.exists():
            continue
        for line in file.read_text().splitlines(keepends=True):
            if line.endswith("\n"):  # a line cut off by a crash is left out
                data = json.loads(line)
                who, pid, lane = data["who"], data["pid"], data["lane"]
                known = lanes.setdefault((who, pid, lane), [])
                for state, start, end in data["spans"]:
                    _append(known, Span(who, pid, lane, state, start, end))
    return [span for spans in lanes.values() for span in spans]


def _append(spans: list[Span], span: Span) -> None:
    last = spans[-1] if spans else None
    if last and last.state == span.state and abs(last.end - span.start) < 2e-6:
        spans[-1] = Span(last.who, last.pid, last.lane, last.state, last.start, span.end)
    else:
        spans.append(span)
