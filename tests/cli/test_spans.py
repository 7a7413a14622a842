"""Spans of real roles come once, whole and on one clock, and become a trace that Perfetto reads."""

import itertools
import json
import time
from pathlib import Path

import pytest
from dvla.v1 import role_pb2
from hypothesis import given
from hypothesis import strategies as st

from services.cli.spans import Span, SpanFile, SpanReader, _Peer, before, read_spans
from services.cli.timeline import timeline
from services.cli.trace import trace_events, trace_roles, write_trace
from services.common.channels import open_channel
from services.common.config import RoleConfig
from services.common.errors import Unavailable
from services.common.process import boot_id
from services.common.security import Security
from services.common.server import RoleServer
from services.common.telemetry import BUSY, KEPT_SPANS, Lane, Telemetry


def test_a_lane_remembers_its_newest_spans() -> None:
    lane = Lane("sampling", "weights")
    for number in range(KEPT_SPANS):
        lane.set(BUSY if number % 2 else "rows")
    spans = lane.spans()
    assert spans.first == 1
    assert len(spans.begins) == KEPT_SPANS
    assert [state for _, state in lane.spans(KEPT_SPANS - 1).begins] == ["rows", BUSY]
    assert lane.spans(10**9).begins == spans.begins[-1:], "the open span comes in any case"
    assert [begin for begin, _ in spans.begins] == sorted(begin for begin, _ in spans.begins)


def test_a_state_set_again_is_no_new_span() -> None:
    lane = Lane("sampling", BUSY)
    lane.set(BUSY)
    lane.set(BUSY)
    assert len(lane.spans().begins) == 1


async def test_spans_of_a_role_come_once_and_cover_all_time(tmp_path: Path) -> None:
    import asyncio

    telemetry = Telemetry("learner", "l")
    lane = telemetry.lane("training", "lease")
    config = RoleConfig(listen=f"unix:{tmp_path / 's'}")
    server = RoleServer(config, telemetry)
    await server.start()
    zero = time.monotonic() - 100
    channels = {"learner": open_channel(config.listen), "gone": open_channel(f"unix:{tmp_path / 'gone'}")}
    reader, file = SpanReader(channels, zero), SpanFile(tmp_path / "spans.jsonl")
    for _ in range(3):
        lane.set(BUSY)
        lane.set("lease")
        file.add(await asyncio.to_thread(reader.collect))
    await server.stop()
    spans = read_spans(tmp_path / "spans.jsonl")
    assert [span.state for span in spans] == ["lease", BUSY] * 3 + ["lease"]
    assert all(a.end == pytest.approx(b.start, abs=1e-5) for a, b in itertools.pairwise(spans))
    assert spans[0].start >= 99.0
    assert spans[-1].end <= time.monotonic() - zero
    for channel in channels.values():
        channel.close()


def answer(pid: int, now: float, begins: list[float], first: int = 0, boot: str = "") -> role_pb2.GetSpansResponse:
    lane = role_pb2.LaneSpans(
        name="training", first=first, begins=begins, states=[i % 2 for i in range(len(begins))], names=["lease", BUSY]
    )
    return role_pb2.GetSpansResponse(pid=pid, boot_id=boot or boot_id(), monotonic_seconds=now, lanes=[lane])


def test_the_clock_of_another_machine_is_set_by_the_quickest_answer() -> None:
    peer = _Peer()
    peer.set_clock(answer(1, 5000.0, [4990.0], boot="other"), asked=10.0, heard=12.0)
    assert (peer.offset, peer.trip) == (11.0 - 5000.0, 2.0)
    peer.set_clock(answer(1, 5010.0, [4990.0], boot="other"), asked=20.0, heard=20.2)
    peer.set_clock(answer(1, 5020.0, [4990.0], boot="other"), asked=30.0, heard=33.0)
    assert peer.offset == pytest.approx(20.1 - 5010.0)
    peer.set_clock(answer(1, 5030.0, [4990.0]), asked=40.0, heard=45.0)
    assert peer.offset == 0.0, "one boot, one clock"


@given(st.lists(st.floats(0.001, 5.0), min_size=2, max_size=30), st.integers(0, 29))
def test_two_readings_give_what_one_gives(gaps: list[float], cut: int) -> None:
    begins = [sum(gaps[: i + 1]) for i in range(len(gaps))]
    end = begins[-1] + 1.0
    once = list(_Peer().read("l", answer(1, end, begins), zero=0.0))
    cut = min(cut, len(begins) - 1)
    middle = begins[cut] + 0.0005
    peer = _Peer()
    twice = list(peer.read("l", answer(1, middle, begins[: cut + 1]), zero=0.0))
    first = peer.first["training"]
    rest = answer(1, end, begins[first:], first)
    rest.lanes[0].states[:] = [i % 2 for i in range(first, len(begins))]
    twice += list(peer.read("l", rest, zero=0.0))
    assert sum(s.end - s.start for s in twice) == pytest.approx(sum(s.end - s.start for s in once))
    assert all(a.end == pytest.approx(b.start) for a, b in itertools.pairwise(twice))


def test_the_file_is_bounded(tmp_path: Path) -> None:
    path = tmp_path / "spans.jsonl"
    file = SpanFile(path, limit=2000)
    for t in range(200):
        file.add([Span("learner", 1, "training", BUSY if t % 2 else "lease", float(t), t + 1.0)])
    assert path.stat().st_size + before(path).stat().st_size < 5000
    spans = read_spans(path)
    assert spans[-1].end == 200.0
    assert len(spans) > 15


SPANS = [
    Span("rollout-0", 7, "sampling", BUSY, 1.0, 2.5),
    Span("rollout-0", 7, "sampling", "admission", 2.5, 3.0),
    Span("learner", 8, "training", "lease", 1.0, 2.0),
    Span("learner", 8, "training", BUSY, 2.0, 3.0),
]


def test_a_trace_names_processes_lanes_and_reasons(tmp_path: Path) -> None:
    event = {"t": 2.0, "who": "sim-0", "what": "restarted", "detail": "pid 3"}
    write_trace(tmp_path / "trace.json", SPANS, [event])
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {e["args"]["name"] for e in events if e["ph"] == "M" and "name" in e["args"]}
    assert names == {"rollout-0", "learner", "sampling", "training"}
    slices = [e for e in events if e["ph"] == "X"]
    assert {"name": "waits: admission", "ts": 2.5e6, "dur": 5e5}.items() <= slices[1].items()
    assert [e["cat"] for e in slices] == ["busy", "idle", "idle", "busy"]
    assert [e["name"] for e in events if e["ph"] == "i"] == ["sim-0 restarted pid 3"]
    assert list(trace_events([])) == []


def test_the_timeline_draws_each_lane() -> None:
    text = timeline(SPANS)
    assert text.startswith("<svg")
    assert "rollout-0 sampling" in text
    assert "admission" in text
    assert "No spans" in timeline([])


def test_no_role_answers(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="no role answers"):
        trace_roles([f"unix:{tmp_path / 'gone'}"], Security(), tmp_path / "trace.json")
