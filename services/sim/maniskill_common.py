"""What the CPU and GPU backends of ManiSkill share: options, tasks, building, observing, start states, stepping.

Facts about mani_skill 3.0.1 that this relies on:
- `BaseEnv.step` is: `_step_action`, count, `get_info` (which evaluates success), `get_obs`, `get_reward`. Of these
  only `get_obs` renders; rewards of all listed tasks come from poses and info, not from the observation. `advance`
  leaves `get_obs` out and hands the reward a stand-in that raises if some task does read it.
- A start state is the scene's state (all non-static actors and articulations). Controllers are reset from it.
- Without a Vulkan device even state observations fail, because materials are made through the renderer.
"""

import importlib
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NoReturn

import gymnasium
import mani_skill.envs  # noqa: F401 - registers the tasks
import numpy as np
import safetensors.numpy
import torch
from mani_skill.envs.utils.observations import parse_obs_mode_to_struct
from mani_skill.utils import assets, common
from mani_skill.utils.registration import REGISTERED_ENVS
from safetensors import SafetensorError

from services.common.errors import ConfigError, InvalidInput, Unsupported
from services.common.spec import ActionSpec, Array, SimSpec, Starts, TaskSpec, TensorSpec

INSTRUCTIONS = {
    "PushCube-v1": "push the blue cube into the target circle",
    "PullCube-v1": "pull the blue cube back into the target circle",
    "PickCube-v1": "pick up the red cube and move it to the green goal",
    "StackCube-v1": "stack the red cube on the green cube",
    "LiftPegUpright-v1": "lift the peg and stand it upright",
    "PokeCube-v1": "poke the cube with the peg",
    "PlaceSphere-v1": "put the blue sphere into the bin",
    "RollBall-v1": "roll the ball to the target",
    "PullCubeTool-v1": "pull the cube closer with the tool",
    "PushT-v1": "push the T onto the outline",
    "StackPyramid-v1": "stack the cubes into a pyramid",
    "PickSingleYCB-v1": "pick up the object and move it to the goal",
    "PegInsertionSide-v1": "insert the peg into the hole of the box",
    "PlugCharger-v1": "plug the charger into the receptacle",
    "TurnFaucet-v1": "turn the faucet on",
    "PutCarrotOnPlateInScene-v1": "put the carrot on the plate",
    "PutSpoonOnTableClothInScene-v1": "put the spoon on the towel",
    "StackGreenCubeOnYellowCubeBakedTexInScene-v1": "stack the green block on the yellow block",
    "PutEggplantInBasketScene-v1": "put the eggplant into the yellow basket",
}
"""What the policy reads. A task that is not listed gets its id in words, or `instructions` of the options."""

OBSERVATION_MODES = ("state", "rgb", "rgb+state", "rgb+proprio")
REWARD_MODES = ("sparse", "dense", "normalized_dense")


@dataclass(frozen=True)
class ManiSkillOptions:
    """How to build ManiSkill environments.

    observation: "state" (float32 vector with object poses), "rgb" (one uint8 image per camera), "rgb+state" (both),
        "rgb+proprio" (images, and as "state" only what the robot knows of itself).
    max_steps: step limit of an episode; 0 takes the task's own.
    render: "auto" (the GPU if there is one), "cpu", "gpu" or "none" (no images and no videos).
    modules: Python modules to import first, which register tasks of their own.
    lean_control: replace end-effector controllers by an equal, faster one (CPU only).
    exact_replay: rebuild the scene before every episode (CPU only; about 30 ms). Start states are exact in any case,
        but PhysX numbers contacts by what happened before in the same scene, so without this two equal episodes
        can differ from their first contact on.
    gpu_memory: fields of ManiSkill's GPUMemoryConfig with their values (GPU only).
    """

    tasks: tuple[str, ...] = ("PushCube-v1",)
    observation: str = "state"
    image_size: int = 64
    control_mode: str = "pd_ee_delta_pos"
    reward: str = "sparse"
    max_steps: int = 0
    shader: str = "minimal"
    render: str = "auto"
    instructions: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    lean_control: bool = True
    exact_replay: bool = False
    gpu_memory: tuple[tuple[str, int], ...] = ()

    def __post_init__(self) -> None:
        if self.observation not in OBSERVATION_MODES:
            raise ConfigError(f"observation = {self.observation!r}; expected {', '.join(OBSERVATION_MODES)}")
        if self.reward not in REWARD_MODES:
            raise ConfigError(f"reward = {self.reward!r}; expected {', '.join(REWARD_MODES)}")
        if not self.tasks or len(set(self.tasks)) != len(self.tasks):
            raise ConfigError(f"tasks = {list(self.tasks)}; expected one or more different task ids")
        if self.instructions and len(self.instructions) != len(self.tasks):
            raise ConfigError(f"{len(self.instructions)} instructions for {len(self.tasks)} tasks; give one per task")
        if self.observation != "state" and self.image_size < 16:
            raise ConfigError(f"image_size = {self.image_size}; expected 16 or more pixels")
        if self.observation != "state" and self.render == "none":
            raise ConfigError(f"observation = {self.observation!r} needs a renderer; render = 'none' has none")


