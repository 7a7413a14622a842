"""Normalisation of states and actions. The statistics are buffers, so they are versioned with the weights."""

import logging
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from services.common.errors import InvalidInput
from services.common.spec import FloatArray

log = logging.getLogger(__name__)

STATE_CLIP = 10.0
"""Normalised states are clipped here: exploration reaches states that demonstrations never showed."""
FLAT_FLOOR = 0.05
"""Smallest scale of a dimension, as a share of the median scale. Dividing by the tiny spread of a flat dimension
would turn physical noise into huge inputs, or huge targets (openpi#814 saw -3200)."""
NARROW_QUANTILES = 0.1
"""Below this share of the full range, q01..q99 misses the rare values that matter (a gripper that closes once)."""


class Normaliser(nn.Module):
    """Centre and scale of the state [S] and the action [D]: identity until `fit`."""

    state_centre: Tensor
    state_scale: Tensor
    action_centre: Tensor
    action_scale: Tensor

    def __init__(self, state_dim: int, action_dim: int) -> None:
        super().__init__()
        self.register_buffer("state_centre", torch.zeros(state_dim))
        self.register_buffer("state_scale", torch.ones(state_dim))
        self.register_buffer("action_centre", torch.zeros(action_dim))
        self.register_buffer("action_scale", torch.ones(action_dim))

    def fit(self, states: FloatArray | None, actions: FloatArray, method: Literal["quantile", "meanstd"]) -> None:
        """Take statistics of demonstrations: states [N, S] (None without a state), actions [N, D]."""
        if len(self.state_centre):
            if states is None:
                raise InvalidInput("no states to normalise by: expected an array [N, state_dim]")
            _check_rows("state", states, len(self.state_centre))
            _assign(self.state_centre, self.state_scale, states.mean(axis=0), states.std(axis=0), "state")
        _check_rows("action", actions, len(self.action_centre))
        spread = _quantile_range if method == "quantile" else _mean_std
        centre, scale = spread(actions)
        _assign(self.action_centre, self.action_scale, centre, scale, "action")

    def state(self, state: Tensor) -> Tensor:
        """Raw state [B, S] to network units, within +-STATE_CLIP."""
        return ((state - self.state_centre) / self.state_scale).clamp(-STATE_CLIP, STATE_CLIP)

    def action(self, action: Tensor) -> Tensor:
        """Environment-unit actions [..., D] to network units."""
        return (action - self.action_centre) / self.action_scale

    def denormalise_action(self, action: Tensor) -> Tensor:
        """The inverse of `action`."""
        return action * self.action_scale + self.action_centre


def _check_rows(name: str, values: FloatArray, dim: int) -> None:
    if values.ndim != 2 or values.shape[1] != dim or len(values) == 0:
        raise InvalidInput(f"{name} statistics need an array [N, {dim}] with N > 0, got {values.shape}")
    if not np.isfinite(values).all():
        raise InvalidInput(f"{name} statistics need finite values: the demonstrations hold NaN or infinity")


def _quantile_range(values: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Centre and half-width of q01..q99 per column, or of the full range where the quantiles are degenerate."""
    low, high = np.quantile(values, [0.01, 0.99], axis=0).astype(np.float32)
    least, most = values.min(axis=0), values.max(axis=0)
    narrow = (high - low) < NARROW_QUANTILES * (most - least)
    low, high = np.where(narrow, least, low), np.where(narrow, most, high)
    return (high + low) / 2, (high - low) / 2


def _mean_std(values: FloatArray) -> tuple[FloatArray, FloatArray]:
    return values.mean(axis=0), values.std(axis=0)


def _assign(centre: Tensor, scale: Tensor, new_centre: FloatArray, new_scale: FloatArray, name: str) -> None:
    """Write one pair of buffers in place, with flat dimensions floored."""
    varying = new_scale > 1e-6 * (1.0 + np.abs(new_centre))
    floor = FLAT_FLOOR * float(np.median(new_scale[varying])) if varying.any() else 1.0
    if (flat := np.flatnonzero(new_scale < floor)).size:
        log.warning("%s dimensions %s hardly vary in the demonstrations: scale floored at %.3g", name, flat, floor)
    centre.copy_(torch.from_numpy(new_centre))
    scale.copy_(torch.from_numpy(np.maximum(new_scale, floor)))
