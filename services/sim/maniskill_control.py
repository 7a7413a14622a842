"""A lean end-effector controller for ManiSkill on the CPU: the same targets, without small torch calls.

Of a `pd_ee_delta_pos` control step in mani_skill 3.0.1, 70 % is the controller's pose arithmetic in torch on single
poses. Here the same arithmetic runs on sapien poses and numpy; the inverse kinematics is ManiSkill's own. Targets
agree with the original to float32 rounding (a test compares whole trajectories).

Only exact types with known settings are replaced; anything else keeps ManiSkill's controller.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import sapien
from mani_skill.agents.controllers.base_controller import CombinedController
from mani_skill.agents.controllers.pd_ee_pose import (
    PDEEPosController,
    PDEEPosControllerConfig,
    PDEEPoseController,
    PDEEPoseControllerConfig,
)
from mani_skill.agents.controllers.pd_joint_pos import PDJointPosMimicController

from services.common.spec import FloatArray

SetAction = Callable[[FloatArray], None]
"""Sets drive targets from one action (float32 [D]), as `agent.set_action` does."""


def lean_controller(env: Any) -> SetAction | None:
    """A fast stand-in for `env.agent.set_action` (single CPU env), or None if this controller is not covered."""
    combined: Any = getattr(env.agent, "controller", None)
    if type(combined) is not CombinedController or env.num_envs != 1 or env.gpu_sim_enabled:
        return None
    parts: list[tuple[int, int, SetAction]] = []
    for uid, controller in combined.controllers.items():
        part = _lean_part(controller)
        if part is None:
            return None
        start, end = combined.action_mapping[uid]
        parts.append((start, end, part))

    def set_action(action: FloatArray) -> None:
        for start, end, part in parts:
            part(action[start:end])

    return set_action


def _lean_part(controller: Any) -> SetAction | None:
    config = controller.config
    if getattr(config, "use_target", True) or getattr(config, "interpolate", True) or not config.normalize_action:
        return None
    kind = type(controller)
    if kind is PDEEPosController and type(config) is PDEEPosControllerConfig:
        return _EndEffector(controller) if config.use_delta and config.frame == "root_translation" else None
    if kind is PDEEPoseController and type(config) is PDEEPoseControllerConfig:
        frame = "root_translation:root_aligned_body_rotation"
        return _EndEffector(controller) if config.use_delta and config.frame == frame else None
    if kind is PDJointPosMimicController and not config.use_delta:
        return _Gripper(controller)
    return None


class _EndEffector:
    """Moves the end effector by a delta in the root frame (3 numbers), with rotation also by XYZ angles (6)."""

    def __init__(self, controller: Any) -> None:
        kinematics = controller.kinematics
        self._robot = controller.articulation._objs[0]
        self._root, self._tip = controller.root_link._objs[0], controller.ee_link._objs[0]
        self._joints = [joint._objs[0] for joint in controller.joints]
        self._own = controller.active_joint_indices.numpy()
        self._model, self._tip_index = kinematics.pmodel, kinematics.end_link_idx
        self._order = kinematics.pmodel_active_joint_indices.numpy()
        self._controlled = kinematics.pmodel_controlled_joint_indices.numpy()
        self._mask = kinematics.qmask.numpy()
        low, high = controller.action_space_low.numpy()[:3], controller.action_space_high.numpy()[:3]
        self._center, self._scale = 0.5 * (high + low), 0.5 * (high - low)
        self._rotation = getattr(controller.config, "rot_lower", None)

    def __call__(self, action: FloatArray) -> None:
        base = self._root.entity_pose.inv() * self._tip.entity_pose
        base.p = base.p + (self._center + self._scale * np.clip(action[:3], -1, 1))
        if self._rotation is not None:
            base.q = (_turn(action[3:], self._rotation) * sapien.Pose(q=base.q)).q
        qpos = self._robot.get_qpos()
        found, success, _ = self._model.compute_inverse_kinematics(
            self._tip_index, base, initial_qpos=qpos[self._order], active_qmask=self._mask, max_iterations=100
        )
        target = found[self._controlled] if success else qpos[self._own]
        for joint, value in zip(self._joints, target.astype(np.float32), strict=True):
            joint.set_drive_target(float(value))


def _turn(action: FloatArray, scale: float) -> sapien.Pose:
    """The rotation of a normalised action: norm clipped to 1, scaled, applied as X, then Y, then Z (intrinsic)."""
    norm = float(np.linalg.norm(action))
    # ManiSkill scales by the *lower* limit, so positive actions turn the negative way. Kept as it is.
    angles = (action / norm if norm > 1 else action) * scale
    pose = sapien.Pose()
    for axis, angle in enumerate(angles):
        q = np.zeros(4, np.float32)
        q[0], q[axis + 1] = np.cos(angle / 2), np.sin(angle / 2)
        pose = pose * sapien.Pose(q=q)
    return pose


class _Gripper:
    """Drives joints to a position; mimic joints follow theirs."""

    def __init__(self, controller: Any) -> None:
        self._joints = [joint._objs[0] for joint in controller.joints]
        self._control = controller.control_joint_indices.numpy()
        self._mimic = controller.mimic_joint_indices.numpy()
        self._leader = controller.mimic_control_joint_indices.numpy()
        self._multiplier, self._offset = controller._multiplier.numpy(), controller._offset.numpy()
        low, high = controller.action_space_low.numpy(), controller.action_space_high.numpy()
        self._center, self._scale = 0.5 * (high + low), 0.5 * (high - low)

    def __call__(self, action: FloatArray) -> None:
        target = np.zeros(len(self._joints), np.float32)
        target[self._control] = self._center + self._scale * np.clip(action, -1, 1)
        target[self._mimic] = target[self._leader] * self._multiplier + self._offset
        for joint, value in zip(self._joints, target, strict=True):
            joint.set_drive_target(float(value))
