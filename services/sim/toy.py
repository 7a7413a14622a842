"""A toy simulator without physics: a point moves in a square to a goal. Microseconds per step, numpy only.

Two tasks share one observation, so only the instruction tells them apart: `reach` (go to the goal) and `mirror` (go
to the point opposite the goal, through the centre). For tests it can inject faults (see `ToyFault`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from services.common.errors import ConfigError, InvalidInput
from services.common.spec import (
    ActionSpec,
    Array,
    FloatArray,
    IntArray,
    Observation,
    SimSpec,
    TaskSpec,
    TensorSpec,
)
from services.sim.vector import ControlStep, Start, VectorSim

if TYPE_CHECKING:
    from services.sim.config import SimConfig

SCALE = 0.15  # how far an action of 1 moves the point; the square spans -1..1
RADIUS = 0.1  # success within this distance of the target
SPAWN = 0.8  # points and goals start within this half width
MIN_DISTANCE = 0.6  # between the start and the target, so that no episode is solved by its first step

INSTRUCTIONS = {"reach": "move the point to the goal", "mirror": "move the point opposite to the goal"}
MIRROR = {"reach": np.float32(1), "mirror": np.float32(-1)}


@dataclass(frozen=True)
class ToyFault:
    """Breaks one value: after control step `step` (from 1) of the slot's `episode`-th episode (from 0)."""

    slot: int
    episode: int
    step: int
    kind: Literal["nan_reward", "nan_observation"]

    @staticmethod
    def parse(text: str) -> "ToyFault":
        """From "slot:episode:step:kind"."""
        parts = text.split(":")
        if len(parts) != 4 or parts[3] not in ("nan_reward", "nan_observation"):
            raise ConfigError(f"toy fault {text!r} is not slot:episode:step:nan_reward|nan_observation")
        kind: Literal["nan_reward", "nan_observation"] = "nan_reward" if parts[3] == "nan_reward" else "nan_observation"
        return ToyFault(int(parts[0]), int(parts[1]), int(parts[2]), kind)


class ToySim(VectorSim):
    """Points in a square. State observation: float32 [4] = point x, y, goal x, y. Image: uint8 [H, W, 3]."""

    def __init__(
        self,
        num_slots: int = 4,
        tasks: Sequence[str] = ("reach",),
        observation: str = "state",
        reward: str = "sparse",
        max_steps: int = 20,
        image_size: int = 16,
        faults: Sequence[ToyFault] = (),
    ) -> None:
        unknown = [task for task in tasks if task not in INSTRUCTIONS]
        if unknown or not tasks:
            raise ConfigError(f"toy tasks {unknown or '(none)'} do not exist; choose from {', '.join(INSTRUCTIONS)}")
        self.num_slots = num_slots
        self.spec = SimSpec(
            observation=_tensors(observation, image_size),
            action=ActionSpec(2, (-1.0, -1.0), (1.0, 1.0), control_mode="velocity"),
            tasks=tuple(TaskSpec(task, INSTRUCTIONS[task], max_steps) for task in tasks),
            starts="state",
            backend="toy/numpy",
            batched=True,
        )
        self._image_size, self._reward, self._faults = image_size, reward, tuple(faults)
        self._point = np.zeros((num_slots, 2), np.float32)
        self._goal = np.zeros((num_slots, 2), np.float32)
        self._mirror = np.ones((num_slots, 1), np.float32)
        self._episode = np.full(num_slots, -1)
        self._steps = np.zeros(num_slots, np.int64)

    def make_start(self, task: str, seed: int) -> bytes:
        """16 bytes: float32 point x, y, goal x, y."""
        rng = np.random.default_rng(seed)
        while True:
            point, goal = rng.uniform(-SPAWN, SPAWN, (2, 2)).astype(np.float32)
            if np.linalg.norm(point - MIRROR[task] * goal) >= MIN_DISTANCE:
                return np.concatenate([point, goal]).astype("<f4").tobytes()

    def reset(self, slots: IntArray, starts: Sequence[Start]) -> None:
        """Place points and goals."""
        states = np.stack([_decode(start.state) for start in starts])
        self._point[slots], self._goal[slots] = states[:, :2], states[:, 2:]
        self._mirror[slots, 0] = [MIRROR[start.task] for start in starts]
        self._episode[slots] += 1
        self._steps[slots] = 0

    def step(self, slots: IntArray, actions: FloatArray) -> ControlStep:
        """Move by action * SCALE, kept inside the square."""
        self._point[slots] = np.clip(self._point[slots] + np.float32(SCALE) * actions, -1, 1)
        self._steps[slots] += 1
        distance = self._distance(slots)
        success = distance < RADIUS
        near = np.float32(0) if self._reward == "sparse" else 1 - np.tanh(2 * distance)
        reward = np.where(success, np.float32(1), near)
        for fault in self._hits(slots, "nan_reward"):
            reward[slots == fault.slot] = np.nan
        return ControlStep(reward, success, np.zeros(len(slots), np.bool_))

    def observe(self, slots: IntArray) -> Observation:
        """State, image or both, as configured."""
        out: Observation = {}
        for tensor in self.spec.observation:
            if tensor.name == "state":
                state = self.privileged_state(slots)
                for fault in self._hits(slots, "nan_observation"):
                    state[slots == fault.slot] = np.nan
                out["state"] = state
            else:
                out[tensor.name] = _draw(self._point[slots], self._goal[slots], self._image_size)
        return out

    def privileged_state(self, slots: IntArray) -> FloatArray:
        """Point x, y, goal x, y (float32 [n, 4]), whatever the policy may see."""
        return np.concatenate([self._point[slots], self._goal[slots]], axis=1)

    def render(self, slot: int) -> Array | None:
        """A 64 pixel image of one slot."""
        frame: Array = _draw(self._point[slot : slot + 1], self._goal[slot : slot + 1], 64)[0]
        return frame

    def _distance(self, slots: IntArray) -> FloatArray:
        gap: FloatArray = self._point[slots] - self._mirror[slots] * self._goal[slots]
        distance: FloatArray = np.linalg.norm(gap, axis=1).astype(np.float32)
        return distance

    def _hits(self, slots: IntArray, kind: str) -> list[ToyFault]:
        return [
            fault
            for fault in self._faults
            if fault.kind == kind
            and fault.slot in slots
            and self._episode[fault.slot] == fault.episode
            and self._steps[fault.slot] >= fault.step
        ]