def single_thread() -> None:
    """One thread for torch and for the software renderer: processes are the unit of parallelism, not threads."""
    os.environ.setdefault("LP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)


def make_env(task: str, options: ManiSkillOptions, num_envs: int, sim_backend: str) -> Any:
    """A bare ManiSkill environment. Errors say what to change, in one line."""
    for module in options.modules:
        importlib.import_module(module)
    if task not in REGISTERED_ENVS:
        raise ConfigError(f"unknown ManiSkill task {task!r}; known ones include {', '.join(sorted(INSTRUCTIONS)[:6])}")
    _require_assets(task)
    images = options.observation != "state"
    cameras = {"width": options.image_size, "height": options.image_size, "shader_pack": options.shader}
    try:
        return gymnasium.make(
            task,
            num_envs=num_envs,
            obs_mode="rgb+state" if images else "state",
            control_mode=options.control_mode,
            reward_mode=options.reward,
            sim_backend=sim_backend,
            render_backend=_render_backend(options.render),
            sensor_configs=cameras if images else {},
            sim_config={"gpu_memory_config": dict(options.gpu_memory)},
            human_render_camera_configs={"width": 256, "height": 256, "shader_pack": "default"},
        ).unwrapped
    except (RuntimeError, AssertionError, NotImplementedError, KeyError) as error:
        _explain(error, task, options)


def action_spec(env: Any) -> ActionSpec:
    """Limits of one control step."""
    space = env.single_action_space
    if not isinstance(space, gymnasium.spaces.Box) or len(space.shape) != 1:
        raise Unsupported(f"action space {space} is not a vector; tasks with several robots are not covered")
    low, high = tuple(map(float, space.low)), tuple(map(float, space.high))
    bounded = bool(np.isfinite(space.low).all() and np.isfinite(space.high).all())
    return ActionSpec(len(low), low, high, env.control_mode, bounded)


def task_spec(task: str, options: ManiSkillOptions) -> TaskSpec:
    """Instruction and step limit of a task."""
    own = REGISTERED_ENVS[task].max_episode_steps
    limit = options.max_steps or own
    if not limit:
        raise ConfigError(f"task {task!r} has no step limit of its own; set max_steps")
    words = task.rsplit("-v", 1)[0]
    given = dict(zip(options.tasks, options.instructions, strict=False))
    return TaskSpec(task, given.get(task) or INSTRUCTIONS.get(task, words), int(limit))


def sim_spec(env_by_task: dict[str, Any], options: ManiSkillOptions, starts: Starts, backend: str) -> SimSpec:
    """The contract of one simulator with one environment per task. States are padded to the longest."""
    actions = {task: action_spec(env) for task, env in env_by_task.items()}
    first = next(iter(actions.values()))
    if any(spec != first for spec in actions.values()):
        raise ConfigError(f"tasks {list(actions)} have different action spaces; serve them by separate simulators")
    tensors: dict[str, TensorSpec] = {}
    for env in env_by_task.values():
        for name, array in observe(env, options).items():
            shape = tuple(array.shape[1:])
            known = tensors.get(name)
            if known is not None and name == "state":
                shape = (max(shape[0], known.shape[0]),)
            elif known is not None and known.shape != shape:
                raise ConfigError(f"tasks {list(actions)} have different {name!r} images; serve them separately")
            tensors[name] = TensorSpec(name, str(array.dtype).removeprefix("torch."), shape)
    tasks = tuple(task_spec(task, options) for task in env_by_task)
    return SimSpec(tuple(tensors.values()), first, tasks, starts, backend, batched=backend.endswith("cuda"))


def observe(env: Any, options: ManiSkillOptions) -> dict[str, torch.Tensor]:
    """All slots of one environment: "rgb/<camera>" uint8 [n, H, W, 3] and "state" float32 [n, S]."""
    out: dict[str, torch.Tensor] = {}
    if options.observation != "state":
        for camera, data in env._get_obs_sensor_data().items():
            out[f"rgb/{camera}"] = data["rgb"]
    if options.observation != "rgb":
        out["state"] = state_vector(env, privileged=options.observation != "rgb+proprio")
    return out


def state_vector(env: Any, privileged: bool = True) -> torch.Tensor:
    """The state observation float32 [n, S], with object poses or (not privileged) the robot's own part only."""
    with observation_mode(env, "state" if privileged else "rgb"):
        parts = env._get_obs_state_dict(env.get_info())
    state: torch.Tensor = common.flatten_state_dict(parts, use_torch=True, device=env.device)
    return state.float()


@contextmanager
def observation_mode(env: Any, mode: str) -> Iterator[None]:
    """Inside the block the environment observes in another mode; "none" spares `reset` an unread observation."""
    saved = env._obs_mode, env.obs_mode_struct
    env._obs_mode, env.obs_mode_struct = mode, _mode_struct(mode)
    try:
        yield
    finally:
        env._obs_mode, env.obs_mode_struct = saved


_mode_struct = lru_cache(parse_obs_mode_to_struct)


class _Unread:
    """Stands where an observation would: reading it is an error, not a stale value."""

    def __getitem__(self, key: object) -> NoReturn:
        raise Unsupported(f"this task's reward reads the observation ({key!r}), which is not computed at every step")

    __getattr__ = __getitem__


def advance(env: Any, action: torch.Tensor | None, given: torch.Tensor) -> tuple[Any, Any, Any]:
    """One control step without an observation: reward float [n], success and fail bool [n].

    action: what ManiSkill's controller executes, or None if drive targets are already set. given: for the reward.
    """
    env._step_action(action)
    env._elapsed_steps += 1
    info = env.get_info()
    reward = env.get_reward(obs=_Unread(), action=given, info=info)
    nothing = torch.zeros(env.num_envs, dtype=torch.bool, device=env.device)
    return reward, info.get("success", nothing), info.get("fail", nothing)


def encode_state(task: str, env: Any, index: int = 0) -> bytes:
    """The scene's state of one slot as a safetensors file: tensors by kind and name, and the task."""
    state = env.get_state_dict()
    arrays = {f"{kind}/{name}": _row(state[kind][name], index) for kind in _KINDS for name in state.get(kind, {})}
    return bytes(safetensors.numpy.save(arrays, metadata={"task": task}))


def decode_states(task: str, states: Sequence[bytes], env: Any) -> dict[str, dict[str, torch.Tensor]]:
    """Start states of n slots as ManiSkill wants them: by kind and name, float32 [n, D].

    Raises InvalidInput unless the bytes hold exactly the tensors of this environment.
    """
    current = env.get_state_dict()
    shapes = {f"{kind}/{name}": current[kind][name].shape[1:] for kind in _KINDS for name in current.get(kind, {})}
    rows = [_parse(state) for state in states]
    for row in rows:
        got = {name: array.shape for name, array in row.items() if array.dtype == np.float32}
        if got != {name: tuple(shape) for name, shape in shapes.items()}:
            raise InvalidInput(f"start state does not fit task {task!r}: it holds {sorted(row)}, not {sorted(shapes)}")
        if not all(np.isfinite(array).all() for array in row.values()):
            raise InvalidInput(f"start state of task {task!r} is not finite")
    out: dict[str, dict[str, torch.Tensor]] = {}
    for name in shapes:
        kind, _, rest = name.partition("/")
        stacked = torch.from_numpy(np.stack([row[name] for row in rows])).to(env.device)
        out.setdefault(kind, {})[rest] = stacked
    return out


_KINDS = ("actors", "articulations")


def _row(tensor: torch.Tensor, index: int) -> Array:
    return np.ascontiguousarray(tensor[index].detach().cpu().numpy(), np.float32)


def _parse(state: bytes) -> dict[str, Array]:
    try:
        return dict(safetensors.numpy.load(state))
    except SafetensorError as error:
        raise InvalidInput(f"start state of {len(state)} bytes is not a ManiSkill start state: {error}") from error


def _require_assets(task: str) -> None:
    missing = []
    for asset in REGISTERED_ENVS[task].asset_download_ids or []:
        parts = assets.expand_data_group_into_individual_data_source_ids(asset) if asset in assets.DATA_GROUPS else ()
        if not all(assets.is_data_source_downloaded(part) for part in parts or (asset,)):
            missing.append(asset)
    if missing:
        names = " ".join(missing)
        raise Unsupported(f"task {task!r} needs assets; run: python -m mani_skill.utils.download_asset {names}")


def _render_backend(render: str) -> str:
    if render != "auto":
        return render
    return "gpu" if os.path.exists("/dev/nvidiactl") else "cpu"


def _explain(error: Exception, task: str, options: ManiSkillOptions) -> NoReturn:
    text = str(error)
    if "rendering device" in text or "vulkan" in text.lower() or "vk::" in text:
        raise Unsupported(
            "no Vulkan device: ManiSkill needs one even without images; install mesa-vulkan-drivers 24.3 or newer "
            "(Debian 12: from bookworm-backports), or NVIDIA's driver with the graphics capability"
        ) from error
    if 'find device "cuda"' in text:
        raise Unsupported("no CUDA device for the physx_cuda backend; use device = 'cpu'") from error
    if "not in supported modes" in text:
        raise ConfigError(f"control_mode = {options.control_mode!r} is impossible for {task!r}: {text}") from error
    if isinstance(error, NotImplementedError):
        raise ConfigError(f"task {task!r} has no {options.reward!r} reward or needs another mode: {text}") from error
    raise error
