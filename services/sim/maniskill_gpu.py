"""ManiSkill on the GPU: all slots in one batched PhysX scene (physx_cuda). Written, not yet run on a GPU.

The batch has one slot more than is offered: the last one only makes start states, so that nobody's episode is
touched. A batched scene steps as a whole; slots left out of a step get their state back after it.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from services.common.errors import ConfigError, Unavailable, Unsupported
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
from services.sim.overflow import OverflowWatch
from services.sim.vector import ControlStep, Start, VectorSim

BACKEND = "maniskill/physx_cuda"


class ManiSkillGpu(VectorSim):
    """`num_slots` slots of one task in one scene."""

    def __init__(self, num_slots: int, options: ManiSkillOptions, device: str = "cuda") -> None:
        single_thread()
        if len(options.tasks) != 1:
            raise ConfigError(f"tasks = {list(options.tasks)}; a batched simulator runs one, start one per task")
        if options.exact_replay:
            raise ConfigError(
                "exact_replay rebuilds scenes of single slots; a batched scene cannot, use device = 'cpu'"
            )
        self.num_slots = num_slots
        self._options, self._task = options, options.tasks[0]
        self._scratch = num_slots
        self._env: Any = make_env(self._task, options, num_slots + 1, device.replace("cuda", "physx_cuda", 1))
        if self._env.reconfiguration_freq:
            raise Unsupported(f"task {self._task!r} rebuilds its scene at every reset: start states cannot be stored")
        self.spec = sim_spec({self._task: self._env}, options, "state", BACKEND)
        self._overflow = OverflowWatch()  # last, because it leads the process's output through a pipe
        # Kernels compile in the first step: here, not while a session waits.
        self.step(np.zeros(0, np.int64), np.zeros((0, self.spec.action.dim), np.float32))

    def make_start(self, task: str, seed: int) -> bytes:
        """Reset the spare slot from the seed and write its state down."""
        self.spec.task(task)
        spare = self._index([self._scratch])
        # One seed for every slot: the batch is drawn from the first one, the slot's own from its position.
        seeds = [seed] * (self.num_slots + 1)
        with observation_mode(self._env, "none"), self._others_kept(spare):
            self._env.reset(seed=seeds, options={"env_idx": spare})
        return encode_state(task, self._env, self._scratch)

    def reset(self, slots: IntArray, starts: Sequence[Start]) -> None:
        """Load the stored states into these slots."""
        order = np.argsort(slots)  # masked writes go through the slots in ascending order
        index = self._index(slots[order])
        states = decode_states(self._task, [starts[row].state for row in order], self._env)
        with observation_mode(self._env, "none"), self._others_kept(index):
            self._env.reset(options={"env_idx": index, "reset_to_env_states": {"env_states": states}})

    def step(self, slots: IntArray, actions: FloatArray) -> ControlStep:
        """Step the scene; all slots but these are put back to where they were."""
        index = self._index(slots)
        batch = torch.zeros((self.num_slots + 1, self.spec.action.dim), device=self._env.device)
        batch[index] = torch.from_numpy(actions).to(batch.device)
        held = self._index(sorted(set(range(self.num_slots)) - set(slots.tolist())))
        before = self._env.get_state_dict() if len(held) else {}
        reward, success, fail = advance(self._env, batch, batch)
        result = ControlStep(
            _numpy(reward[index], np.float32), _numpy(success[index], np.bool_), _numpy(fail[index], np.bool_)
        )
        if len(held):
            self._restore(before, held)
        self._check_overflow()
        return result

    def observe(self, slots: IntArray) -> Observation:
        """Render the batch, read these slots."""
        index = self._index(slots)
        return {name: tensor[index].cpu().numpy() for name, tensor in observe(self._env, self._options).items()}

    def privileged_state(self, slots: IntArray) -> FloatArray:
        """The full state observation (float32 [n, S]), whatever the policy may see."""
        state: FloatArray = state_vector(self._env)[self._index(slots)].cpu().numpy()
        return state

    def render(self, slot: int) -> Array | None:
        """A 256 pixel frame from the task's own camera for humans."""
        if self._options.render == "none":
            return None
        frame: Array = self._env.render_rgb_array()[slot].cpu().numpy()
        return frame

    def close(self) -> None:
        """Close the scene."""
        self._env.close()
        self._overflow.close()

    def _index(self, slots: Sequence[int] | IntArray) -> torch.Tensor:
        return torch.as_tensor(np.asarray(slots, np.int64), device=self._env.device)

    def _restore(self, state: dict[str, Any], index: torch.Tensor) -> None:
        self._env.set_state_dict(_rows({k: v for k, v in state.items() if k != "controller"}, index), index)
        self._restore_controllers(state, index)

    def _restore_controllers(self, state: dict[str, Any], index: torch.Tensor) -> None:
        """Targets that a controller accumulates (`use_target`) are state as well."""
        if "controller" not in state:
            return
        now = self._env.agent.get_controller_state()
        _copy_rows(state["controller"], now, index)
        self._env.agent.set_controller_state(now)

    def _others_kept(self, index: torch.Tensor) -> "_ControllersKept":
        others = sorted(set(range(self.num_slots + 1)) - set(index.tolist()))
        return _ControllersKept(self, self._index(others))

    def _check_overflow(self) -> None:
        if self._overflow.seen:
            raise Unavailable(
                f"PhysX ran out of GPU buffers and lost contacts ({self._overflow.seen}); raise the named capacity "
                "in gpu_memory, for example gpu_memory.max_rigid_contact_count = 2097152"
            )


class _ControllersKept:
    """A partial reset in mani_skill 3.0.1 resets the controllers of all slots; this keeps those of the others."""

    def __init__(self, sim: ManiSkillGpu, others: torch.Tensor) -> None:
        self._sim, self._others = sim, others

    def __enter__(self) -> None:
        state = self._sim._env.agent.get_controller_state()
        self._state = {"controller": _clone(state)} if state else {}

    def __exit__(self, *_: object) -> None:
        self._sim._restore_controllers(self._state, self._others)


def _rows(tree: dict[str, Any], index: torch.Tensor) -> dict[str, Any]:
    return {k: _rows(v, index) if isinstance(v, dict) else v[index] for k, v in tree.items()}


def _clone(tree: dict[str, Any]) -> dict[str, Any]:
    return {k: _clone(v) if isinstance(v, dict) else v.clone() for k, v in tree.items()}


def _copy_rows(source: dict[str, Any], target: dict[str, Any], index: torch.Tensor) -> None:
    for key, value in source.items():
        if isinstance(value, dict):
            _copy_rows(value, target[key], index)
        else:
            target[key][index] = value[index]


def _numpy(tensor: torch.Tensor, dtype: type[np.generic]) -> Any:
    return tensor.detach().cpu().numpy().astype(dtype)
