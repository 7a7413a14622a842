"""Which seeds belong to whom: training, demonstrations and evaluation draw from ranges that never meet.

    training        [0,    2^30)
    demonstrations  [2^30, 2^31)
    evaluation      [2^31, 2^32)

Every seed is below 2^32, because simulators feed numpy's RandomState, which accepts no more.
"""

import xxhash

from services.common.errors import ConfigError

TRAINING = range(2**30)
DEMONSTRATIONS = range(2**30, 2**31)
EVALUATION = range(2**31, 2**32)

# Odd, and the ranges' sizes are powers of two: index -> seed is a bijection within a range.
_STRIDE = 0x9E3779B1


def training_seed(base: int, index: int) -> int:
    """Seed of the index-th training start of a run with this base seed. Distinct for distinct indices."""
    return _draw(TRAINING, "training", base, index)


def demonstration_seed(base: int, index: int) -> int:
    """Seed of the index-th demonstration episode."""
    return _draw(DEMONSTRATIONS, "demonstrations", base, index)


def evaluation_seed(index: int, base: int = 0) -> int:
    """Seed of the index-th held-out start. The same for every run unless another base is asked for."""
    return _draw(EVALUATION, "evaluation", base, index)


def _draw(seeds: range, purpose: str, base: int, index: int) -> int:
    if index < 0 or index >= len(seeds):
        raise ConfigError(f"{purpose} start {index} does not exist: expected an index from 0 to {len(seeds) - 1}")
    offset = xxhash.xxh3_64_intdigest(f"{purpose}:{base}".encode())
    return seeds[(offset + index * _STRIDE) % len(seeds)]
