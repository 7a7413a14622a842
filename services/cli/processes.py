"""Which processes make up a run on one machine, and how each is started: addresses, folders, threads, order of ends."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from services.cli.child import ChildSpec, role_command
from services.cli.recipe import MODEL, Recipe, Table
from services.cli.runfolder import RunFolder
from services.cli.toml import dumps
from services.common.redis_server import RedisServer

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "LP_NUM_THREADS")
"""One thread per process unless the role's section says more: roles would take each other's cores otherwise."""
LEARNER_GRACE_SECONDS = 60.0
"""A learner finishes its update and writes a checkpoint when it is asked to stop."""


@dataclass(frozen=True)
class Processes:
    """The processes of one run. sockets: the private folder of their Unix sockets."""

    recipe: Recipe
    run: RunFolder
    sockets: Path

    @property
    def sims(self) -> tuple[str, ...]:
        """Names of the simulators to start; none if they run elsewhere."""
        return () if self.recipe.run.sim_address else tuple(f"sim-{n}" for n in range(self.recipe.run.sims))

    @property
    def first_sim(self) -> str:
        """Name of a simulator to ask and to record with."""
        return (self.sims or ("sim",))[0]

    @property
    def rollouts(self) -> tuple[str, ...]:
        """Names of the rollout workers."""
        return tuple(f"rollout-{n}" for n in range(self.recipe.run.rollouts))

    @property
    def model(self) -> str:
        """Name of the policy on the weight plane."""
        return str(self.recipe.roles["learner"].get("model", MODEL))

    def address(self, child: str) -> str:
        """Where a child serves."""
        if child == "sim" or (child.startswith("sim-") and self.recipe.run.sim_address):
            return self.recipe.run.sim_address
        return f"unix:{self.sockets / child}.sock"

    def addresses(self, *children: str) -> dict[str, str]:
        """Addresses by child; a simulator that runs elsewhere is called "sim"."""
        sims = self.sims or ("sim",)
        return {child: self.address(child) for child in (*children, *sims)}

    def redis(self) -> ChildSpec:
        """The private Redis-protocol server; its data lies in the run folder."""
        folder = self.run.path / "redis"
        folder.mkdir(exist_ok=True)
        server = RedisServer(self.sockets, options={"dir": str(folder), "logfile": ""})
        return ChildSpec("redis", tuple(server.command()), self.run.log("redis"), rank=4)

    def sim(self) -> list[ChildSpec]:
        """The simulators."""
        return [self._role("sim", name, rank=3) for name in self.sims]

    def store(self) -> ChildSpec:
        """The rollout store."""
        url = RedisServer(self.sockets).url
        return self._role("store", "store", "--redis", url, rank=3)

    def weights(self) -> ChildSpec:
        """The weights server; the newest version survives in the run folder."""
        folder = self.run.path / "weights"
        folder.mkdir(exist_ok=True)
        return self._role("weights", "weights", "--durable-folder", str(folder), rank=3)

    def learner(self, init: Path) -> ChildSpec:
        """The learner; `init` is the policy to start from."""
        arguments = ["--run", self.run.name, "--init", str(init), "--output", str(self.run.path)]
        arguments += ["--store", self.address("store"), "--weights", self.address("weights"), "--no-close-run"]
        return self._role(
            "learner", "learner", *arguments, rank=0, may_finish=True, grace_seconds=LEARNER_GRACE_SECONDS
        )

    def rollout(self) -> list[ChildSpec]:
        """The rollout workers."""
        arguments = ["--run", self.run.name, "--store", self.address("store"), "--weights", self.address("weights")]
        if self.balances:
            arguments += ["--sims", f"file:{self.sims_file}"]
        else:
            for name in self.sims or ("sim",):
                arguments += ["--sims", self.address(name)]
        return [self._role("rollout", name, *arguments, rank=1) for name in self.rollouts]

    def job(self, name: str, *arguments: str, threads: int = 1) -> ChildSpec:
        """A command of `dvla` that runs to its end."""
        return ChildSpec(name, role_command(*arguments), self.run.log(name), threads_environment(threads))

    @property
    def balances(self) -> bool:
        """Whether simulators and workers come and go."""
        return self.recipe.run.balance and bool(self.sims)

    def sized(self, sims: int, rollouts: int) -> "Processes":
        """The same run with other numbers of simulators and workers."""
        return replace(self, recipe=replace(self.recipe, run=replace(self.recipe.run, sims=sims, rollouts=rollouts)))

    @property
    def sims_file(self) -> Path:
        """Addresses of the simulators, which workers look up again and again."""
        return self.run.path / "sims.txt"

    def write_sims(self) -> None:
        """List the simulators, whole or not at all."""
        partial = self.sims_file.with_suffix(".partial")
        partial.write_text("\n".join(self.address(name) for name in self.sims) + "\n")
        partial.replace(self.sims_file)

    def write_roles(self, tasks: Sequence[str]) -> None:
        """The roles' sections with what the launcher adds, as the file that they read."""
        sections: dict[str, Table] = {role: dict(table) for role, table in self.recipe.roles.items()}
        known: Table = {"tasks": list(tasks)} if tasks else {}
        known |= self.recipe.demonstrations(str(self.run.demos) if self.recipe.makes_demos else "")
        sections["learner"] = known | sections["learner"] | {"mode": self.recipe.run.mode}
        self.roles_file.write_text(dumps(sections))

    @property
    def roles_file(self) -> Path:
        """The recipe that the roles read."""
        return self.run.path / "roles.toml"

    def _role(
        self,
        role: str,
        name: str,
        *arguments: str,
        rank: int,
        may_finish: bool = False,
        grace_seconds: float = 10.0,
    ) -> ChildSpec:
        listen = ("--listen", self.address(name), "--name", name)
        return ChildSpec(
            name,
            role_command(role, "--recipe", str(self.roles_file), *listen, *arguments),
            self.run.log(name),
            threads_environment(int(self.recipe.roles[role].get("threads", 1))),
            may_finish=may_finish,
            rank=rank,
            grace_seconds=grace_seconds,
        )


def threads_environment(threads: int) -> dict[str, str]:
    """Thread counts of the numeric libraries; what the user has set stays."""
    return {name: os.environ.get(name, str(threads)) for name in THREAD_VARIABLES}
