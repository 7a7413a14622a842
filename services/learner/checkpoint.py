"""A checkpoint: everything that the next learner needs to go on as if nothing had happened.

    policy.json, weights-*  the policy, as `dvla sft` writes it and `dvla eval` reads it
    average/                a policy of the averaged weights, if the run keeps an average
    optimiser.safetensors   Adam's moments
    random.safetensors      states of torch's generators
    learner.json            version, lineage, groups trained since the last confirmed ack, totals
    manifest.json           sizes and hashes of all files

safetensors and JSON only: reading a checkpoint runs no code.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from services.common.bundle import Version
from services.common.errors import InvalidInput
from services.learner.durable import parse_version, write_folder
from services.learner.lineage import Lineage
from services.learner.session import Consumed
from services.policies.base import Policy
from services.policies.checkpoint import load_checkpoint, save_checkpoint, save_weights

FORMAT = "dvla-learner-1"
_AVERAGE = "average"


@dataclass(frozen=True)
class LearnerState:
    """All state between two updates; nothing else changes it any more. Tensors are on the CPU.

    totals: sums over the run that outlive a restart, by name.
    """

    run: str
    version: Version
    policy: Policy
    optimiser: Mapping[str, Tensor]
    random: Mapping[str, Tensor]
    lineage: Lineage
    consumed: Consumed
    totals: Mapping[str, float]
    average: Mapping[str, Tensor] = field(default_factory=dict)


def write_checkpoint(root: Path, state: LearnerState) -> Path:
    """Write `root`/epoch-update; returns when it is durable."""

    def fill(folder: Path) -> None:
        save_checkpoint(folder, state.policy)
        if state.average:
            save_weights(folder / _AVERAGE, state.policy.spec.config, state.average)
        save_file(dict(state.optimiser), folder / "optimiser.safetensors")
        save_file(dict(state.random), folder / "random.safetensors")
        facts = {
            "format": FORMAT,
            "run": state.run,
            "version": str(state.version),
            "lineage": state.lineage.to_json(),
            "consumed": state.consumed.to_json(),
            "totals": dict(state.totals),
        }
        (folder / "learner.json").write_text(json.dumps(facts, indent=1) + "\n")

    return write_folder(root, state.version, fill)


def read_checkpoint(folder: Path) -> LearnerState:
    """Read a folder that `durable.newest_folder` found complete; raises InvalidInput if it is of another kind."""
    try:
        facts = json.loads((folder / "learner.json").read_text())
        version = parse_version(facts["version"])
        if facts["format"] != FORMAT or version is None:
            raise InvalidInput(f"{str(folder)!r} has format {facts['format']}; this program reads {FORMAT}")
        averaged = folder / _AVERAGE
        return LearnerState(
            run=facts["run"],
            version=version,
            policy=load_checkpoint(folder),
            optimiser=load_file(folder / "optimiser.safetensors"),
            random=load_file(folder / "random.safetensors"),
            lineage=Lineage.from_json(facts["lineage"]),
            consumed=Consumed.from_json(facts["consumed"]),
            totals=facts["totals"],
            average=load_checkpoint(averaged).trainable_state() if averaged.is_dir() else {},
        )
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise InvalidInput(f"{str(folder)!r} is no checkpoint of a learner: {error!r}") from error


def random_state(device: torch.device | str) -> dict[str, Tensor]:
    """States of the generators that training may draw from."""
    states = {"cpu": torch.get_rng_state()}
    return states | ({"cuda": torch.cuda.get_rng_state(device)} if torch.device(device).type == "cuda" else {})


def restore_random_state(states: Mapping[str, Tensor], device: torch.device | str) -> None:
    """The inverse of `random_state`."""
    torch.set_rng_state(states["cpu"])
    if torch.device(device).type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)
