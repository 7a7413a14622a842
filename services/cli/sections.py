"""The sections of a recipe that belong to the launcher, each a frozen dataclass. The roles own the others."""

import re
from dataclasses import dataclass
from typing import Literal, NoReturn

from services.common.errors import ConfigError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True, kw_only=True)
class RunSection:
    """[run]: what is started on this machine."""

    name: str = ""
    """Run name; made from the recipe's name and the time if empty."""
    out: str = "runs"
    """Folder of all run folders."""
    seed: int = 0
    """Seed of everything that the other sections give no seed for."""
    mode: Literal["async", "sync"] = "async"
    """"async": simulation, inference and training at the same time. "sync": strictly in turn."""
    sims: int = 2
    """Simulator processes."""
    rollouts: int = 1
    """Rollout workers."""
    balance: bool = False
    """Whether simulators and rollout workers are added and stopped during training, one at a time, by what the lanes
    wait for; a change that makes training slower is taken back."""
    most_sims: int = 0
    """Simulators that `balance` may run at most; 0 for as many as there are cores."""
    most_rollouts: int = 0
    """Rollout workers that `balance` may run at most; 0 for as many as there are cores."""
    sim: str = ""
    """A simulator of your own in place of the built-in one: module:Class, or the address of one that runs."""
    minutes: float = 0.0
    """Training stops after so many minutes with a checkpoint and its evaluation; 0 for no limit."""
    solved: float = 0.99
    """Training also stops when this share of the latest `solved_episodes` succeeded: groups without a failure carry no
    signal, so nothing is left to learn; 0 for never."""
    solved_episodes: int = 256
    """Training episodes that `solved` looks at."""
    restart_limit: int = 5
    """Quick failures in a row after which a role is given up."""

    def __post_init__(self) -> None:
        if self.name and not _NAME.fullmatch(self.name):
            _refuse("name", self.name, "up to 64 letters, digits, '.', '_' and '-', the first a letter or digit")
        for name, low in (
            ("seed", 0),
            ("sims", 1),
            ("rollouts", 1),
            ("most_sims", 0),
            ("most_rollouts", 0),
            ("minutes", 0),
            ("restart_limit", 1),
            ("solved_episodes", 1),
        ):
            if getattr(self, name) < low:
                _refuse(name, getattr(self, name), f"{low} or more")
        if not 0 <= self.solved <= 1:
            _refuse("solved", self.solved, "0 to 1")
        if self.sim and not self.sim_address and ":" not in self.sim:
            _refuse("sim", self.sim, "module:Class, unix:/path or host:port")

    @property
    def sim_address(self) -> str:
        """The address of a simulator that runs already, or empty."""
        port = self.sim.rpartition(":")[2]
        return self.sim if self.sim.startswith(("unix:", "dns:")) or port.isdigit() else ""

    @property
    def sim_class(self) -> str:
        """module:Class of a simulator to start, or empty."""
        return "" if self.sim_address else self.sim


@dataclass(frozen=True, kw_only=True)
class DemosSection:
    """[demos]: demonstrations that a scripted expert gives before training."""

    episodes: int = 300
    """Demonstrations in all; 0 makes none. Without any, training starts from random weights. A simulator of your own
    (run.sim) has no scripted expert, so none are made for it: see sft.demos and sft.init."""
    bias: float = 0.0
    """How wrong the expert is, on purpose: 0 is competent, 1 misses by a fixed offset."""
    noise: float = 0.1
    """Standard deviation of the noise on executed actions, in action units; labels stay clean."""
    keep_failures: bool = True
    """Keep failed episodes too: dropping them would take the bias out."""
    seed: int | None = None
    """Base of the start states; run.seed if not given."""

    def __post_init__(self) -> None:
        for name in ("episodes", "noise"):
            if getattr(self, name) < 0:
                _refuse(name, getattr(self, name), "0 or more")


@dataclass(frozen=True, kw_only=True)
class SftSection:
    """[sft]: the warm start by imitation; the fields are those of services.policies.sft.SftConfig, and `init`."""

    init: str = ""
    """Folder of a policy to start from in place of a warm start."""
    demos: str = ""
    """Folder with demonstrations of your own, in place of those of [demos]."""
    steps: int = 1000
    """Optimiser steps."""
    batch: int = 128
    """Chunks a step."""
    lr: float = 1e-3
    """Peak learning rate."""
    weight_decay: float = 1e-4
    """AdamW's weight decay."""
    clip: float = 1.0
    """Largest gradient norm."""
    seed: int | None = None
    """Seed of batches and noise; run.seed if not given."""

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "lr", "clip"):
            if not getattr(self, name) > 0:
                _refuse(name, getattr(self, name), "more than 0")
        if self.weight_decay < 0:
            _refuse("weight_decay", self.weight_decay, "0 or more")


@dataclass(frozen=True, kw_only=True)
class EvalSection:
    """[eval]: the held-out evaluations before and after training, and the videos."""

    episodes: int = 300
    """Episodes, each from its own held-out start, run to the horizon."""
    before: bool = True
    """Evaluate the warm start, too."""
    seed: int = 0
    """Base of the held-out starts: the same for every run unless changed, so that runs can be compared."""
    videos: int = 3
    """Held-out episodes recorded at the end; 0 for none."""

    def __post_init__(self) -> None:
        for name, low in (("episodes", 1), ("seed", 0), ("videos", 0)):
            if getattr(self, name) < low:
                _refuse(name, getattr(self, name), f"{low} or more")


def _refuse(name: str, value: object, expected: str) -> NoReturn:
    raise ConfigError(f"{name} = {value!r}; expected {expected}")
