"""`dvla demos`: demonstrations of all tasks of a recipe, in a folder that is complete or not there."""

import os
import shutil
from functools import partial
from pathlib import Path

from services.cli.progress import Report, reporter
from services.cli.recipe import Recipe
from services.common.errors import ConfigError
from services.sim.demos import DemoPlan, Episode, generate


def write_demos(recipe: Recipe, out: Path) -> list[Episode]:
    """Record the demonstrations; prints how often the expert succeeded."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{str(out)!r} is not empty; choose another --out, or remove it first")
    tasks = recipe.tasks
    if not recipe.demos.episodes or not tasks:
        raise ConfigError("nothing to demonstrate: [demos] episodes = 0, or the simulator has no scripted expert")
    processes = min(recipe.run.sims, os.cpu_count() or 1)
    aside = out.with_name(out.name + ".partial")
    shutil.rmtree(aside, ignore_errors=True)
    tell, episodes, total = reporter(), list[Episode](), recipe.demos.episodes
    for index, task in enumerate(tasks):
        share = total // len(tasks) + (index < total % len(tasks))
        if share:
            progress = partial(_tell, tell, len(episodes), total)
            episodes += generate(recipe.sim, _plan(recipe, task, share), aside, processes, progress)
    if out.exists():
        out.rmdir()
    aside.rename(out)
    wins = sum(episode.success for episode in episodes)
    print(f"{len(episodes)} demonstrations, {wins} succeed ({100 * wins / max(1, len(episodes)):.0f} %): {out}")
    return episodes


def _plan(recipe: Recipe, task: str, episodes: int) -> DemoPlan:
    demos = recipe.demos
    seed = recipe.seed_of(demos)
    return DemoPlan(task, episodes, seed, bias=demos.bias, noise=demos.noise, keep_failures=demos.keep_failures)


def _tell(tell: Report, before: int, total: int, done: int, _: int) -> None:
    tell(before + done, total, "demonstrations", "")
