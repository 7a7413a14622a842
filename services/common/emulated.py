"""A device whose time is a wait: it takes as long as the real one would and no CPU. Everything here is emulated.

It measures orchestration: real services, real queues and real transports around work that only passes time. It says
nothing about a GPU; whoever shows figures made with it calls them emulated.
"""

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from services.common.errors import ConfigError

MARK = "emulated"
"""What backends and families of emulated parts are called, so that no figure loses the word."""

Costs = TypeVar("Costs")


class EmulatedDevice:
    """One queue, as a GPU's: work starts when the work before it is done. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free = 0.0

    def work(self, seconds: float) -> None:
        """Wait until this much work, queued now, is done."""
        with self._lock:
            self._free = max(time.monotonic(), self._free) + seconds
            done = self._free
        # A sleep may end early by a clock tick, never is it asked to end late.
        while (left := done - time.monotonic()) > 0:
            time.sleep(left)


@dataclass(frozen=True)
class Linear:
    """Seconds of work on n rows: base + each * n."""

    base: float = 0.0
    each: float = 0.0

    def of(self, rows: int) -> float:
        """Seconds for so many rows."""
        return self.base + self.each * rows


def read_costs(kind: type[Costs], given: Mapping[str, Any], who: str) -> Costs:
    """A dataclass of numbers from options; raises ConfigError for unknown names and for what is no number from 0."""
    known = {f.name for f in fields(kind)}  # type: ignore[arg-type]
    for name, value in given.items():
        if name not in known:
            raise ConfigError(f"{who} has no option {name!r}; it knows {', '.join(sorted(known))}")
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
            raise ConfigError(f"{who} option {name} = {value!r}; expected a number from 0")
    return kind(**given)
