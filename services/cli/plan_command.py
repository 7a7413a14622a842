"""`dvla plan`: reads a profile and an inventory, prints the plan, writes it where it was asked to."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from services.cli.planning.inventory import read_inventory
from services.cli.planning.profile import read_profile
from services.cli.planning.search import Plan, find_plan
from services.cli.planning.wording import describe
from services.cli.planning.writing import write_plan


def make_plan(profile_path: Path, inventory_path: Path, write: Sequence[Path], json_file: Path | None) -> None:
    """Print the plan; raises ConfigError for bad input."""
    profile, inventory = read_profile(profile_path), read_inventory(inventory_path)
    plan = find_plan(profile, inventory)
    print("\n".join(describe(profile, plan)))
    for path in write:
        write_plan(plan, path)
        print(f"wrote {path}")
    if json_file is not None:
        json_file.write_text(json.dumps(_as_json(plan, profile.emulated), indent=1) + "\n")


def _as_json(plan: Plan, emulated: bool) -> dict[str, object]:
    best = plan.best
    return {
        "steps_per_second": best.rate,
        "emulated": emulated,
        "style": best.style,
        "envs_per_device": best.envs,
        "nodes": [asdict(use) for use in best.uses],
        "relay": best.relay,
        "bottleneck": best.bottleneck,
        "bounds": {part: rate for part, rate in best.bounds.items() if rate != float("inf")},
        "neighbours": [
            {"change": n.change, "steps_per_second": n.prediction.rate, "loss": plan.loss(n)} for n in plan.neighbours
        ],
    }
