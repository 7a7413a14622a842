"""Writes the [learner] section of a recipe as the learner needs it: tasks, seeds and mode that other sections imply.

    python learner_settings.py RECIPE OUTPUT

`dvla train` does this by itself; here the learner is a container of its own and reads the written file.
"""

import os
import sys
from pathlib import Path

from services.cli.recipe import load_recipe
from services.cli.toml import dumps
from services.common.errors import DvlaError


def main(recipe_file: str, output: str) -> int:
    """Write the file whole or not at all."""
    try:
        recipe = load_recipe(Path(recipe_file))
    except DvlaError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    learner = {"tasks": list(recipe.tasks)} | recipe.roles["learner"] | {"mode": recipe.run.mode}
    partial = Path(f"{output}.partial")
    partial.write_text(dumps({"learner": learner}))
    os.replace(partial, output)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