def build_toy(config: "SimConfig", num_slots: int) -> ToySim:
    """From a role's settings. options: faults, "slot:episode:step:kind" separated by commas."""
    unknown = set(config.options) - {"faults"}
    if unknown:
        raise ConfigError(f"the toy simulator has no options {sorted(unknown)}; it knows faults")
    faults = str(config.options.get("faults", ""))
    return ToySim(
        num_slots,
        tasks=config.tasks,
        observation=config.observation,
        reward=config.reward_mode,
        max_steps=config.max_steps or 20,
        image_size=config.image_size,
        faults=[ToyFault.parse(text) for text in faults.split(",") if text],
    )


def _tensors(observation: str, size: int) -> tuple[TensorSpec, ...]:
    state, image = TensorSpec("state", "float32", (4,)), TensorSpec("rgb/top", "uint8", (size, size, 3))
    kinds = {"state": (state,), "rgb": (image,), "rgb+state": (image, state)}
    if observation not in kinds:
        raise ConfigError(f"toy observation {observation!r} does not exist; choose state, rgb or rgb+state")
    return kinds[observation]


def _decode(state: bytes) -> FloatArray:
    if len(state) != 16:
        raise InvalidInput(f"a toy start state has 16 bytes (4 float32), this one has {len(state)}")
    values = np.frombuffer(state, "<f4").astype(np.float32)
    if not (np.abs(values) <= 1).all():
        raise InvalidInput(f"toy start state {values.tolist()} lies outside -1..1")
    return values


def _draw(points: FloatArray, goals: FloatArray, size: int) -> Array:
    """Top view, uint8 [n, size, size, 3]: a green goal disc and a red point on dark ground. y points up."""
    axis = (np.arange(size, dtype=np.float32) + 0.5) / size * 2 - 1
    x, y = np.meshgrid(axis, -axis)
    reach = max(RADIUS, 1.5 / size)  # at least a pixel or two
    image = np.full((len(points), size, size, 3), 24, np.uint8)
    for centers, radius, color in ((goals, reach * 1.5, (40, 200, 60)), (points, reach, (230, 60, 40))):
        gap = (x - centers[:, 0, None, None]) ** 2 + (y - centers[:, 1, None, None]) ** 2
        image[gap < radius**2] = color
    return image
