"""ManiSkill on the CPU: one environment per slot (physx_cpu allows no more), stepped in turn in one process."""

import gc
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from services.common.errors import Unsupported
from services.common.spec import Array, FloatArray, IntArray, Observation
from services.sim.maniskill_common import (
    ManiSkillOptions,
    advance,
    decode_states,
    encode_state,
    make_env,
    observation_mode,
    observe,
    sim_spec,
    single_thread,
    state_vector,
)
from services.sim.maniskill_control import SetAction, lean_controller
from services.sim.vector import ControlStep, Start, VectorSim

BACKEND = "maniskill/physx_cpu"


class ManiSkillCpu(VectorSim):
    """`num_slots` single environments. An environment of a task is built when a slot first needs it (about 10 MB)."""

    def __init__(self, num_slots: int, options: ManiSkillOptions) -> None:
        single_thread()
        self.num_slots = num_slots
        self._options = options
        self._scratch = {task: _Slot(task, options) for task in options.tasks}
        self._slots: list[dict[str, _Slot]] = [{} for _ in range(num_slots)]
        self._task = [options.tasks[0]] * num_slots
        self.spec = sim_spec({task: s.env for task, s in self._scratch.items()}, options, "state", BACKEND)
        self._state_dim = {tensor.name: tensor.shape for tensor in self.spec.observation}.get("state", (0,))[0]
        for slot in self._slots:
            slot[options.tasks[0]] = _Slot(options.tasks[0], options)
        if options.exact_replay:
            gc.collect()
            gc.freeze()  # rebuilding a scene collects garbage: 30 ms instead of 300 without the frozen rest

    def make_start(self, task: str, seed: int) -> bytes:
        """Reset a scratch environment from the seed and write its state down."""
        self.spec.task(task)
        return self._scratch[task].make_start(seed)

    def reset(self, slots: IntArray, starts: Sequence[Start]) -> None:
        """Load the stored states."""
        for slot, start in zip(slots, starts, strict=True):
            envs = self._slots[slot]
            if start.task not in envs:
                envs[start.task] = _Slot(start.task, self._options)
            envs[start.task].load(start.state)
            self._task[slot] = start.task

    def step(self, slots: IntArray, actions: FloatArray) -> ControlStep:
        """Step the slots one after another."""
        n = len(slots)
        step = ControlStep(np.zeros(n, np.float32), np.zeros(n, np.bool_), np.zeros(n, np.bool_))
        for row, slot in enumerate(slots):
            step.reward[row], step.success[row], step.terminated[row] = self._at(slot).step(actions[row])
        return step

    def observe(self, slots: IntArray) -> Observation:
        """Render and read the slots one after another."""
        rows = [observe(self._at(slot).env, self._options) for slot in slots]
        out: Observation = {}
        for tensor in self.spec.observation:
            arrays = [row[tensor.name][0].numpy() for row in rows]
            if tensor.name == "state":
                arrays = [np.pad(array, (0, self._state_dim - len(array))) for array in arrays]
            out[tensor.name] = np.stack(arrays)
        return out

    def privileged_state(self, slots: IntArray) -> FloatArray:
        """The full state observation (float32 [n, S]) of slots that run one task, whatever the policy may see."""
        return np.stack([state_vector(self._at(slot).env)[0].numpy() for slot in slots])

    def render(self, slot: int) -> Array | None:
        """A 256 pixel frame from the task's own camera for humans."""
        if self._options.render == "none":
            return None
        frame: Array = self._at(slot).env.render_rgb_array()[0].numpy()
        return frame

    def close(self) -> None:
        """Close every environment."""
        for slot in (*self._scratch.values(), *(s for envs in self._slots for s in envs.values())):
            slot.env.close()
        self._scratch.clear()
        self._slots.clear()

    def _at(self, slot: int) -> "_Slot":
        return self._slots[slot][self._task[slot]]


class _Slot:
    """One environment of one task."""

    def __init__(self, task: str, options: ManiSkillOptions) -> None:
        self.task = task
        self.env: Any = make_env(task, options, 1, "physx_cpu")
        if self.env.reconfiguration_freq:
            raise Unsupported(f"task {task!r} rebuilds its scene at every reset, so its start states cannot be stored")
        self._options = options
        self._lean = self._lean_controller()

    def make_start(self, seed: int) -> bytes:
        """State bytes of the start that this seed gives."""
        with observation_mode(self.env, "none"):
            self.env.reset(seed=seed)
        return encode_state(self.task, self.env)

    def load(self, state: bytes) -> None:
        """Begin at a stored state."""
        states = decode_states(self.task, [state], self.env)
        if self._options.exact_replay:
            with observation_mode(self.env, "none"):
                self.env.reset(seed=0, options={"reconfigure": True})
            self._lean = self._lean_controller()  # the robot is a new one
        with observation_mode(self.env, "none"):
            self.env.reset(options={"reset_to_env_states": {"env_states": states}})

    def step(self, action: FloatArray) -> tuple[float, bool, bool]:
        """Reward, success and failure after one control step."""
        tensor = torch.from_numpy(action)[None]
        if self._lean:
            self._lean(action)
        reward, success, fail = advance(self.env, None if self._lean else tensor, tensor)
        return float(reward), bool(success), bool(fail)

    def _lean_controller(self) -> SetAction | None:
        return lean_controller(self.env) if self._options.lean_control else None
