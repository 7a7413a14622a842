"""The plots of a run report, each as an SVG text. matplotlib without pyplot: no global state, no display."""

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from services.cli.lanes import LANES, series
from services.cli.samples import BUSY, Sample, StoreSample
from services.cli.summary import TRAINING

WINDOW_EPISODES = 64
"""Training success is shown over at least so many episodes."""
RATE_SECONDS = 10.0
"""Speeds are shown over so many seconds."""
_STYLE: Any = {
    "svg.fonttype": "none",  # text stays text: a tenth of the size, and it can be searched
    "svg.hashsalt": "dvla",  # the same run gives the same bytes
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "figure.constrained_layout.use": True,
}
BUSY_COLOUR = "#2a9d8f"
IDLE_COLOURS = (
    "#f4a261",
    "#d9dde2",
    "#e9c46a",
    "#9aa5b1",
    "#c98686",
    "#8ab0d6",
    "#b8a1d9",
    "#bfd8a5",
    "#e3b7cf",
    "#7f8fa6",
    "#d9bf9a",
)


@dataclass(frozen=True)
class EvaluationPoint:
    """An evaluation to mark: when, after how many trained steps, success with its 95 % interval."""

    name: str
    t: float
    steps: int
    success: float
    low: float
    high: float


def success(samples: Sequence[Sample], points: Sequence[EvaluationPoint]) -> str:
    """Success over wall time and over trained env steps."""
    curve = _success_curve(samples)

    def draw(axes: Sequence[Axes]) -> None:
        for axis, column, label in ((axes[0], 0, "minutes"), (axes[1], 1, "env steps trained")):
            axis.plot([row[column] for row in curve], [row[2] for row in curve], color=BUSY_COLOUR, label="training")
            for point in points:
                x = (point.t / 60, point.steps)[column]
                spread = [[point.success - point.low], [point.high - point.success]]
                axis.errorbar([x], [point.success], yerr=spread, fmt="o", capsize=3, label=point.name)
            axis.set(ylim=(-0.02, 1.02), xlabel=label, ylabel="success")
        if curve or points:
            axes[0].legend(loc="lower right", frameon=False)

    return svg(draw, columns=2)


def updates(rows: Sequence[Mapping[str, Any]]) -> str:
    """What the learner says of its updates, one row each: return, loss, clipped share, KL divergence."""

    def draw(axes: Sequence[Axes]) -> None:
        for axis, name in zip(axes, ("return", "loss", "clip_fraction", "approx_kl"), strict=True):
            points = [(row["update"], row[name]) for row in rows if name in row]
            axis.plot([x for x, _ in points], [y for _, y in points], color=BUSY_COLOUR, marker=".")
            axis.set(title=name.replace("_", " "), xlabel="update")

    return svg(draw, columns=4)


def lanes(samples: Sequence[Sample]) -> str:
    """What each of the four lanes did over time: busy, or idle for which reason."""
    rows = series(samples)
    reasons = sorted({reason for _, lane in rows for share in lane.values() for reason in share.idle})
    colours = {reason: IDLE_COLOURS[index % len(IDLE_COLOURS)] for index, reason in enumerate(reasons)}

    def draw(axes: Sequence[Axes]) -> None:
        minutes = [t / 60 for t, _ in rows]
        for axis, lane in zip(axes, LANES, strict=True):
            stack = [[shares[lane].busy for _, shares in rows]]
            stack += [[shares[lane].idle.get(reason, 0.0) for _, shares in rows] for reason in reasons]
            if rows:
                axis.stackplot(minutes, *stack, colors=[BUSY_COLOUR, *(colours[r] for r in reasons)], linewidth=0)
            axis.set(title=lane, ylim=(0, 1), xlabel="minutes")
            axis.grid(visible=False)
        axes[0].set_ylabel("share of time")

    return svg(draw, columns=4, share=True, legend={BUSY: BUSY_COLOUR} | colours)


def staleness(histogram: Sequence[int]) -> str:
    """How stale trained groups were."""

    def draw(axes: Sequence[Axes]) -> None:
        axes[0].bar(range(len(histogram)), histogram, color=BUSY_COLOUR)
        axes[0].set(xlabel="updates between acting and training", ylabel="groups")
        axes[0].set_xticks(range(len(histogram)))

    return svg(draw, columns=1, width=4.5)


def throughput(samples: Sequence[Sample]) -> str:
    """Env steps per second over time: executed by the workers, accepted by the store, trained by the learner."""

    def draw(axes: Sequence[Axes]) -> None:
        for label, count in (("executed", _executed), ("accepted", _accepted), ("trained", _trained)):
            rates = _rates(samples, count)
            axes[0].plot([t / 60 for t, _ in rates], [rate for _, rate in rates], label=label)
        axes[0].set(xlabel="minutes", ylabel="env steps/s", ylim=(0, None))
        axes[0].legend(frameon=False)

    return svg(draw, columns=1, width=5.5)


def _success_curve(samples: Sequence[Sample]) -> list[tuple[float, int, float]]:
    """(minutes, trained steps, success of the latest episodes) in the training stage."""
    rows = [(sample.t, sample.store) for sample in samples if sample.store is not None and sample.stage == TRAINING]
    out, first = [], 0
    for t, store in rows:
        while first + 1 < len(rows) and _episodes(store) - _episodes(rows[first + 1][1]) >= WINDOW_EPISODES:
            first += 1
        base = rows[first][1] if _episodes(store) - _episodes(rows[first][1]) >= WINDOW_EPISODES else StoreSample()
        episodes = _episodes(store) - _episodes(base)
        if episodes > 0:
            wins = store.sums.get("accepted_success", 0.0) - base.sums.get("accepted_success", 0.0)
            out.append((t / 60, store.counters.get("trained_steps", 0), wins / episodes))
    return out


def _rates(samples: Sequence[Sample], count: Callable[[Sample], float | None]) -> list[tuple[float, float]]:
    points = [(sample.t, value) for sample in samples if (value := count(sample)) is not None]
    out, first = [], 0
    for t, value in points:
        while points[first][0] < t - RATE_SECONDS:
            first += 1
        since, base = points[first]
        if t > since:
            out.append((t, max(0.0, value - base) / (t - since)))
    return out


def _executed(sample: Sample) -> float | None:
    counts = [role.metrics["env_steps"] for role in sample.roles.values() if "env_steps" in role.metrics]
    return sum(counts) if counts else None


def _accepted(sample: Sample) -> float | None:
    return sample.store.counters.get("accepted_steps", 0) if sample.store is not None else None


def _trained(sample: Sample) -> float | None:
    return sample.store.counters.get("trained_steps", 0) if sample.store is not None else None


def _episodes(store: StoreSample) -> int:
    return store.counters.get("accepted", 0)


def svg(
    draw: Callable[[Sequence[Axes]], None],
    columns: int,
    width: float = 9.0,
    share: bool = False,
    legend: Mapping[str, str] | None = None,
    height: float = 2.6,
) -> str:
    """What `draw` draws into `columns` axes side by side, as an SVG text. width, height: inches."""
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(width, height))
        axes = figure.subplots(1, columns, squeeze=False, sharey=share)[0]
        draw(list(axes))
        if legend:
            patches = [mpl.patches.Patch(color=colour, label=name) for name, colour in legend.items()]
            figure.legend(handles=patches, loc="outside lower center", ncols=min(8, len(patches)), frameon=False)
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None})
    text = out.getvalue()
    return text[text.index("<svg") :]
