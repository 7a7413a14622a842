"""The data plane measured: turns between simulator and worker, hand-over in shared memory, bulk by grpc, the store.

    python -m benchmarks.data_plane [--quick] [--json FILE] [--only NAME ...]

What is compared is measured in turns (A B A B) within one run, at least five times each; rows show the median and the
spread. Run it on a quiet machine.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.common import QUIET, Report, busy_cores, end_in_order, machine
from benchmarks.data_plane_store import store
from benchmarks.data_plane_turns import bulk, hand_over, turns
from services.common.server import configure_logging


@dataclass
class Plan:
    """How much to measure: rounds, and turns in each of them."""

    rounds: int
    count: int


PARTS: dict[str, Callable[[Report, Plan], None]] = {
    "turns": lambda report, given: turns(report, given.rounds, given.count),
    "hand-over": lambda report, given: hand_over(report, given.rounds, min(200, given.count)),
    "bulk": lambda report, given: bulk(report, 2 * given.rounds),
    "store": lambda report, given: store(report, given.rounds, 2 * given.count),
}


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="within two minutes: fewer turns in each round")
    parser.add_argument("--json", type=Path, help="write all rows to this file")
    parser.add_argument("--only", nargs="*", choices=list(PARTS), default=list(PARTS), help="only these parts")
    given = parser.parse_args()
    end_in_order()
    configure_logging("warning")
    chosen = Plan(5, 100) if given.quick else Plan(7, 1000)
    report = Report("data plane")
    print(machine())
    if (busy := busy_cores()) > QUIET:
        print(f"note: other processes keep {busy:.1f} cores busy; figures will be worse than on a quiet machine")
    for name in given.only:
        PARTS[name](report, chosen)
    report.write(given.json)


if __name__ == "__main__":
    main()
