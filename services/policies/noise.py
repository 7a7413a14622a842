"""Per-row randomness: every row of a batch draws from its own key, never from its position in the batch.

Counter-based: draw number i of a row is a hash of (key, i), computed for the whole batch in a few array operations.
"""

from collections.abc import Sequence
from math import prod

import numpy as np
import numpy.typing as npt
import torch
import xxhash
from torch import Tensor

Words = npt.NDArray[np.uint64]

# SplitMix64 (Steele, Lea and Flood 2014): the golden-ratio increment and the two multipliers of its finaliser.
_INCREMENT = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLY_1 = np.uint64(0xBF58476D1CE4E5B9)
_MULTIPLY_2 = np.uint64(0x94D049BB133111EB)
_SHIFT_1, _SHIFT_2, _SHIFT_3 = np.uint64(30), np.uint64(27), np.uint64(31)
_LOW_24, _SHIFT_24, _SHIFT_40 = np.uint64(0xFFFFFF), np.uint64(16), np.uint64(40)
_UNIT = np.float32(2.0**-24)


def _mix(words: Words) -> Words:
    """SplitMix64's finaliser: a bijection of 64-bit words in which every input bit flips half the output bits."""
    words = (words ^ (words >> _SHIFT_1)) * _MULTIPLY_1
    words = (words ^ (words >> _SHIFT_2)) * _MULTIPLY_2
    return words ^ (words >> _SHIFT_3)


class RowNoise:
    """One stream of random numbers per row. The same keys give the same draws in any batch and any order of rows."""

    def __init__(self, keys: Sequence[str], device: torch.device | str = "cpu") -> None:
        digests = b"".join(xxhash.xxh3_128_digest(key.encode()) for key in keys)
        seeds = np.frombuffer(digests, dtype=">u8").astype(np.uint64).reshape(-1, 2)  # (B, 2)
        self._start, self._salt = seeds[:, :1], seeds[:, 1:]
        self._drawn = 0
        self._device = device

    def __len__(self) -> int:
        return len(self._start)

    def normal(self, *shape: int) -> Tensor:
        """Standard normal float32 [B, *shape]."""
        count = prod(shape)
        words = self._words((count + 1) // 2)
        # Box-Muller; the radius takes 1 - u, which is never 0, so its logarithm is finite.
        radius = np.sqrt(-2.0 * np.log(1.0 - _unit_low(words)))
        angle = np.float32(2.0 * np.pi) * _unit_high(words)
        pairs = np.concatenate([radius * np.cos(angle), radius * np.sin(angle)], axis=1)[:, :count]
        return self._tensor(pairs.astype(np.float32, copy=False), shape)

    def uniform(self, *shape: int) -> Tensor:
        """Uniform float32 in [0, 1) [B, *shape]."""
        return self._tensor(_unit_high(self._words(prod(shape))), shape)

    def integers(self, high: int) -> Tensor:
        """Uniform int64 in [0, high) [B]."""
        values = (self._words(1)[:, 0] >> np.uint64(32)) * np.uint64(high) >> np.uint64(32)
        return torch.from_numpy(values.astype(np.int64)).to(self._device)

    def _words(self, count: int) -> Words:
        """The next `count` random words of every row: uint64 [B, count]."""
        counter = np.arange(self._drawn + 1, self._drawn + count + 1, dtype=np.uint64) * _INCREMENT
        self._drawn += count
        return _mix(_mix(self._start + counter) ^ self._salt)

    def _tensor(self, values: npt.NDArray[np.float32], shape: tuple[int, ...]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values).reshape(len(self), *shape)).to(self._device)


def _unit_high(words: Words) -> npt.NDArray[np.float32]:
    """Uniform float32 in [0, 1) from the upper 24 bits."""
    return (words >> _SHIFT_40).astype(np.float32) * _UNIT


def _unit_low(words: Words) -> npt.NDArray[np.float32]:
    """Uniform float32 in [0, 1) from 24 bits that `_unit_high` does not use."""
    return ((words >> _SHIFT_24) & _LOW_24).astype(np.float32) * _UNIT
