"""A simulator that follows a script, for tests of everything around it: ends, resets, limits, masks.

Its observation is a set of counters, so a test sees at once which episode and step a frame belongs to.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from services.common.errors import ConfigError
from services.common.spec import ActionSpec, FloatArray, IntArray, Observation, SimSpec, TaskSpec, TensorSpec
from services.sim.vector import ControlStep, Start, VectorSim

if TYPE_CHECKING:
    from services.sim.config import SimConfig


@dataclass(frozen=True)
class Script:
    """What happens in one slot, every episode alike, counted in control steps from 1 (0: never).

    success_at: the task succeeds at this step (and not at the next). fall_at: the simulator ends the episode.
    """

    success_at: int = 0
    fall_at: int = 0

    @staticmethod
    def parse(text: str) -> "Script":
        """From "s3" (success at 3), "f5" (fall at 5), "s3f5" or "-" (neither)."""
        success, fall = 0, 0
        rest = text.replace("-", "")
        if "f" in rest:
            rest, _, number = rest.partition("f")
            fall = _number(number, text)
        if rest:
            head, _, number = rest.partition("s")
            if head:
                raise ConfigError(f"script {text!r} is not like s3, f5, s3f5 or -")
            success = _number(number, text)
        return Script(success, fall)


class ScriptedSim(VectorSim):
    """One script per slot. Observation "state": float32 [4] = slot, episode, step, start (its seed)."""

    def __init__(self, scripts: Sequence[Script], max_steps: int = 10) -> None:
        self.num_slots = len(scripts)
        self._scripts = tuple(scripts)
        self._episode = np.full(self.num_slots, -1)
        self._step = np.zeros(self.num_slots, np.int64)
        self._start = np.zeros(self.num_slots, np.int64)
        self.spec = SimSpec(
            observation=(TensorSpec("state", "float32", (4,)),),
            action=ActionSpec(2, (-1.0, -1.0), (1.0, 1.0), control_mode="none"),
            tasks=(TaskSpec("script", "follow the script", max_steps),),
            starts="state",
            backend="scripted/numpy",
            batched=True,
        )

    def make_start(self, task: str, seed: int) -> bytes:
        """8 bytes: the seed."""
        return int(seed).to_bytes(8, "little")

    def reset(self, slots: IntArray, starts: Sequence[Start]) -> None:
        """Begin the next episode of these slots."""
        self._episode[slots] += 1
        self._step[slots] = 0
        self._start[slots] = [int.from_bytes(start.state, "little") for start in starts]

    def step(self, slots: IntArray, actions: FloatArray) -> ControlStep:
        """Count; the reward of a step is its index."""
        self._step[slots] += 1
        steps = self._step[slots]
        success = np.array([self._scripts[slot].success_at for slot in slots]) == steps
        fall = np.array([self._scripts[slot].fall_at for slot in slots]) == steps
        return ControlStep(steps.astype(np.float32), success, fall)

    def observe(self, slots: IntArray) -> Observation:
        """The counters."""
        columns = (slots, self._episode[slots], self._step[slots], self._start[slots])
        return {"state": np.stack(columns, axis=1).astype(np.float32)}


def build_scripted(config: "SimConfig", num_slots: int) -> ScriptedSim:
    """From a role's settings. options: script, such as "s3,f5,-", repeated over the slots."""
    texts = str(config.options.get("script", "-")).split(",")
    scripts = [Script.parse(texts[slot % len(texts)]) for slot in range(num_slots)]
    return ScriptedSim(scripts, config.max_steps or 10)


def _number(text: str, whole: str) -> int:
    if not text.isdigit():
        raise ConfigError(f"script {whole!r} is not like s3, f5, s3f5 or -")
    return int(text)
