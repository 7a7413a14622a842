"""The stages of `dvla train`: demonstrations, warm start, evaluation, training, evaluation, videos. One page."""

import time
from collections.abc import Sequence
from pathlib import Path

from services.cli.balancing import Balancer
from services.cli.board import Board
from services.cli.control import Control
from services.cli.evaluate import run_evaluation
from services.cli.evaluation import brief, figures, held_out
from services.cli.policyfile import POLICY_FILE, check_fits
from services.cli.processes import Processes
from services.cli.recipe import Recipe
from services.cli.runfolder import RunFolder, read_json, write_json
from services.cli.samples import read_samples
from services.cli.session import Session
from services.cli.solved import Solved
from services.cli.summary import TRAINING, final_line, summarise
from services.cli.supervisor import RoleFailed
from services.common.bundle import Version
from services.common.spec import SimSpec

START_SECONDS = 300.0
"""Longest start of a role: ManiSkill on a busy machine."""
BEFORE, AFTER = "before", "after"


class Training:
    """One run; stages that are done already, before a resume, are left out."""

    def __init__(self, recipe: Recipe, run: RunFolder, session: Session, processes: Processes, board: Board) -> None:
        self.recipe, self.run, self.session, self.processes, self.board = recipe, run, session, processes, board
        roles = ("store", "weights", "learner", *processes.rollouts)
        self.addresses = processes.addresses(*roles)
        self.control = Control(run.name, processes.model, self.addresses)
        self.updates = recipe.learner.updates
        self.tasks: Sequence[str] = ()
        self.balancer = Balancer(processes, session)

    def execute(self) -> str:
        """All stages; returns the final line."""
        policy = self.warm_start()
        self.session.poll(self.run.name, self.addresses)
        if not self.run.read_state().get("trained"):
            self.session.start([self.processes.learner(policy)])
            self.evaluate_before(self.newest())
            self.train()
            self.run.update_state(trained=True)
        self.evaluate(AFTER, self.newest())
        self.record()
        self.session.until(self.complete, START_SECONDS, "closing the run")
        return self.result()

    def warm_start(self) -> Path:
        """The policy to start from: given, cloned from demonstrations, or with random weights."""
        recipe, run = self.recipe, self.run
        if recipe.makes_demos and not (run.policy / POLICY_FILE).exists() and not run.demos.exists():
            self.session.enter("demonstrations")
            self.job("demos", "--out", str(run.demos))
        self.start_workers()
        policy = Path(recipe.sft.init) if recipe.sft.init else run.policy
        if not (policy / POLICY_FILE).exists():
            self.session.enter("warm start")
            demos = recipe.sft.demos or (str(run.demos) if recipe.makes_demos else "")
            inputs = ["--demos", demos] if demos else ["--config", str(self.inferred_config())]
            self.job("sft", "--out", str(policy), *inputs)
        check_fits(policy, self.describe())
        return policy

    def start_workers(self) -> None:
        """Start all roles that need no policy, so that they are up when the warm start is made."""
        processes = self.processes
        processes.write_roles(self.recipe.tasks)
        if processes.balances:
            processes.write_sims()
        workers = [processes.store(), processes.weights(), *processes.rollout()]
        self.session.start([processes.redis(), *processes.sim(), *workers])

    def describe(self) -> SimSpec:
        """What the simulators offer, waiting until one is up."""
        self.session.enter("starting")
        sim = self.processes.first_sim
        spec = self.session.until(lambda: self.control.describe(sim), START_SECONDS, f"the start of {sim}")
        self.tasks = tuple(task.id for task in spec.tasks)
        self.processes.write_roles(self.tasks)
        return spec

    def inferred_config(self) -> Path:
        """The configuration of a policy that reads all that the simulator offers."""
        from services.policies.config import PolicyConfig

        write_json(self.run.policy_config, PolicyConfig.for_sim(self.describe(), **self.recipe.policy).to_json())
        self.session.enter("warm start")
        return self.run.policy_config

    def newest(self) -> Version:
        """The newest version of the policy, waiting for the first."""
        return self.session.until(self.control.newest_version, START_SECONDS, "the first version of the weights")

    def evaluate_before(self, version: Version) -> None:
        """Evaluate the warm start, unless the recipe leaves it out or a resumed run has moved on from it."""
        if self.recipe.eval.before and version.update == 0:
            self.evaluate(BEFORE, version)

    def evaluate(self, name: str, version: Version) -> None:
        """Measure one version on the held-out starts and keep the result."""
        if self.run.evaluation(name).exists():
            return
        self.session.enter(f"evaluation {name}", evaluation := f"{name}-{version}")
        episodes = held_out(self.tasks, self.recipe.eval.episodes, self.recipe.eval.seed)
        results = run_evaluation(self.session, self.control, evaluation, version, episodes)
        result = figures(version, results, self.board.elapsed(), self.session.counter("trained_steps"))
        write_json(self.run.evaluation(name), result)
        self.run.update_state(evaluations=self.run.evaluations() | {name: result["success_once"]})
        self.board.evaluated(name, brief(result))

    def train(self) -> None:
        """Wait until the learner has finished: all updates are made, or it was told that the time is over."""
        self.session.enter(TRAINING)
        deadline = time.monotonic() + (self.recipe.run.minutes * 60 or float("inf"))
        solved, told = Solved(self.recipe.run.solved, self.recipe.run.solved_episodes), False
        while True:
            self.session.wait(0.25)
            self.balancer.step()
            if self.session.finished("learner"):
                if told or self.session.until(self.updates_done, START_SECONDS, "the store") >= self.updates:
                    return
                self.session.again("learner")  # somebody else has stopped it
            reason = "time is over" if time.monotonic() > deadline else solved.look(self.session.latest)
            if reason and not told:
                self.session.tell(reason)
                told = self.session.until(self.stop_learner, START_SECONDS, "stopping the learner")

    def updates_done(self) -> int:
        """Updates that the store has on record."""
        return self.control.updates_done()

    def complete(self) -> bool:
        """Free what the run has left in the store; True when that is done."""
        self.control.complete_run()
        return True

    def stop_learner(self) -> bool:
        """Ask the learner to end; True when it has been told."""
        self.control.stop_learner()
        return True

    def record(self) -> None:
        """Record a few held-out episodes of the final policy; the workers leave the simulators to it."""
        if not self.recipe.eval.videos or any(self.run.videos.glob("*.mp4")):
            return
        self.session.enter("videos")
        self.session.stop(["learner", *self.balancer.processes.rollouts])
        sim, policy = self.processes.address(self.processes.first_sim), str(self.run.newest_policy())
        try:
            self.job("record", "--sim", sim, "--policy", policy, "--out", str(self.run.videos))
        except RoleFailed as error:  # a simulator that cannot draw is no reason to lose a trained policy's result
            self.session.tell(f"no videos: {error}")

    def job(self, command: str, *arguments: str) -> None:
        """Run one of the other commands of `dvla` on this run's recipe."""
        self.session.job(self.processes.job(command, command, str(self.run.recipe), *arguments))

    def result(self) -> str:
        """The final line, kept in the run's state."""
        before, after = read_json(self.run.evaluation(BEFORE)), read_json(self.run.evaluation(AFTER))
        summary = summarise(list(read_samples(self.run.samples)))
        text = final_line(before and before["success_once"], after["success_once"], after["episodes"], summary)
        self.run.update_state(stage="finished", result=text)
        return text
