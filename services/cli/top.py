"""`dvla top` and `dvla runs`: look at runs from outside."""

import time
from pathlib import Path

from services.cli.board import Board
from services.cli.evaluation import brief
from services.cli.interrupts import Interrupts
from services.cli.live import clock, open_view
from services.cli.runfolder import RunFolder, find_run, list_runs, read_json
from services.cli.samples import Sample, read_samples
from services.cli.status import RunClient
from services.common.errors import ConfigError

ASK_SECONDS = 1.0


def watch(name: str, out: Path) -> int:
    """Show a running run until it ends or Ctrl-C; the run does not notice."""
    run = find_run(name, out) if name else newest_running(out)
    live = read_json(run.live)
    if live is None or not run.is_running():
        raise ConfigError(
            f"run {run.name!r} is not running, or its roles are not up yet; `dvla runs list` shows its state"
        )
    board = Board(run.name, tuple(live["addresses"]), elapsed=last_time(run))
    client = RunClient(live["run"], live["addresses"])
    with Interrupts() as interrupts, open_view(board):
        while run.is_running() and not interrupts.count:
            show(run, board, client)
            interrupts.wait(ASK_SECONDS)
    client.close()
    return 0


def show(run: RunFolder, board: Board, client: RunClient) -> Sample:
    """One look: stage, evaluations and figures."""
    state = run.read_state()
    if state.get("stage", "") != board.stage:
        board.enter(state.get("stage", ""))
    for name in state.get("evaluations", {}):
        result = read_json(run.evaluation(name))
        if result:
            board.evaluated(name, brief(result))
    sample = client.ask(board.elapsed(), board.stage)
    board.add(sample)
    return sample


def newest_running(out: Path) -> RunFolder:
    """The run that was started last and is running."""
    for run in reversed(list_runs(out)):
        if run.is_running():
            return run
    raise ConfigError(f"no run in {str(out)!r} is running")


def last_time(run: RunFolder) -> float:
    """Seconds into the run."""
    return max((sample.t for sample in read_samples(run.samples)), default=0.0)


def run_table(out: Path) -> str:
    """All runs, one line each, oldest first."""
    rows = [_row(run) for run in list_runs(out)]
    if not rows:
        return f"no runs in {out}"
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    return "\n".join(
        "  ".join([*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[3]]) for row in rows
    )


def _row(run: RunFolder) -> tuple[str, str, str, str]:
    state = run.read_state()
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(run.recipe.stat().st_mtime))
    if state.get("result"):
        return run.name, when, "finished", state["result"]
    kind = "running" if run.is_running() else "interrupted"
    done = f"{state.get('stage', 'new')}, {clock(state.get('elapsed', 0.0))}" if kind == "interrupted" else ""
    return run.name, when, kind, done or state.get("stage", "")
