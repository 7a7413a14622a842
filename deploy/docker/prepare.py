"""What comes before training when the roles are containers. `dvla train` does all of this by itself.

    python prepare.py demos  RECIPE FOLDER     needs the simulator: the policy's inputs, demonstrations
    python prepare.py policy RECIPE FOLDER     needs torch: the policy to start from, the learner's settings

Writes policy-config.json, tasks.json, demos/, policy/ and learner.toml into the run's folder. What is there already
stays, so a container that is started again goes on where the last one ended.
"""

import json
import os
import sys
from pathlib import Path

from services.cli.recipe import Recipe, load_recipe
from services.common.errors import DvlaError


def prepare_demos(recipe: Recipe, folder: Path) -> None:
    """Ask the simulator for its tensors and record the recipe's demonstrations, if it wants any."""
    from services.cli.demos_command import write_demos
    from services.policies.config import PolicyConfig
    from services.sim.config import build_sim

    if not (folder / "policy-config.json").exists():
        sim = build_sim(recipe.sim, 1)
        config = PolicyConfig.for_sim(sim.spec, **recipe.policy)
        sim.close()
        write(folder / "tasks.json", json.dumps([task.id for task in sim.spec.tasks]))
        write(folder / "policy-config.json", json.dumps(config.to_json()))
    if recipe.demos.episodes and not recipe.sft.init and not (folder / "demos").exists():
        write_demos(recipe, folder / "demos")


def prepare_policy(recipe: Recipe, folder: Path) -> None:
    """Clone the demonstrations, or take random weights where there are none; write the learner's settings."""
    from services.cli.toml import dumps
    from services.cli.warmstart import sft

    demos = folder / "demos" if (folder / "demos").exists() else None
    if not recipe.sft.init and not (folder / "policy").exists():
        sft(recipe, demos, folder / "policy", folder / "policy-config.json")
    init = recipe.sft.init or str(folder / "policy")
    given = {"init": init, "mode": recipe.run.mode}
    # Those of a simulator of one's own are known to itself only, which the learner's image does not contain.
    tasks = list(recipe.tasks) or json.loads((folder / "tasks.json").read_text())
    write(folder / "learner.toml", dumps({"learner": {"tasks": tasks} | recipe.roles["learner"] | given}))


def write(path: Path, text: str) -> None:
    """Write whole or not at all."""
    partial = path.with_suffix(".partial")
    partial.write_text(text)
    os.replace(partial, path)


def main(what: str, recipe_file: str, folder_name: str) -> int:
    """Prepare one half; a problem is one line."""
    folder = Path(folder_name)
    folder.mkdir(parents=True, exist_ok=True)
    try:
        {"demos": prepare_demos, "policy": prepare_policy}[what](load_recipe(Path(recipe_file)), folder)
    except DvlaError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":  # demonstrations are recorded in spawned processes, which import this file
    sys.exit(main(*sys.argv[1:]))
