"""`dvla sft` and `dvla record`: the commands that run a policy in this process. They import torch."""

import json
from dataclasses import asdict
from pathlib import Path

import torch

from services.cli.evaluation import held_out
from services.cli.progress import reporter
from services.cli.recipe import Recipe
from services.cli.recording import RecordingSession, record, write_video
from services.common.errors import ConfigError
from services.policies.checkpoint import load_checkpoint, save_checkpoint
from services.policies.config import PolicyConfig
from services.policies.demodata import Demos, load_demos
from services.policies.registry import build_policy
from services.policies.sft import SftConfig, train_sft

THREADS = 1


def sft(recipe: Recipe, demos: Path | None, out: Path, config: Path | None) -> None:
    """Write the policy to start from: cloned from demonstrations, or with random weights where there are none.

    config: the policy's configuration as JSON; without it, its inputs and actions are those of the demonstrations.
    """
    torch.set_num_threads(THREADS)
    data = load_demos([demos]) if demos else None
    policy = build_policy(_config(recipe, data, config), seed=recipe.seed_of(recipe.sft))
    if data is not None:
        settings = asdict(recipe.sft) | {"seed": recipe.seed_of(recipe.sft)}
        del settings["init"], settings["demos"]
        tell, steps = reporter(), recipe.sft.steps
        train_sft(
            policy, data, SftConfig(**settings), lambda step, loss: tell(step, steps, "steps", f"loss {loss:.3f}")
        )
    save_checkpoint(out, policy)


def record_videos(recipe: Recipe, sim: str, policy_folder: Path, out: Path, episodes: int) -> list[Path]:
    """Record held-out episodes in a running simulator; returns the files."""
    torch.set_num_threads(THREADS)
    policy = load_checkpoint(policy_folder).requires_grad_(False).eval()
    out.mkdir(parents=True, exist_ok=True)
    tell, paths = reporter(), []
    with RecordingSession(sim, policy) as session:
        tasks = [task.id for task in session.spec.tasks]
        for number, (task, seed) in enumerate(held_out(tasks, episodes, recipe.eval.seed), 1):
            episode = record(session, policy, task, seed)
            paths.append(out / f"{number:02}-{task}-{'success' if episode.success else 'failure'}.mp4")
            write_video(paths[-1], episode)
            tell(number, episodes, "videos", "")
    return paths


def _config(recipe: Recipe, demos: Demos | None, config: Path | None) -> PolicyConfig:
    if config is not None:
        return PolicyConfig.from_json(json.loads(config.read_text()))
    if demos is None:
        raise ConfigError("no demonstrations and no policy configuration; give --demos FOLDER or --config FILE")
    shapes = {name: array.shape[1:] for name, array in demos.observation.items()}
    cameras = [name.removeprefix("rgb/") for name in shapes if name.startswith("rgb/")]
    inferred = {"action_dim": demos.action.shape[1], "state_dim": shapes["state"][0] if "state" in shapes else 0}
    if cameras:
        inferred |= {"cameras": tuple(cameras), "image_size": shapes[f"rgb/{cameras[0]}"][0]}
    return recipe.policy_config(**inferred)
