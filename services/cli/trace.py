"""`dvla trace`: the lanes of a run as a Chrome trace, to look at in ui.perfetto.dev or chrome://tracing."""

import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from services.cli.runfolder import find_run
from services.cli.samples import BUSY, Sample, read_samples
from services.cli.spans import Span, SpanReader, read_spans
from services.common.channels import open_channel
from services.common.errors import ConfigError, Unavailable
from services.common.security import Security

Event = dict[str, Any]


def trace_run(name: str, out: Path, target: Path | None) -> Path:
    """Write the trace of a run, running or finished; returns its path."""
    run = find_run(name, out)
    spans = read_spans(run.spans)
    if not spans:
        raise ConfigError(f"run {run.name!r} has no spans yet; they come a few seconds after its roles are up")
    path = target or run.path / "trace.json"
    write_trace(path, spans, run.read_events(), list(read_samples(run.samples)))
    return path


def trace_roles(addresses: Sequence[str], security: Security, target: Path) -> Path:
    """Write what the roles at these addresses remember; raises Unavailable if none of them answers."""
    channels = {address: open_channel(address, security) for address in addresses}
    spans = SpanReader(channels, zero=time.monotonic()).collect()
    for channel in channels.values():
        channel.close()
    if not spans:
        raise Unavailable(f"no role answers at {', '.join(addresses)}")
    first = min(span.start for span in spans)
    write_trace(target, [_shifted(span, first) for span in spans])
    return target


def write_trace(
    path: Path, spans: Sequence[Span], events: Iterable[Mapping[str, Any]] = (), samples: Iterable[Sample] = ()
) -> None:
    """The file, whole or not at all."""
    partial = path.with_suffix(".partial")
    text = {"traceEvents": list(trace_events(spans, events, samples)), "displayTimeUnit": "ms"}
    partial.write_text(json.dumps(text, separators=(",", ":")))
    partial.replace(path)


def trace_events(
    spans: Sequence[Span], events: Iterable[Mapping[str, Any]] = (), samples: Iterable[Sample] = ()
) -> Iterator[Event]:
    """Processes are replicas, threads their lanes; a span is busy or says what the lane waits for."""
    replicas = {who: number for number, who in enumerate(sorted({span.who for span in spans}, key=_order), 1)}
    lanes: dict[tuple[str, str], int] = {}
    for who, number in replicas.items():
        yield {"ph": "M", "name": "process_name", "pid": number, "args": {"name": who}}
        yield {"ph": "M", "name": "process_sort_index", "pid": number, "args": {"sort_index": number}}
    for span in spans:
        pid, known = replicas[span.who], (span.who, span.lane) in lanes
        tid = lanes.setdefault((span.who, span.lane), len(lanes) + 1)
        if not known:
            yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": span.lane}}
        busy = span.state == BUSY
        yield {
            "ph": "X",
            "name": BUSY if busy else f"waits: {span.state}",
            "cat": "busy" if busy else "idle",
            "pid": pid,
            "tid": tid,
            "ts": round(span.start * 1e6, 1),
            "dur": round((span.end - span.start) * 1e6, 1),
        }
    for event in events:
        text = " ".join(filter(None, (event["who"], event["what"], str(event["detail"]))))
        yield {"ph": "i", "s": "g", "name": text, "pid": 0, "tid": 0, "ts": round(event["t"] * 1e6, 1)}
    yield from _counters(samples)


def _counters(samples: Iterable[Sample]) -> Iterator[Event]:
    """Curves below the lanes: updates made and groups on their way."""
    for sample in samples:
        if sample.store is not None:
            ts = round(sample.t * 1e6, 1)
            groups = {"open": sample.store.open_groups, "complete": sample.store.complete_groups}
            yield {"ph": "C", "name": "groups", "pid": 0, "ts": ts, "args": groups}
            yield {"ph": "C", "name": "updates", "pid": 0, "ts": ts, "args": {"made": sample.store.update}}


def _order(who: str) -> tuple[int, str]:
    """Learner and workers first: their lanes are the four."""
    kinds = ("learner", "rollout", "sim")
    return next((rank for rank, kind in enumerate(kinds) if who.startswith(kind)), len(kinds)), who


def _shifted(span: Span, zero: float) -> Span:
    return Span(span.who, span.pid, span.lane, span.state, span.start - zero, span.end - zero)
