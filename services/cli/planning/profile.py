"""What `dvla profile` measured, as `dvla plan` reads it: curves over batch sizes, and figures per env step."""

import bisect
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from services.common.errors import ConfigError

FORMAT = "dvla-profile-1"


@dataclass(frozen=True)
class Curve:
    """Seconds over a batch size, straight between the measured points; sizes rise strictly, seconds are above 0."""

    sizes: tuple[int, ...]
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        rising = all(a < b for a, b in zip(self.sizes, self.sizes[1:], strict=False))
        if not self.sizes or len(self.sizes) != len(self.seconds) or not rising or self.sizes[0] < 1:
            raise ConfigError(
                f"batch sizes {list(self.sizes)} with {len(self.seconds)} times; expected rising sizes, each with one"
            )
        if not all(0 < value < float("inf") for value in self.seconds):
            raise ConfigError(f"times {list(self.seconds)}; expected seconds above 0")

    def at(self, size: int) -> float:
        """Seconds for this size. Beyond the measured ones: as long as the least, or along the last straight."""
        if size <= self.sizes[0] or len(self.sizes) == 1:
            return self.seconds[0] if size <= self.sizes[0] else self.seconds[0] * size / self.sizes[0]
        right = min(max(1, bisect.bisect_left(self.sizes, size)), len(self.sizes) - 1)
        x0, x1 = self.sizes[right - 1], self.sizes[right]
        y0, y1 = self.seconds[right - 1], self.seconds[right]
        return max(y0 + (y1 - y0) * (size - x0) / (x1 - x0), 1e-12)


@dataclass(frozen=True)
class Profile:
    """Costs of one recipe on one device.

    sim: seconds of a control step of n environments, observations included. inference: seconds of a policy call on n
    rows, each good for `chunk` control steps. train_seconds: of the learner for each trained env step, all epochs.
    update_steps: env steps of an update; optimiser_steps: gradients that are reduced in it. publish_seconds: from a
    finished update to a sealed version. staleness: updates that weights may be old. Bytes are per env step, of
    weights, or of memory: sim_bytes + sim_env_bytes * n, policy_bytes + row_bytes * n, learner_bytes.
    """

    name: str
    chunk: int
    sim: Curve
    inference: Curve
    train_seconds: float
    update_steps: float
    optimiser_steps: float = 1.0
    publish_seconds: float = 0.0
    weight_bytes: float = 0.0
    trajectory_bytes: float = 0.0
    staleness: int = 1
    sim_bytes: float = 0.0
    sim_env_bytes: float = 0.0
    policy_bytes: float = 0.0
    row_bytes: float = 0.0
    learner_bytes: float = 0.0
    emulated: bool = False
    machine: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("chunk", "train_seconds", "update_steps"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ConfigError(f"{name} = {getattr(self, name)}; expected more than 0")
        rest = ("publish_seconds", "weight_bytes", "trajectory_bytes", "staleness", "optimiser_steps")
        for name in (*rest, "sim_bytes", "sim_env_bytes", "policy_bytes", "row_bytes", "learner_bytes"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ConfigError(f"{name} = {getattr(self, name)}; expected 0 or more")


def read_profile(path: Path) -> Profile:
    """A profile file; raises ConfigError with one line that names the file and what is wrong."""
    try:
        data = json.loads(path.read_text())
    except FileNotFoundError as error:
        raise ConfigError(
            f"profile {str(path)!r} does not exist; `dvla profile RECIPE --to FILE` writes one"
        ) from error
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ConfigError(f"profile {str(path)!r} cannot be read: {error}") from error
    try:
        return profile_of(data)
    except (ConfigError, KeyError, TypeError, ValueError) as error:
        what = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise ConfigError(f"profile {str(path)!r}: {what}; `dvla profile` writes it anew") from error


def profile_of(data: Any) -> Profile:
    """From the file's content; raises ConfigError, KeyError, TypeError or ValueError."""
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise ConfigError(f"its format is no {FORMAT!r}")
    learner, publish, memory = data["learner"], data["publish"], data.get("memory", {})
    return Profile(
        name=str(data.get("recipe", "")),
        chunk=int(data["chunk"]),
        sim=_curve(data["sim"], "envs", "step_seconds"),
        inference=_curve(data["inference"], "rows", "call_seconds"),
        train_seconds=float(learner["seconds_per_step"]),
        update_steps=float(learner["steps_per_update"]),
        optimiser_steps=float(learner.get("optimiser_steps", 1)),
        publish_seconds=float(publish["seconds"]),
        weight_bytes=float(publish["bytes"]),
        trajectory_bytes=float(data["edges"]["trajectory_bytes_per_step"]),
        staleness=int(data.get("staleness", 1)),
        emulated=bool(data.get("emulated", False)),
        machine=dict(data.get("machine", {})),
        **{name: float(memory[name]) for name in _MEMORY if name in memory},
    )


_MEMORY = ("sim_bytes", "sim_env_bytes", "policy_bytes", "row_bytes", "learner_bytes")


def _curve(data: Mapping[str, Sequence[Any]], sizes: str, seconds: str) -> Curve:
    return Curve(tuple(int(x) for x in data[sizes]), tuple(float(y) for y in data[seconds]))
