"""What overlapping lanes is worth: asynchronous against synchronous training in the same code, side by side.

    python -m benchmarks.swimlane --json swimlane.json            everything; an hour on two quiet cores
    python -m benchmarks.swimlane --quick                         a look: few updates, one pair each
    python -m benchmarks.swimlane --parts spans emulated          only these parts

Each pair is measured one after the other, A B A B. Rows that begin with "EMULATED" run the real services around devices
that only wait: they measure orchestration, not a GPU.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.common import Report, end_in_order
from benchmarks.runs import EMULATED, ROOT, Measured, interval90, train
from services.common.telemetry import BUSY, Lane

CHUNK, SLOTS = 8, 24
PAPER = {
    # RLinf disaggregated on 16 GPUs, env steps per second at rollout:learner 8:8 and 12:4 (arXiv 2605.13276).
    "pi0.5": ((8, 8, 150.58), (12, 4, 175.29)),
    "OpenVLA-OFT": ((8, 8, 107.23), (12, 4, 99.33)),
}
CLAIMED = {("pi0.5", 8): 1.86, ("OpenVLA-OFT", 8): 1.44, ("pi0.5", 16): 1.62, ("OpenVLA-OFT", 16): 2.88}
"""D-VLA over RLinf colocated, as published; shown beside, no claim of ours."""


class Bench:
    """The parts of the benchmark."""

    def __init__(self, report: Report, out: Path, quick: bool, pairs: int, scale: float, sizes: list[str]) -> None:
        self.report, self.out, self.quick, self.sizes = report, out, quick, sizes
        self.pairs, self.scale, self.updates = (1 if quick else pairs), scale, (8 if quick else 30)
        self._number = 0

    def run(self, recipe: Path, settings: Mapping[str, Any], cores: Mapping[str, set[int]] | None = None) -> Measured:
        self._number += 1
        return train(recipe, self.out, f"run-{self._number}", settings, cores)

    def spans(self) -> None:
        """Cost of one change of state of a lane."""
        lane, count = Lane("bench"), 20_000 if self.quick else 200_000
        values = []
        for _ in range(5):
            began = time.process_time()
            for _ in range(count // 2):
                lane.set(BUSY)
                lane.set("rows")
            values.append(1e6 * (time.process_time() - began) / count)
        value = self.report.add("span: one change of state", values, "us")
        assert value is not None
        share = value * 1e-6 * 1000 * 100
        self.report.add("span: CPU at 1,000 changes a second", share, "%", "< 1 %", share < 1)

    def emulated(self) -> None:
        """Async against both kinds of sync, with waits solved from the baselines' published speeds."""
        for model, points in PAPER.items():
            rollout, learner = rates(points)
            self.report.add(f"model: {model}, rollout of one GPU", rollout, "steps/s", note="solved from the baselines")
            self.report.add(f"model: {model}, learner of one GPU", learner, "steps/s", note="solved from the baselines")
            for gpus in (8, 16):
                self._emulated(model, gpus, rollout, learner)

    def _emulated(self, model: str, gpus: int, rollout: float, learner: float) -> None:
        split = max(range(1, gpus), key=lambda n: min(n * rollout, (gpus - n) * learner))
        apart = devices(split * rollout * self.scale, (gpus - split) * learner * self.scale)
        whole = devices(gpus * rollout * self.scale, gpus * learner * self.scale)
        bound = min(split * rollout, (gpus - split) * learner)
        asynchronous, disaggregated, colocated = [], [], []
        for _ in range(self.pairs):
            asynchronous.append(self.run(EMULATED, apart | self._length("async")).rate / self.scale)
            disaggregated.append(self.run(EMULATED, apart | self._length("sync")).rate / self.scale)
            colocated.append(self.run(EMULATED, whole | self._length("sync")).rate / self.scale)
        what = f"EMULATED {model}, {gpus} GPUs ({split}:{gpus - split})"
        self.report.add(f"{what}: async", asynchronous, "steps/s")
        self.report.add(f"{what}: sync disaggregated", disaggregated, "steps/s")
        self.report.add(f"{what}: sync colocated", colocated, "steps/s")
        reached = [value / bound for value in asynchronous]
        self.report.add(f"{what}: async over ideal", reached, "", ">= 0.95", statistics.median(reached) >= 0.95)
        over = [a / b for a, b in zip(asynchronous, colocated, strict=True)]
        self.report.add(f"{what}: async over sync colocated", over, "x", f"paper {CLAIMED[model, gpus]}x (published)")

    def _length(self, mode: str) -> dict[str, Any]:
        return {"run.mode": mode, "learner.updates": self.updates}

    def overlap(self) -> None:
        """Sessions in flight and the bounded wait, where simulation and inference take equally long. Emulated."""
        costs = {"steps": 80, "step_seconds": 0.001, "slot_seconds": 0.02 / 32, "shortest": 40}
        policy = {"act_seconds": 0.008, "act_row_seconds": 0.16 / 32, "train_row_seconds": 1e-5}
        base = {"sim.options": costs, "policy.options": policy, "learner.updates": self.updates}
        for sessions, wait in ((1, 0.0), (2, 0.0), (4, 0.0), (4, 0.01), (4, 0.04)):
            slots = {"sim.sessions": sessions, "rollout.sessions_per_sim": sessions, "sim.slots": 32 // sessions}
            rates_of = [self.run(EMULATED, base | slots | {"rollout.batch_wait": wait}).rate for _ in range(self.pairs)]
            note = "32 slots in all; a policy call takes as long as a chunk"
            self.report.add(f"EMULATED {sessions} sessions, batch_wait {wait} s", rates_of, "steps/s", note=note)

    def ablation(self) -> None:
        """What each part is worth: pairs with and without it. Emulated devices at a balanced split."""
        base = devices(2000, 2000) | {"learner.updates": self.updates}
        changes: dict[str, dict[str, Any]] = {
            "overlapping lanes (mode sync)": {"run.mode": "sync"},
            "double buffering (one session)": {
                "sim.sessions": 1,
                "rollout.sessions_per_sim": 1,
                "sim.slots": 2 * SLOTS,
            },
            "shared memory (transport grpc)": {"rollout.transport": "grpc", "sim.transport": "grpc"},
            "spare policy (lanes 1 and 2 merged)": {"rollout.spare_policy": False},
            "staleness (0 in async)": {"learner.staleness": 0},
        }
        for what, change in changes.items():
            losses = []
            for _ in range(self.pairs):
                whole, without = self.run(EMULATED, base).rate, self.run(EMULATED, base | change).rate
                losses.append(100 * (1 - without / whole))
            self.report.add(f"EMULATED loss without {what}", losses, "%")

    def pushcube(self) -> None:
        """PushCube on two cores, one per side, weights frozen: async against both kinds of sync."""
        recipe = ROOT / "recipes" / "pushcube.toml"
        warm = self._warm(recipe)
        for size, policy in warm.items():
            frozen = {
                "sft.init": str(policy), "policy.size": size, "learner.learning_rate": 1e-12,
                "learner.updates": self.updates, "eval.before": False, "eval.episodes": 1, "eval.videos": 0,
                "run.solved": 0.0, "run.sims": 1, "learner.epochs": {"xs": 8, "s": 4, "m": 2}[size],
            }  # fmt: skip
            self._pushcube(size, recipe, frozen)

    def _pushcube(self, size: str, recipe: Path, frozen: dict[str, Any]) -> None:
        sides = {"learner": {1}, "": {0}}
        ratios, bounds, colocated = [], [], []
        cpu: dict[str, float] = {}
        for _ in range(self.pairs):
            a = self.run(recipe, frozen | {"run.mode": "async"}, sides)
            b = self.run(recipe, frozen | {"run.mode": "sync"}, sides)
            c = self.run(recipe, frozen | {"run.mode": "sync", "run.sims": 2, "learner.threads": 2})
            rest = b.update_seconds - b.training_seconds
            ratios.append(a.rate / b.rate)
            bounds.append(b.update_seconds / max(rest, b.training_seconds))
            colocated.append(a.rate / c.rate)
            cpu = dict(a.cpu)
        low, high = interval90([ratio / bound for ratio, bound in zip(ratios, bounds, strict=True)])
        bound = self.report.add(f"PushCube {size}: bound of async over sync disaggregated", bounds, "x")
        note = f"90 % interval of ratio over bound: {low:.3f} to {high:.3f}"
        met = low >= 0.9 if len(ratios) >= 8 else None
        self.report.add(
            f"PushCube {size}: async over sync disaggregated", ratios, "x", ">= 0.9 of the bound", met, note
        )
        if bound is not None and bound >= 1.95:
            self.report.add(f"PushCube {size}: the same, bound 1.95 or more", ratios, "x", ">= 1.8", min(ratios) >= 1.8)
        self.report.add(f"PushCube {size}: async over sync colocated, equal cores", colocated, "x")
        for role, seconds in sorted(cpu.items()):
            self.report.add(f"PushCube {size}: CPU of {role}, async", seconds, "s/1,000 steps")

    def _warm(self, recipe: Path) -> dict[str, Path]:
        """A half trained policy of each size, cloned once from a wrong expert."""
        policies = {}
        for size in self.sizes:
            settings = {"policy.size": size, "demos.bias": 0.7, "learner.updates": 4, "eval.before": False,
                        "eval.episodes": 1, "eval.videos": 0, "run.solved": 0.0}  # fmt: skip
            policies[size] = self.run(recipe, settings).folder / "policy"
        return policies


def rates(points: tuple[tuple[int, int, float], ...]) -> tuple[float, float]:
    """Env steps per second of one rollout and one learner GPU that explain two synchronous disaggregated speeds.

    Each is 1 / (1 / (rollouts * r) + 1 / (learners * l)): two linear equations in 1 / r and 1 / l.
    """
    (r1, l1, s1), (r2, l2, s2) = points
    determinant = 1 / (r1 * l2) - 1 / (r2 * l1)
    x = (1 / (s1 * l2) - 1 / (s2 * l1)) / determinant
    y = (1 / (s2 * r1) - 1 / (s1 * r2)) / determinant
    return 1 / x, 1 / y


def devices(rollout: float, learner: float) -> dict[str, Any]:
    """Settings of emulated devices with these speeds in env steps per second.

    Simulation carries the whole time of rollout; two sessions of SLOTS share its device.
    """
    return {
        "sim.slots": SLOTS,
        "sim.options": {"steps": 80, "step_seconds": SLOTS / rollout, "shortest": 40},
        "policy.options": {"train_row_seconds": CHUNK / learner},
        "learner.group_size": 4,
        "learner.groups_per_update": 6,
    }


def main() -> None:
    end_in_order()
    parts: dict[str, Callable[[Bench], None]] = {
        "spans": Bench.spans,
        "emulated": Bench.emulated,
        "overlap": Bench.overlap,
        "ablation": Bench.ablation,
        "pushcube": Bench.pushcube,
    }
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--scale", type=float, default=4.0, help="emulated devices are so many times as fast")
    parser.add_argument("--sizes", nargs="+", default=["xs", "s", "m"])
    parser.add_argument("--parts", nargs="+", choices=list(parts), default=list(parts))
    given = parser.parse_args()
    report = Report("swimlane")
    with tempfile.TemporaryDirectory(prefix="dvla-bench-") as folder:
        bench = Bench(report, Path(folder), given.quick, given.pairs, given.scale, given.sizes)
        for part in given.parts:
            parts[part](bench)
    report.write(given.json)


if __name__ == "__main__":
    main()
