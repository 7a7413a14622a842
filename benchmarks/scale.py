"""How far the services carry: environments, and devices far beyond this machine. Emulated, but for the real curve.

    python -m benchmarks.scale --json scale.json       everything; half an hour on two quiet cores
    python -m benchmarks.scale --quick                 a look: few points, short runs
    python -m benchmarks.scale --parts devices         only this part

Rows that begin with "EMULATED" run the real services around devices that only wait. A device is a share of a batch:
one simulator process, one worker and one learner stand for all of them, so it is messages, trajectories and groups
that grow, not processes.
"""

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.common import Report, end_in_order
from benchmarks.runs import EMULATED, ROOT, Measured, train
from services.cli.planning.inventory import GIB, Inventory, NodeSection
from services.cli.planning.model import Use, predict
from services.cli.planning.profile import Curve, Profile
from services.cli.planning.search import find_plan

CHUNK, STEPS = 8, 80
SIM = {"base": 0.4, "each": 0.0005}
"""Seconds of a control step of n environments on the emulated simulating device: base + each * n."""
ACT = {"base": 0.5, "each": 0.004}
"""Seconds of a policy call on n rows."""
TRAIN = 0.001
"""Seconds of the learner for each env step."""
SLOTS_A_DEVICE, STEP_SECONDS = 24, 1.09
"""A rollout device of 22 env steps per second, as the baselines' published speeds have it for pi0.5."""
LEARNER_RATE = 130.0
"""Env steps per second of a learner device, from the same."""


