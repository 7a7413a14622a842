"""How far a child process is, told to the launcher through a small file.

The child calls `reporter()`; where nobody asked for progress it prints a line now and then instead.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from services.cli.board import Progress

VARIABLE = "DVLA_PROGRESS_FILE"
FILE_SECONDS = 0.25
LINE_SECONDS = 5.0

Report = Callable[[float, float, str, str], None]
"""Called with (done, total, unit, remark)."""


def reporter() -> Report:
    """A function that reports progress; calls in quick succession cost nothing."""
    target = os.environ.get(VARIABLE, "")
    interval = FILE_SECONDS if target else LINE_SECONDS
    last = 0.0

    def report(done: float, total: float, unit: str, remark: str = "") -> None:
        nonlocal last
        now = time.monotonic()
        if now - last < interval and done < total:
            return
        last = now
        progress = Progress(done, total, unit, remark)
        if target:
            partial = Path(target + ".partial")
            partial.write_text(json.dumps(asdict(progress)))
            os.replace(partial, target)
        else:
            print(f"{done:.0f}/{total:.0f} {unit}{', ' + remark if remark else ''}", file=sys.stderr, flush=True)

    return report


def read_progress(path: Path) -> Progress | None:
    """What the child told last."""
    try:
        return Progress(**json.loads(path.read_text()))
    except FileNotFoundError:
        return None
