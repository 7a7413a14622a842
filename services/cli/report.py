"""`report.html`: what a run did, on one page without any other file. Can be made again at any time from the folder."""

import html
import os
import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from string import Template
from typing import Any

from services.cli import plots
from services.cli.advice import advice
from services.cli.plots import EvaluationPoint
from services.cli.runfolder import RunFolder, read_json
from services.cli.samples import Sample, StoreSample, read_samples
from services.cli.spans import read_spans
from services.cli.summary import Summary, summarise
from services.cli.timeline import timeline

_PAGE = Template((Path(__file__).parent / "report_template.html").read_text())


def write_report(run: RunFolder) -> Path:
    """Render the report of a run, finished or not; returns its path."""
    samples = list(read_samples(run.samples))
    events = run.read_events()
    summary = replace(summarise(samples), restarts=Counter(e["who"] for e in events if e["what"] == "restarted"))
    state = run.read_state()
    text = _PAGE.substitute(
        name=html.escape(run.name),
        result=html.escape(state.get("result") or "not finished"),
        advice=html.escape(advice(summary, os.cpu_count() or 1, _mode(run))),
        facts=_facts(summary, samples),
        evaluations=_evaluations(run, state),
        videos=_videos(run),
        success=plots.success(samples, evaluation_points(run, state)),
        updates=plots.updates(run.read_metrics()),
        lanes=plots.lanes(samples),
        timeline=timeline(read_spans(run.spans)),
        staleness=plots.staleness(summary.staleness),
        throughput=plots.throughput(samples),
        transports=_transports(run),
        events=_events(events),
        recipe=html.escape(run.recipe.read_text()),
    )
    partial = run.report.with_suffix(".partial")
    partial.write_text(text)
    partial.replace(run.report)
    return run.report


def _mode(run: RunFolder) -> str:
    """Whether lanes were meant to overlap."""
    return str(tomllib.loads(run.recipe.read_text()).get("run", {}).get("mode", "async"))


def evaluation_points(run: RunFolder, state: Mapping[str, Any]) -> list[EvaluationPoint]:
    """The evaluations of a run as points of the success plot."""
    points = []
    for name in state.get("evaluations", {}):
        result = read_json(run.evaluation(name))
        if result:
            low, high = result["success_once_interval"]
            once = result["success_once"]
            points.append(EvaluationPoint(name, result["t"], result["trained_steps"], once, low, high))
    return points


def _facts(summary: Summary, samples: list[Sample]) -> str:
    """The figures as a table."""
    total = max((sample.t for sample in samples), default=0.0)
    rows = [
        ("wall time, all stages", f"{total:.0f} s"),
        ("wall time of training", f"{summary.seconds:.0f} s"),
        ("updates", f"{summary.updates}"),
        ("env steps trained", f"{summary.trained_steps:,} ({summary.steps_per_second:.0f} per second of training)"),
        ("env steps accepted", f"{summary.accepted_steps:,}{_not_trained(summary)}"),
        ("env steps executed", f"{_executed(samples):,.0f} (evaluations and lost episodes included)"),
        ("staleness", f"mean {summary.staleness_mean:.2f}, max {summary.staleness_max} updates"),
        ("restarts", ", ".join(f"{name} {count}" for name, count in summary.restarts.items()) or "none"),
    ]
    store = last_store(samples)
    rows.append(("selection", _bias(store)))
    for name in (
        "discarded_uniform",
        "failed",
        "expired",
        "superseded",
        "repeated",
        "zeroed",
        "dead",
        "lost",
        "rolled_back",
    ):
        rows.append((name.replace("_", " "), f"{store.counters.get(name, 0):,}"))
    return _table(rows)


def _not_trained(summary: Summary) -> str:
    if not summary.accepted_steps:
        return ""
    return f" ({100 * summary.trained_steps / summary.accepted_steps:.0f} % of them trained)"


def _executed(samples: list[Sample]) -> float:
    """Env steps of all workers; a restarted worker begins at 0 again."""
    total, last = 0.0, {}  # type: float, dict[str, tuple[int, float]]
    for sample in samples:
        for name, role in sample.roles.items():
            if "env_steps" in role.metrics:
                pid, value = last.get(name, (role.pid, 0.0))
                total += role.metrics["env_steps"] - (value if pid == role.pid else 0.0)
                last[name] = (role.pid, role.metrics["env_steps"])
    return total


def last_store(samples: list[Sample]) -> StoreSample:
    """The store's last word."""
    return next((sample.store for sample in reversed(samples) if sample.store is not None), StoreSample())


def _bias(store: StoreSample) -> str:
    """Trained against accepted episodes: they must look alike, or training saw a selection."""
    texts = []
    for kind, episodes in (("accepted", "accepted"), ("trained", "trained_episodes")):
        count = store.counters.get(episodes, 0)
        if count:
            success, length = store.sums.get(f"{kind}_success", 0.0), store.sums.get(f"{kind}_length", 0.0)
            texts.append(f"{kind}: success {success / count:.2f}, length {length / count:.1f}")
    return "; ".join(texts) or "nothing accepted"


def _evaluations(run: RunFolder, state: Mapping[str, Any]) -> str:
    head = (
        "evaluation",
        "version",
        "episodes",
        "success once",
        "95 % interval",
        "success at end",
        "return",
        "steps",
        "failed",
    )
    rows = []
    for name in state.get("evaluations", {}):
        result = read_json(run.evaluation(name))
        if result:
            low, high = result["success_once_interval"]
            cells = (f"{result['success_once']:.3f}", f"{low:.3f} to {high:.3f}", f"{result['success_at_end']:.3f}")
            rest = (f"{result['mean_return']:.2f}", f"{result['mean_steps']:.1f}", str(result["failed"]))
            rows.append((name, result["version"], str(result["episodes"]), *cells, *rest))
    return _table(rows, head) if rows else "<p>None yet.</p>"


def _videos(run: RunFolder) -> str:
    files = sorted(run.videos.glob("*.mp4"))
    if not files:
        return "<p>None.</p>"
    tags = [
        f'<figure><video controls muted loop width="256" src="videos/{html.escape(file.name)}"></video>'
        f"<figcaption>{html.escape(file.stem)}</figcaption></figure>"
        for file in files
    ]
    return f'<div class="videos">{"".join(tags)}</div>'


def _transports(run: RunFolder) -> str:
    facts = read_json(run.path / "facts.json") or {}
    rows = [
        (child, name.removeprefix("transport/"), text)
        for child, texts in facts.items()
        for name, text in texts.items()
        if name.startswith("transport/")
    ]
    return _table(rows, ("process", "edge", "transport and reason")) if rows else "<p>Nothing reported.</p>"


def _events(events: Iterable[Mapping[str, Any]]) -> str:
    told = [e for e in events if e["what"] not in ("stopped",)]
    rows = [(f"{e['t']:.1f} s", str(e["who"]), str(e["what"]), str(e["detail"])) for e in told]
    return _table(rows, ("time", "who", "what", "detail")) if rows else "<p>None.</p>"


def _table(rows: Iterable[Iterable[str]], head: Iterable[str] = ()) -> str:
    top = "".join(f"<th>{html.escape(cell)}</th>" for cell in head)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table>{f'<tr>{top}</tr>' if top else ''}{body}</table>"