class Bench:
    """The parts of the benchmark."""

    def __init__(self, report: Report, out: Path, quick: bool, scale: float) -> None:
        self.report, self.out, self.quick, self.scale = report, out, quick, scale
        self.updates = 6 if quick else 16
        self._number = 0

    def run(self, recipe: Path, settings: dict[str, Any]) -> Measured:
        self._number += 1
        return train(recipe, self.out, f"run-{self._number}", settings | {"learner.updates": self.updates})

    def environments(self) -> None:
        """384 to 3,072 environments on three devices, and whether the planner knows the best number."""
        counts = (384, 1536) if self.quick else (384, 768, 1536, 3072)
        rates = {envs: self._swept(envs) for envs in counts}
        for envs, rate in rates.items():
            self.report.add(f"EMULATED {envs} environments", rate, "steps/s", note=f"predicted {predicted(envs):,.0f}")
        chosen = find_plan(profile(counts), three_devices()).best
        reached = rates.get(chosen.envs) or self._swept(chosen.envs)
        best = max(*rates.values(), reached)
        met = reached >= 0.95 * best
        what = f"EMULATED plan's choice ({chosen.envs} environments) over the best measured"
        self.report.add(what, reached / best, "", ">= 0.95", met, note=f"it predicts {chosen.rate:,.0f} steps/s")

    def _swept(self, envs: int) -> float:
        return self.run(EMULATED, self._sweep(envs)).rate / self.scale

    def _sweep(self, envs: int) -> dict[str, Any]:
        half, fast = envs // 2, self.scale
        sim = {"steps": STEPS, "step_seconds": SIM["base"] / fast, "slot_seconds": SIM["each"] / fast, "shortest": 40}
        policy = {"act_seconds": ACT["base"] / fast, "act_row_seconds": ACT["each"] / fast,
                  "train_row_seconds": TRAIN * CHUNK / fast}  # fmt: skip
        return {
            "sim.slots": half, "sim.options": sim, "policy.options": policy, "rollout.max_batch": half,
            "learner.group_size": 8, "learner.groups_per_update": max(4, envs // 64), "learner.micro_rows": 1024,
        }  # fmt: skip

    def devices(self) -> None:
        """CPU of our services for each env step, while devices grow: flat until the cores are full."""
        for devices in (16, 64) if self.quick else (16, 64, 256, 1024):
            measured = self.run(EMULATED, self._devices(devices))
            ideal = min(0.75 * devices * 22.0, 0.25 * devices * LEARNER_RATE)
            what = f"EMULATED {devices} devices"
            self.report.add(f"{what}: throughput", measured.rate, "steps/s")
            self.report.add(f"{what}: overhead", 100 * (1 - measured.rate / ideal), "%", "< 5 % until cores are full")
            for role, seconds in sorted(measured.cpu.items()):
                self.report.add(f"{what}: CPU of {role}", seconds, "s/1,000 steps")
            lanes = ", ".join(f"{name} {100 * lane.busy:.0f} %" for name, lane in measured.lanes.items())
            self.report.add(f"{what}: cores busy", sum(measured.cpu.values()) * measured.rate / 1000, "", note=lanes)

    def _devices(self, devices: int) -> dict[str, Any]:
        sampling = devices * 3 // 4
        slots = sampling * SLOTS_A_DEVICE // 2
        return {
            "sim.slots": slots,
            # Half of the slots of each device are stepped at a time, so a step takes half as long.
            "sim.options": {"steps": STEPS, "step_seconds": STEP_SECONDS / 2},
            "policy.options": {"train_row_seconds": CHUNK / (LEARNER_RATE * devices / 4)},
            "rollout.max_batch": slots,
            "learner.group_size": 8,
            "learner.groups_per_update": max(2, sampling * SLOTS_A_DEVICE // 16),
            "learner.micro_rows": 4096,
        }

    def real(self) -> None:
        """1 to 64 real environments of PushCube on this machine's cores."""
        recipe = ROOT / "recipes" / "pushcube.toml"
        short = {"eval.before": False, "eval.episodes": 1, "eval.videos": 0, "run.solved": 0.0, "demos.bias": 0.7}
        warm = self.run(recipe, short).folder / "policy"
        for envs in (2, 8) if self.quick else (2, 8, 16, 32, 64):
            settings = short | {"sft.init": str(warm), "run.sims": 1, "sim.slots": envs // 2}
            self.report.add(f"PushCube, {envs} environments", self.run(recipe, settings).rate, "steps/s")


def profile(counts: tuple[int, ...]) -> Profile:
    """What `dvla profile` would measure of the emulated devices: the waits themselves."""
    halves = sorted({count // 2 for count in counts})
    sizes = tuple(sorted({*halves, *counts}))
    sim = Curve(sizes, tuple(SIM["base"] + SIM["each"] * n for n in sizes))
    act = Curve(sizes, tuple(ACT["base"] + ACT["each"] * n for n in sizes))
    # Simulator and policy would not fit on one device, as in the runs below.
    return Profile(
        "emulated",
        CHUNK,
        sim,
        act,
        TRAIN,
        update_steps=20_000,
        emulated=True,
        sim_bytes=50 * GIB,
        policy_bytes=50 * GIB,
    )


def three_devices() -> Inventory:
    """One for simulators, one for the policy, one for the learner."""
    return Inventory((NodeSection(name="emulated", gpus=3, memory_gb=80),))


def predicted(envs: int) -> float:
    """The planner's model of that split."""
    there = three_devices()
    use = Use(there.nodes[0], 1, learner=1, sims=1, workers=1)
    prediction = predict(profile((envs,)), there, "apart", envs, [use])
    assert prediction is not None
    return prediction.rate


def main() -> None:
    end_in_order()
    parts: dict[str, Callable[[Bench], None]] = {
        "environments": Bench.environments,
        "devices": Bench.devices,
        "real": Bench.real,
    }
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--scale", type=float, default=2.0, help="emulated devices of the sweep are so much faster")
    parser.add_argument("--parts", nargs="+", choices=list(parts), default=list(parts))
    given = parser.parse_args()
    report = Report("scale")
    with tempfile.TemporaryDirectory(prefix="dvla-bench-") as folder:
        bench = Bench(report, Path(folder), given.quick, given.scale)
        for part in given.parts:
            parts[part](bench)
    report.write(given.json)


if __name__ == "__main__":
    main()
