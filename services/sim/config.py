"""Configuration of the sim role, and how a simulator is built from it. No simulator is imported before it is built."""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from services.common.config import RoleConfig
from services.common.errors import ConfigError
from services.common.locality import accepted
from services.sim.vector import VectorSim

Option = str | int | float | bool
"""Text comes first: a command line would make 0.02 the whole number 0 otherwise. `SimConfig` reads numbers from it."""

BUILT_IN = ("toy", "scripted", "maniskill")
DEVICES = ("cpu", "cuda")


@dataclass(frozen=True, kw_only=True)
class SimConfig(RoleConfig):
    """Settings of one simulator service."""

    listen: str = "127.0.0.1:7431"
    """Address to serve on: unix:/path or host:port."""
    sim: str = "maniskill"
    """maniskill, toy, scripted, or module:Class of a VectorSim of your own (called with num_slots and `options`)."""
    device: str = "cpu"
    """cpu (one environment per slot) or cuda, cuda:N (one batched scene); ManiSkill only."""
    tasks: tuple[str, ...] = ("PushCube-v1",)
    """Task ids to serve."""
    instructions: tuple[str, ...] = ()
    """What a policy reads for each task; empty for the built-in texts."""
    observation: str = "state"
    """state, rgb, rgb+state or rgb+proprio."""
    image_size: int = 64
    """Width and height of camera images in pixels."""
    control_mode: str = "pd_ee_delta_pos"
    """ManiSkill controller."""
    reward_mode: str = "sparse"
    """sparse, dense or normalized_dense."""
    max_steps: int = 0
    """Control steps until an episode is truncated; 0 for the task's own limit."""
    shader: str = "minimal"
    """ManiSkill shader of camera images: minimal, default, rt-fast, rt."""
    render: str = "auto"
    """Where images are drawn: auto, cpu, gpu or none (then there are no videos either)."""
    lean_control: bool = True
    """Replace ManiSkill's end-effector controllers by an equal, faster one (CPU)."""
    exact_replay: bool = False
    """Rebuild a ManiSkill scene before every episode, so that equal actions give equal episodes through contacts."""
    modules: tuple[str, ...] = ()
    """Python modules to import first, for tasks that register themselves."""
    gpu_memory: dict[str, int] = field(default_factory=dict)
    """Fields of ManiSkill's GPUMemoryConfig, such as max_rigid_contact_count."""
    options: dict[str, Option] = field(default_factory=dict)
    """Keyword arguments of the toy, scripted or custom simulator; a text that reads as a number or as true or false
    is one."""
    slots: int = 8
    """Environment slots of one session."""
    sessions: int = 2
    """Sessions served at the same time; a worker opens two to overlap inference with physics."""
    processes: int = 1
    """Environment processes that the sessions are spread over; 0 runs the simulator in a thread of the service."""
    transport: str = "auto"
    """How observations travel: auto takes shared memory where the client is on this machine and grpc elsewhere; shm or
    grpc allow nothing else."""
    shared_folder: str = ""
    """Folder of shared memory, the same as the workers'. Default: dvla-UID in /dev/shm."""
    step_timeout: float = 120.0
    """Seconds after which an environment process that does not answer is killed and replaced."""
    start_timeout: float = 300.0
    """Seconds that an environment process may take to build its simulators."""

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "options", {name: _read(value) for name, value in self.options.items()})
        if self.sim not in BUILT_IN and ":" not in self.sim:
            raise ConfigError(f"sim = {self.sim!r}; expected {', '.join(BUILT_IN)} or module:Class")
        if self.device.split(":")[0] not in DEVICES:
            raise ConfigError(f"device = {self.device!r}; expected cpu, cuda or cuda:N")
        for name, least in (("slots", 1), ("sessions", 1), ("processes", 0), ("max_steps", 0), ("image_size", 1)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name} = {getattr(self, name)}; expected {least} or more")
        for name in ("step_timeout", "start_timeout"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} = {getattr(self, name)}; expected more than 0 seconds")
        accepted(self.transport)
        if self.processes > self.sessions:
            raise ConfigError(
                f"processes = {self.processes} for sessions = {self.sessions}; a session lives in one process, "
                f"so use at most {self.sessions} processes or more sessions"
            )


def _read(value: Option) -> Option:
    """An option as the number or truth value that its text says."""
    if not isinstance(value, str):
        return value
    if value.lower() in ("true", "false"):
        return value.lower() == "true"
    for kind in (int, float):
        try:
            return kind(value)
        except ValueError:
            continue
    return value


def build_sim(config: SimConfig, num_slots: int | None = None) -> VectorSim:
    """A new simulator as configured. Raises ConfigError, NotFound or Unsupported with one clear line."""
    slots = num_slots or config.slots
    if config.sim == "maniskill":
        return _maniskill(config, slots)
    if config.sim == "toy":
        from services.sim.toy import build_toy

        return build_toy(config, slots)
    if config.sim == "scripted":
        from services.sim.scripted import build_scripted

        return build_scripted(config, slots)
    return _custom(config.sim, slots, config.options)


def _maniskill(config: SimConfig, slots: int) -> VectorSim:
    try:
        from services.sim.maniskill_common import ManiSkillOptions
    except ModuleNotFoundError as error:
        raise ConfigError(f"sim = 'maniskill' needs {error.name}; pip install 'dvla[maniskill]'") from error
    options = ManiSkillOptions(
        tasks=config.tasks,
        observation=config.observation,
        image_size=config.image_size,
        control_mode=config.control_mode,
        reward=config.reward_mode,
        max_steps=config.max_steps,
        shader=config.shader,
        render=config.render,
        instructions=config.instructions,
        modules=config.modules,
        lean_control=config.lean_control,
        exact_replay=config.exact_replay,
        gpu_memory=tuple(sorted(config.gpu_memory.items())),
    )
    if config.device == "cpu":
        from services.sim.maniskill_cpu import ManiSkillCpu

        return ManiSkillCpu(slots, options)
    from services.sim.maniskill_gpu import ManiSkillGpu

    return ManiSkillGpu(slots, options, config.device)


def _custom(path: str, slots: int, options: Mapping[str, Any]) -> VectorSim:
    module, _, name = path.partition(":")
    try:
        factory = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"sim = {path!r} cannot be loaded: {error}; is its folder on PYTHONPATH?") from error
    try:
        sim = factory(num_slots=slots, **options)
    except TypeError as error:
        raise ConfigError(f"sim = {path!r} refuses num_slots and options {dict(options)}: {error}") from error
    if not isinstance(sim, VectorSim):
        raise ConfigError(f"sim = {path!r} makes a {type(sim).__name__}, expected a VectorSim")
    return sim
