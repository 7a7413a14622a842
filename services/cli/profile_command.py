"""`dvla profile`: measures a recipe's parts on this machine and writes them for `dvla plan`."""

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from services.cli.recipe import Recipe
from services.common.errors import ConfigError


def write_profile(recipe: Recipe, path: Path, quick: bool, envs: Sequence[int]) -> None:
    """Measure and write; raises ConfigError where the recipe's simulator cannot be built here."""
    if recipe.run.sim_address:
        raise ConfigError(
            f"run.sim = {recipe.run.sim!r} is an address; profile needs a simulator that it can build: give "
            "module:Class or a built-in one"
        )
    if any(count < 1 for count in envs):
        raise ConfigError(f"envs {list(envs)}; expected numbers of 1 or more")
    from services.cli.profiling import Effort, measure

    effort = Effort.quick() if quick else Effort.full()
    if envs:
        effort = replace(effort, envs=tuple(sorted(set(envs))))
    profile = measure(recipe, effort, lambda text: print(text, file=sys.stderr, flush=True))
    path.write_text(json.dumps(profile, indent=1) + "\n")
    print(path)
