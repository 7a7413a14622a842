"""What the benchmarks share: the machine in words, medians with their spread, rows with targets, table and JSON."""

import json
import os
import platform
import signal
import statistics
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

QUIET = 0.15
"""Cores that other processes may keep busy before a measurement counts as taken on a quiet machine."""


@dataclass(frozen=True)
class Row:
    """One measured figure. target: in words; met: None where there is nothing to meet or nothing was measured."""

    what: str
    value: float | None
    unit: str = ""
    spread: tuple[float, float] | None = None  # lowest and highest
    target: str = ""
    met: bool | None = None
    note: str = ""


@dataclass
class Report:
    """Rows as they come, printed at once; `write` keeps them."""

    name: str
    rows: list[Row] = field(default_factory=list)

    def add(
        self,
        what: str,
        values: float | Sequence[float] | None,
        unit: str = "",
        target: str = "",
        met: bool | None = None,
        note: str = "",
    ) -> float | None:
        """Add a figure, the median where there are several; returns it. No values: "not measured"."""
        many = [values] if isinstance(values, int | float) else list(values or [])
        value = statistics.median(many) if many else None
        spread = (min(many), max(many)) if len(many) > 1 else None
        row = Row(what, value, unit, spread, target, met, note)
        self.rows.append(row)
        print(line(row), flush=True)
        return value

    def write(self, path: Path | None) -> None:
        """Write everything as JSON, with the machine."""
        if path is not None:
            text = json.dumps({"name": self.name, "machine": machine(), "rows": [asdict(row) for row in self.rows]})
            path.write_text(text + "\n")


def end_in_order() -> None:
    """Let SIGTERM unwind like an exit, so that files in shared memory are removed and children end."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))


def line(row: Row) -> str:
    """A row in words."""
    value = "not measured" if row.value is None else f"{row.value:,.4g} {row.unit}"
    spread = f"({row.spread[0]:,.4g} to {row.spread[1]:,.4g})" if row.spread else ""
    verdict = {True: "met", False: "MISSED", None: ""}[row.met]
    return f"{row.what:<66} {value:>18} {spread:<22} {row.target:<24} {verdict} {row.note}".rstrip()


def machine() -> dict[str, Any]:
    """Processor, cores, memory, kernel and versions that matter."""
    model = next(
        (text.split(":", 1)[1].strip() for text in _lines("/proc/cpuinfo") if text.startswith("model name")), ""
    )
    memory = next((int(text.split()[1]) for text in _lines("/proc/meminfo") if text.startswith("MemTotal")), 0)
    return {
        "processor": model,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(memory / 1e6, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
        "busy_cores_before": round(busy_cores(), 2),
    }


def busy_cores(seconds: float = 1.0) -> float:
    """Cores that are busy while we sleep: what other processes take."""
    before = _busy_ticks()
    time.sleep(seconds)
    return (_busy_ticks() - before) / os.sysconf("SC_CLK_TCK") / seconds


def tick_seconds(pid: int) -> float:
    """CPU seconds that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def ratio(tops: Iterable[float], bottoms: Iterable[float]) -> list[float]:
    """Quotients of pairs that were measured one after the other."""
    return [top / bottom for top, bottom in zip(tops, bottoms, strict=True)]


def _busy_ticks() -> int:
    user, nice, system, _, _, *rest = map(int, _lines("/proc/stat")[0].split()[1:])
    return user + nice + system + sum(rest[:2])


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines()
