"""Around a run: its folder, its lock, sockets, view and supervision, and what is printed at its end."""

import sys
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from services.cli.board import Board
from services.cli.interrupts import Interrupted, Interrupts
from services.cli.live import open_view
from services.cli.processes import Processes
from services.cli.recipe import Recipe, load_recipe
from services.cli.report import write_report
from services.cli.runfolder import RunFolder, find_run
from services.cli.samples import read_samples
from services.cli.session import Session
from services.cli.sockets import socket_folder
from services.cli.supervisor import RestartPolicy, RoleFailed
from services.cli.toml import dumps
from services.cli.train import Training
from services.common.errors import ConfigError

Work = Callable[[Recipe, RunFolder, Session, Processes, Board], str]


def train(recipe_path: Path | None, resume: str, overrides: Iterable[str], **run: Any) -> int:
    """Start or resume a run; returns the exit code."""
    if resume:
        recipe, folder = resumed(resume, recipe_path, overrides, run)
    elif recipe_path is None:
        raise ConfigError("which recipe? Try `dvla train recipes/pushcube.toml`, or --resume RUN")
    else:
        recipe = load_recipe(recipe_path, overrides, **run)
        folder = create(recipe)
    return launch(recipe, folder, lambda *parts: Training(*parts).execute())


def create(recipe: Recipe) -> RunFolder:
    """A new run folder with the frozen recipe."""
    name = recipe.run.name or f"{recipe.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    folder = RunFolder(Path(recipe.run.out).resolve() / name)
    folder.create()
    folder.recipe.write_text(dumps(recipe.sections()))
    folder.update_state(stage="new", recipe=recipe.name)
    return folder


def resumed(
    name: str, recipe_path: Path | None, overrides: Iterable[str], run: dict[str, Any]
) -> tuple[Recipe, RunFolder]:
    """A run to go on with, by its own frozen recipe."""
    out = Path(run.get("out") or "runs")
    given = [key for key, value in run.items() if value is not None and key != "out"]
    if recipe_path is not None or list(overrides) or given:
        raise ConfigError(
            f"--resume {name} goes on with the recipe frozen in the run; give no recipe, --set or {given}"
        )
    folder = find_run(name, out)
    state = folder.read_state()
    if state.get("result"):
        raise ConfigError(f"run {folder.name!r} is finished ({state['result']}); start a new one with its recipe.toml")
    return load_recipe(folder.recipe), folder


def launch(recipe: Recipe, folder: RunFolder, work: Work) -> int:
    """Run `work` with everything around it; prints the end of it and returns the exit code."""
    elapsed = max((sample.t for sample in read_samples(folder.samples)), default=0.0)
    line = ""
    with ExitStack() as stack:
        stack.enter_context(folder.lock())
        interrupts = stack.enter_context(Interrupts())
        processes = Processes(recipe, folder, stack.enter_context(socket_folder()))
        board = Board(folder.name, elapsed=elapsed)
        print(f"run {folder.name}: {folder.path}", flush=True)
        try:
            with open_view(board), Session(folder, board, interrupts, policy_of(recipe)) as session:
                line = work(recipe, folder, session, processes, board)
        except Interrupted:
            print(f"interrupted; go on with: dvla train --resume {folder.name}", file=sys.stderr, flush=True)
            return Interrupted.exit_code
        except RoleFailed as error:
            for text in error.log:
                print(f"  {text}", file=sys.stderr)
            raise
        finally:
            folder.update_state(elapsed=board.elapsed())
    return finish(folder, line)


def policy_of(recipe: Recipe) -> RestartPolicy:
    """How often a role is started again."""
    return RestartPolicy(limit=recipe.run.restart_limit)


def finish(folder: RunFolder, line: str) -> int:
    """Write the report and print where it is; the figures are the last line."""
    try:
        print(f"report: {write_report(folder)}")
    except (OSError, ImportError) as error:
        print(f"no report: {error}", file=sys.stderr)
    print(line, flush=True)
    return 0
