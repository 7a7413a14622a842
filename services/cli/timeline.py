"""The lanes of a run over a few seconds, each change of state to be seen: the report's zoom into its spans."""

from collections.abc import Sequence

from matplotlib.axes import Axes

from services.cli.lanes import LANES
from services.cli.plots import BUSY_COLOUR, IDLE_COLOURS, svg
from services.cli.samples import BUSY
from services.cli.spans import Span

WINDOW_SECONDS = 8.0
ROWS = 16
"""Lanes shown at most."""
_SIDE = ("inference", "prefetch", "env-0", "env-1")
"""Lanes beside the four that are worth a row."""


def timeline(spans: Sequence[Span]) -> str:
    """A window from the middle of training as an SVG text, one row per lane; says so where there are no spans."""
    trained = [span for span in spans if span.lane == "training" and span.state == BUSY] or list(spans)
    if not trained:
        return "<p>No spans were kept.</p>"
    middle = trained[len(trained) // 2].start
    start, end = middle - WINDOW_SECONDS / 2, middle + WINDOW_SECONDS / 2
    seen = [span for span in spans if span.end > start and span.start < end]
    rows = _rows(seen)
    reasons = sorted({span.state for span in seen if (span.who, span.lane) in rows} - {BUSY})
    colours = {BUSY: BUSY_COLOUR} | {reason: IDLE_COLOURS[i % len(IDLE_COLOURS)] for i, reason in enumerate(reasons)}

    def draw(axes: Sequence[Axes]) -> None:
        for index, (who, lane) in enumerate(rows):
            mine = [span for span in seen if (span.who, span.lane) == (who, lane)]
            bars = [(max(span.start, start), min(span.end, end) - max(span.start, start)) for span in mine]
            axes[0].broken_barh(bars, (index - 0.4, 0.8), facecolors=[colours[span.state] for span in mine])
        axes[0].set(xlim=(start, end), xlabel="seconds into the run", ylim=(len(rows) - 0.5, -0.5))
        axes[0].set_yticks(range(len(rows)), [f"{who} {lane}" for who, lane in rows])
        axes[0].grid(visible=False)

    return svg(draw, columns=1, height=1.2 + 0.24 * len(rows), legend=colours)


def _rows(spans: Sequence[Span]) -> list[tuple[str, str]]:
    """(replica, lane) to show: the four lanes, then what stands behind them."""
    wanted = (*LANES, *_SIDE)
    found = {(span.who, span.lane) for span in spans if span.lane in wanted}
    return sorted(found, key=lambda row: (wanted.index(row[1]), row[0]))[:ROWS]
