"""Scripted experts: memoryless rules from the privileged state to an action. No planner, no learning.

For ManiSkill they drive the panda robot in `pd_ee_delta_pos` (action: x, y, z in units of 0.1 m per control step,
gripper 1 = open, -1 = closed). Memoryless rules can be cloned from single observations.

`bias` makes an expert systematically wrong without making it noisy: it misjudges where its object or target is, by
the same offset in every episode. 1.0 is the deliberate bias of warm starts, which leaves room for reinforcement
learning to improve; 0.0 is the competent expert.
"""

from collections.abc import Callable

import numpy as np

from services.common.errors import Unsupported
from services.common.spec import ActionSpec, BoolArray, FloatArray
from services.sim.toy import MIRROR, SCALE

CONTROL_MODE = "pd_ee_delta_pos"
REACH = 0.1  # metres that an action of 1 asks for
OPEN, CLOSED = 1.0, -1.0

_Rule = Callable[[FloatArray, float], FloatArray]


class Expert:
    """Acts for one task. Raises Unsupported if there is no rule for the task or the control mode does not fit."""

    def __init__(self, task: str, action: ActionSpec, bias: float = 0.0) -> None:
        if task not in _RULES:
            raise Unsupported(f"no scripted expert for task {task!r}; there are some for {', '.join(sorted(_RULES))}")
        if task not in MIRROR and action.control_mode != CONTROL_MODE:
            raise Unsupported(f"the expert of {task!r} acts in {CONTROL_MODE}, not {action.control_mode!r}")
        self.task, self.bias = task, bias
        self._rule = _RULES[task]
        self._low, self._high = np.array(action.low, np.float32), np.array(action.high, np.float32)

    def __call__(self, state: FloatArray) -> FloatArray:
        """Actions float32 [n, D] within the limits, from privileged states float32 [n, S]."""
        return np.clip(self._rule(state, self.bias), self._low, self._high).astype(np.float32)


def with_noise(actions: FloatArray, noise: float, rng: np.random.Generator) -> FloatArray:
    """What is executed in place of clean labels, so that demonstrations show recoveries (DART, Laskey et al. 2017).

    noise: standard deviation in action units, on every dimension but a gripper's sign would flip too rarely to
    matter below 0.3.
    """
    return (actions + rng.normal(0, noise, actions.shape)).astype(np.float32) if noise else actions


def _reach(sign: np.float32) -> _Rule:
    def rule(state: FloatArray, bias: float) -> FloatArray:
        """state: point x, y, goal x, y. Walks straight to a point beside the target."""
        point, target = state[:, :2], sign * state[:, 2:4]
        return (target + np.float32(bias) * _TOY_BIAS - point) / np.float32(SCALE)

    return rule


_TOY_BIAS = np.array([0.12, 0.08], np.float32)  # just beyond the radius of success: 19 of 100 episodes cross it


def _slide(direction: float) -> _Rule:
    def rule(state: FloatArray, bias: float) -> FloatArray:
        """Get behind the cube, down to its height, then slide it along x. Bias: misjudges the cube sideways."""
        tcp, goal, cube = state[:, 18:21], state[:, 25:28], state[:, 28:31].copy()
        cube[:, 1] += np.float32(bias * SLIDE_BIAS)
        ahead = direction * (tcp[:, 0] - cube[:, 0])  # negative: behind the cube, as it should be
        aligned = np.abs(tcp[:, 1] - cube[:, 1]) < 0.02
        ready = aligned & (ahead < -0.02) & (tcp[:, 2] < 0.045)
        behind = np.stack([cube[:, 0] - direction * 0.07, cube[:, 1], cube[:, 2] - 0.005], axis=1)
        behind[:, 2] = np.where(ahead > -0.045, 0.1, behind[:, 2])  # over the cube, not through it
        push = np.stack([goal[:, 0], cube[:, 1], cube[:, 2] - 0.005], axis=1)
        return _move(tcp, np.where(ready[:, None], push, behind), CLOSED, gain=1.5)

    return rule


SLIDE_BIAS = 0.042  # metres; PushCube then succeeds in 47 of 100 episodes, mostly late


def _pick_cube(state: FloatArray, bias: float) -> FloatArray:
    """Hover, descend, grasp, carry to the goal. Bias: misjudges the goal sideways."""
    grasped = state[:, 18] > 0.5
    tcp, goal, cube = state[:, 19:22], state[:, 26:29].copy(), state[:, 29:32]
    goal[:, 1] += np.float32(bias * PICK_BIAS)
    carry = goal - cube + tcp
    target, gripper = _grasp(tcp, cube, grasped)
    return _move(tcp, np.where(grasped[:, None], carry, target), gripper)


PICK_BIAS = 0.0254  # metres; the goal's radius is 0.025


def _stack_cube(state: FloatArray, bias: float) -> FloatArray:
    """Grasp cube A, carry it over cube B, set it down and let go. Bias: misjudges B sideways."""
    tcp, cube, base = state[:, 18:21], state[:, 25:28], state[:, 32:35].copy()
    base[:, 1] += np.float32(bias * STACK_BIAS)
    fingers = state[:, 7:9].sum(axis=1)  # 0.08 when open; 0.04 to 0.056 around a cube
    held = (np.linalg.norm(tcp - cube, axis=1) < 0.015) & (fingers < 0.058)
    over = np.linalg.norm(cube[:, :2] - base[:, :2], axis=1)
    rest = base + np.array([0, 0, 0.04], np.float32)
    placed = (over < 0.012) & (np.abs(cube[:, 2] - rest[:, 2]) < 0.004)
    height = np.where(over < 0.01, rest[:, 2], rest[:, 2] + 0.05)
    carry = np.concatenate([rest[:, :2], height[:, None]], axis=1) - cube + tcp
    low = (over > 0.03) & (cube[:, 2] < rest[:, 2] + 0.01)  # lift before moving sideways
    carry[low, :2] = tcp[low, :2]
    target, gripper = _grasp(tcp, cube, held)
    target = np.where(held[:, None], carry, target)
    target = np.where(placed[:, None], tcp + [0, 0, 0.05] * (fingers > 0.06)[:, None], target)
    return _move(tcp, target, np.where(placed, OPEN, gripper))


STACK_BIAS = 0.02  # metres


def _grasp(tcp: FloatArray, cube: FloatArray, grasped: BoolArray) -> tuple[FloatArray, FloatArray]:
    """Where to go and what to do with the gripper until the cube is held."""
    aside = np.linalg.norm(tcp[:, :2] - cube[:, :2], axis=1)
    hover = aside > np.where(tcp[:, 2] < cube[:, 2] + 0.02, 0.02, 0.01)
    target = cube.copy()
    target[:, 2] += np.where(hover, 0.08, 0.0)
    low = (tcp[:, 2] - cube[:, 2]) < 0.012
    return target, np.where(grasped | (low & ~hover), CLOSED, OPEN)


def _move(tcp: FloatArray, target: FloatArray, gripper: FloatArray | float, gain: float = 1.0) -> FloatArray:
    """Proportional steps towards a target, with a gripper command."""
    hand = np.broadcast_to(np.float32(gripper), (len(tcp),))
    return np.concatenate([gain * (target - tcp) / REACH, hand[:, None]], axis=1)


_RULES: dict[str, _Rule] = {
    **{task: _reach(sign) for task, sign in MIRROR.items()},
    "PushCube-v1": _slide(1.0),
    "PullCube-v1": _slide(-1.0),
    "PickCube-v1": _pick_cube,
    "StackCube-v1": _stack_cube,
}
