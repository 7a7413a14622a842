"""The interval of a success rate."""

from math import sqrt

Z95 = 1.959963984540054
"""Two-sided 95 % quantile of the standard normal distribution."""


def wilson(successes: int, total: int, z: float = Z95) -> tuple[float, float]:
    """Wilson's score interval of a proportion (Wilson 1927, JASA 22, p. 209); (0, 1) without trials.

    Unlike the textbook p +- z * sqrt(p * (1 - p) / n) it does not collapse at 0 and 1, where good policies end.
    """
    if total == 0:
        return 0.0, 1.0
    share, z2 = successes / total, z * z
    centre = share + z2 / (2 * total)
    spread = z * sqrt(share * (1 - share) / total + z2 / (4 * total * total))
    scale = 1 + z2 / total
    # At the two ends rounding could leave the interval a hair inside of the exact 0 or 1.
    low = 0.0 if successes == 0 else (centre - spread) / scale
    high = 1.0 if successes == total else (centre + spread) / scale
    return low, high
