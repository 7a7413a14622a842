"""`dvla eval`: the roles without a learner, one evaluation, a table. Nothing is trained."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from dvla.v1 import store_pb2

from services.cli.board import Board
from services.cli.control import Control
from services.cli.evaluate import run_evaluation
from services.cli.evaluation import brief, figures, held_out, table
from services.cli.launch import create, launch
from services.cli.policyfile import check_fits, read_policy_config
from services.cli.processes import Processes
from services.cli.recipe import Recipe, load_recipe
from services.cli.runfolder import RunFolder, find_run, write_json
from services.cli.session import Session
from services.cli.train import START_SECONDS
from services.common.bundle import Version
from services.common.errors import ConfigError, NotFound

NAME = "eval"
NO_WARM_START = ("demos.episodes=0", "sft.init=", "sft.demos=")
"""How the policy came to be does not matter here."""


def evaluate_policy(
    what: str, recipe_path: Path | None, overrides: Iterable[str], json_file: Path | None, run: Mapping[str, Any]
) -> int:
    """Evaluate a run's newest policy, or the policy in a folder; returns the exit code."""
    policy, own_recipe = find_policy(what, Path(run.get("out") or "runs"))
    path = recipe_path or own_recipe
    if path is None:
        raise ConfigError(f"{what!r} belongs to no run, so its simulator is not known; give --recipe FILE")
    read_policy_config(policy)
    recipe = load_recipe(path, [*NO_WARM_START, *overrides], **run, name="")
    label = path.resolve().parent.name if path.name == "recipe.toml" else path.stem
    recipe = replace(recipe, name=f"eval-{label}")

    def work(recipe: Recipe, folder: RunFolder, session: Session, processes: Processes, board: Board) -> str:
        result = Evaluation(recipe, folder, session, processes, board).execute(policy)
        if json_file is not None:
            write_json(json_file, result)
        folder.update_state(stage="finished", result=f"success {brief(result)} of {policy}")
        return table(result)

    return launch(recipe, create(recipe), work)


def find_policy(what: str, out: Path) -> tuple[Path, Path | None]:
    """The folder of a policy, and the recipe of the run that it belongs to, if any."""
    given = Path(what)
    for folder in (given / "policy", given):
        if (folder / "policy.json").is_file() and not (given / "recipe.toml").is_file():
            recipes = [parent / "recipe.toml" for parent in folder.resolve().parents[:3]]
            return folder, next((recipe for recipe in recipes if recipe.is_file()), None)
    try:
        run = find_run(what, out)
    except NotFound as error:
        raise ConfigError(f"{what!r} is neither the folder of a policy nor a run; {error}") from error
    return run.newest_policy(), run.recipe


class Evaluation:
    """One evaluation from its recipe to its figures."""

    def __init__(self, recipe: Recipe, run: RunFolder, session: Session, processes: Processes, board: Board) -> None:
        self.recipe, self.run, self.session, self.processes, self.board = recipe, run, session, processes, board
        self.addresses = processes.addresses("store", "weights", *processes.rollouts)
        self.control = Control(run.name, processes.model, self.addresses)

    def execute(self, policy: Path) -> dict[str, Any]:
        """Start everything, evaluate, stop; returns the figures."""
        self.session.enter("starting")
        processes, sim = self.processes, self.processes.first_sim
        processes.write_roles(self.recipe.tasks)
        self.session.start([processes.redis(), *processes.sim()])
        spec = self.session.until(lambda: self.control.describe(sim), START_SECONDS, f"the start of {sim}")
        check_fits(policy, spec)
        self.session.start([processes.store(), processes.weights(), *processes.rollout()])
        self.session.poll(self.run.name, self.addresses)
        tasks = [task.id for task in spec.tasks]
        version = self.publish(policy, tasks)
        self.session.enter("evaluation")
        episodes = held_out(tasks, self.recipe.eval.episodes, self.recipe.eval.seed)
        results = run_evaluation(self.session, self.control, NAME, version, episodes)
        result = figures(version, results, self.board.elapsed()) | {"policy": str(policy.resolve())}
        write_json(self.run.evaluation(NAME), result)
        self.run.update_state(evaluations={NAME: result["success_once"]})
        self.record(policy)
        return result

    def publish(self, policy: Path, tasks: list[str]) -> Version:
        """Open a run that grants no training jobs and publish the policy for it."""
        spec = store_pb2.RunSpec(
            run=self.run.name,
            model=self.processes.model,
            group_size=1,
            groups_per_update=1,
            total_updates=1,
            max_attempts=self.recipe.learner.max_attempts,
            grant_seconds=self.recipe.learner.grant_seconds,
            episode_bytes=self.recipe.learner.episode_bytes,
            on_failure="zero",
            score="success",
            observation=read_policy_config(policy).observation,
            tasks=[store_pb2.TaskShare(task=task, weight=1.0) for task in tasks],
        )
        # All of its one update are done already, so no job for training is ever granted.
        epoch = self.session.until(lambda: self.control.open_run(spec, update=1), START_SECONDS, "the store")
        from services.cli.publish import publish_policy  # torch takes seconds; the processes start meanwhile

        version = Version(epoch, 1)
        publish_policy(policy, self.processes.address("weights"), self.processes.model, version)
        return version

    def record(self, policy: Path) -> None:
        """Record videos, if the recipe asks for some."""
        if not self.recipe.eval.videos:
            return
        self.session.enter("videos")
        self.session.stop(self.processes.rollouts)
        sim = self.processes.address(self.processes.first_sim)
        arguments = ("--sim", sim, "--policy", str(policy), "--out", str(self.run.videos))
        self.session.job(self.processes.job("record", "record", str(self.run.recipe), *arguments))
