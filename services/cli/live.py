"""Shows the board in a terminal: a full live view, or plain lines where the output is not a terminal."""

import sys
import threading
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self, TextIO

from services.cli.board import Board, Figures
from services.cli.lanes import LANES, LaneShare

if TYPE_CHECKING:
    from rich.console import Group, RenderableType
    from rich.table import Table
    from rich.text import Text

LINE_SECONDS = 5.0
"""Plain lines come this far apart."""
BAR = 32
_COLOURS = {"sampling": "green", "receiving": "cyan", "training": "magenta", "distribution": "blue"}


class View(Protocol):
    """Something that shows a board while it is entered."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def open_view(board: Board, output: TextIO = sys.stdout) -> View:
    """The live view on a terminal, plain lines elsewhere."""
    return LiveView(board) if output.isatty() else PlainView(board, output)


class PlainView:
    """One line every few seconds, and one for every note."""

    def __init__(self, board: Board, output: TextIO, seconds: float = LINE_SECONDS) -> None:
        self._board, self._output, self._seconds = board, output, seconds
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="view", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopping.set()
        self._thread.join(timeout=2)

    def _run(self) -> None:
        last = ""
        while not self._stopping.wait(self._seconds):
            text = line(self._board.figures())
            if text != last:
                print(text, file=self._output, flush=True)
            last = text


class LiveView:
    """The full view, redrawn twice a second."""

    def __init__(self, board: Board) -> None:
        from rich.console import Console
        from rich.live import Live

        self._live = Live(
            get_renderable=lambda: screen(board.figures()), console=Console(), refresh_per_second=2, transient=True
        )

    def __enter__(self) -> Self:
        self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.__exit__(kind, error, trace)


def line(figures: Figures) -> str:
    """The board in one line."""
    parts = [f"{clock(figures.elapsed)} {figures.stage}"]
    progress = figures.progress
    if progress.total:
        parts.append(f"{progress.done:.0f}/{progress.total:.0f} {progress.unit}")
    if progress.remark:
        parts.append(progress.remark)
    if figures.success is not None and not progress.remark:
        parts.append(f"success {figures.success:.2f}")
    if figures.mean_return is not None:
        parts.append(f"return {figures.mean_return:.2f}")
    if figures.trained_rate:
        parts.append(f"{figures.trained_rate:.0f} env steps/s")
    if figures.staleness is not None:
        parts.append(f"staleness {figures.staleness:.1f}")
    if figures.lanes and any(share.busy or share.idle for share in figures.lanes.values()):
        parts.append("idle " + "/".join(f"{100 * figures.lanes[lane].idle_share:.0f}" for lane in LANES) + " %")
    if figures.restarts:
        parts.append(f"restarts {sum(figures.restarts.values())}")
    if figures.eta is not None:
        parts.append(f"{clock(figures.eta)} to go")
    return ", ".join(parts)


def screen(figures: Figures) -> "RenderableType":
    """The board as a screen of about 20 lines."""
    from rich.panel import Panel

    title = f"[bold]D-VLA[/] {figures.run}  [yellow]{figures.stage}[/]  {clock(figures.elapsed)}"
    return Panel(_body(figures), title=title, title_align="left", subtitle="Ctrl-C stops and keeps a checkpoint")


def _body(figures: Figures) -> "Group":
    from rich.console import Group
    from rich.text import Text

    parts: list[RenderableType] = [_progress_line(figures)]
    if figures.version[0]:
        parts += [_numbers(figures), Text(""), _lanes(figures.lanes), _queues(figures)]
    for name, text in figures.evaluations.items():
        parts.append(Text.assemble((f"success {name} ", "bold"), text))
    if figures.missing:
        parts.append(Text("not answering: " + ", ".join(figures.missing), style="yellow"))
    if figures.restarts:
        parts.append(Text("restarts: " + ", ".join(f"{k} {v}" for k, v in figures.restarts.items()), style="yellow"))
    parts += [Text(note, style="dim", no_wrap=True, overflow="ellipsis") for note in figures.notes]
    return Group(*parts)


def _progress_line(figures: Figures) -> "Text":
    from rich.text import Text

    progress = figures.progress
    if not progress.total:
        return Text(progress.remark or figures.stage)
    share = min(1.0, progress.done / progress.total)
    text = Text(f"{figures.stage} ", style="bold")
    text.append("━" * round(share * BAR), "green").append("━" * (BAR - round(share * BAR)), "bright_black")
    text.append(f" {progress.done:.0f}/{progress.total:.0f} {progress.unit}")
    if progress.remark:
        text.append(f"  {progress.remark}")
    if figures.eta is not None:
        text.append(f"  {clock(figures.eta)} to go", "cyan")
    return text


def _numbers(figures: Figures) -> "Table":
    from rich.table import Table

    table = Table.grid(padding=(0, 3))
    stale = "-" if figures.staleness is None else f"{figures.staleness:.1f} (max {figures.staleness_max})"
    epoch, update = figures.version
    rows = [
        ("success", _number(figures.success, "{:.2f}"), "env steps/s trained", _number(figures.trained_rate, "{:.0f}")),
        ("return", _number(figures.mean_return, "{:.2f}"), "accepted", _number(figures.accepted_rate, "{:.0f}")),
        ("policy version", f"{epoch}-{update}", "staleness", stale),
    ]
    for name, value, other, measure in rows:
        table.add_row(f"[dim]{name}[/]", f"[bold]{value}[/]", f"[dim]{other}[/]", f"[bold]{measure}[/]")
    return table


def _lanes(lanes: Mapping[str, LaneShare]) -> "Table":
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    for lane in LANES:
        share = lanes.get(lane, LaneShare(0.0, {}))
        bar = Text("█" * round(share.busy * BAR), style=_COLOURS[lane])
        bar.append("░" * (BAR - round(share.busy * BAR)), style="bright_black")
        reasons = sorted(share.idle.items(), key=lambda item: -item[1])[:3]
        why = ", ".join(f"{reason} {100 * part:.0f}" for reason, part in reasons if part >= 0.005)
        table.add_row(lane, bar, f"{100 * share.busy:.0f} % busy", f"[dim]{'idle: ' + why if why else ''}[/]")
    return table


def _queues(figures: Figures) -> "Text":
    from rich.text import Text

    return Text("queues: " + ", ".join(f"{name} {value:.0f}" for name, value in figures.queues.items()), style="dim")


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def clock(seconds: float) -> str:
    """Seconds as m:ss, or h:mm:ss."""
    whole = max(0, int(seconds))
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}:{minutes:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"
