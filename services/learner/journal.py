"""What a run leaves to read: one JSON line per update in metrics.jsonl, and TensorBoard events."""

import json
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import structlog
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from services.common.telemetry import BUSY, Telemetry

log = structlog.get_logger()


class Journal:
    """Appends to the run folder. One thread uses it."""

    def __init__(self, folder: Path, telemetry: Telemetry) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._telemetry = telemetry
        path = folder / "metrics.jsonl"
        _drop_cut_line(path)
        self._lines = path.open("a")
        self._events = EventFileWriter(str(folder / "tensorboard"))

    def write(self, epoch: int, update: int, metrics: Mapping[str, Any]) -> None:
        """One update: numbers or lists by name. Numbers also go to TensorBoard, with the update as step.

        A disk that refuses costs the line, not the run.
        """
        shares = {f"idle/{name}": share for name, share in idle_shares(self._telemetry).items()}
        now = time.time()
        line = {"time": now, "epoch": epoch, "update": update} | dict(metrics) | shares
        try:
            self._append(now, update, line)
        except OSError as error:
            log.error("journal", reason=str(error))
            self._telemetry.facts["journal"] = f"update {update} not written: {error}"

    def _append(self, now: float, update: int, line: Mapping[str, Any]) -> None:
        self._lines.write(json.dumps({name: _plain(value) for name, value in line.items()}) + "\n")
        self._lines.flush()
        numbers = {name: float(value) for name, value in line.items() if isinstance(value, int | float)}
        values = [Summary.Value(tag=name, simple_value=value) for name, value in numbers.items() if name != "time"]
        self._events.add_event(Event(wall_time=now, step=update, summary=Summary(value=values)))
        self._events.flush()

    def close(self) -> None:
        """Flush and close both files."""
        self._lines.close()
        self._events.close()


def idle_shares(telemetry: Telemetry) -> dict[str, float]:
    """Share of time that each lane was idle so far, the time before its start left out."""
    shares = {}
    for name, lane in list(telemetry.lanes.items()):
        seconds = lane.seconds()
        seconds.pop("start", None)
        total = sum(seconds.values())
        if total > 0:
            shares[name] = 1.0 - seconds.get(BUSY, 0.0) / total
    return shares


def _plain(value: Any) -> Any:
    """JSON has no NaN and no infinity: they become null."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _drop_cut_line(path: Path) -> None:
    """Remove a last line that a killed learner did not finish, so that every line stays whole."""
    if path.exists():
        whole = path.read_bytes()
        os.truncate(path, whole.rfind(b"\n") + 1)
