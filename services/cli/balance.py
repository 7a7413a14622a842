"""Which numbers of simulators and workers suit a run, found while it runs: a damped climb on measured throughput.

Looks at windows of samples. When several in a row name the same bottleneck, one process is added or taken away; after
it has settled, the new speed is compared with the old one, and a change that did not help is taken back and not tried
again for a while. Starts and stops nothing itself.
"""

import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from services.cli.advice import diagnose
from services.cli.lanes import seconds_between, shares
from services.cli.samples import Sample
from services.cli.summary import TRAINING, Summary

WORSE = 0.03
"""A change that costs more than this share of the speed is taken back."""
WAITS = 0.3
"""Sampling that waits this much for the learner has simulators to spare."""


@dataclass(frozen=True)
class Split:
    """Processes of a run on this machine."""

    sims: int
    rollouts: int

    def moved(self, step: "Step") -> "Split":
        """One step further."""
        return replace(self, **{step.what: getattr(self, step.what) + step.by})


@dataclass(frozen=True)
class Step:
    """One more or one fewer of something."""

    what: str
    by: int


@dataclass(frozen=True)
class Change:
    """Another split, and why."""

    split: Split
    reason: str


@dataclass
class Balance:
    """Give it samples; it says when to change the split. most: upper limits; the lower ones are 1.

    window, settle, rest: seconds that are looked at together, that a change takes to show, and that a step which did
    not help is left alone. patience: windows in a row that must agree.
    """

    split: Split
    most: Split
    window: float = 10.0
    settle: float = 10.0
    rest: float = 300.0
    patience: int = 2
    _samples: deque[Sample] = field(default_factory=deque)
    _votes: tuple[Step | None, int] = (None, 0)
    _trial: tuple[Step, float] | None = None
    _refused: dict[Step, float] = field(default_factory=dict)
    _quiet_until: float = 0.0

    def look(self, sample: Sample | None) -> Change | None:
        """What to change now, if anything."""
        if sample is None or sample.stage != TRAINING or sample.store is None or sample.t < self._quiet_until:
            return None
        if self._samples and sample.t <= self._samples[-1].t:
            return None
        self._samples.append(sample)
        if sample.t - self._samples[0].t < self.window or _updates(self._samples) < 2:
            return None
        window = list(self._samples)
        self._samples.clear()
        return self._judge(window) if self._trial else self._propose(window)

    def hold(self, sample: Sample) -> None:
        """What was started is not up yet: it settles from now on."""
        self._samples.clear()
        self._quiet_until = sample.t + self.settle

    def _judge(self, window: Sequence[Sample]) -> Change | None:
        """Keep the last change, or take it back."""
        assert self._trial is not None
        (step, before), self._trial = self._trial, None
        after = _speed(window)
        if after >= (1 - WORSE) * before:
            return None
        self._refused[step] = window[-1].t + self.rest
        back = Step(step.what, -step.by)
        return self._change(back, window, f"{before:.0f} env steps/s before it, {after:.0f} after")

    def _propose(self, window: Sequence[Sample]) -> Change | None:
        lanes = shares(seconds_between(window))
        found = diagnose(Summary(lanes=lanes, updates=_updates(window)), cores=0)
        step = {"simulation": Step("sims", 1), "inference": Step("rollouts", 1)}.get(found.bottleneck)
        if found.bottleneck == "learner" and lanes["sampling"].idle.get("admission", 0.0) > WAITS:
            step = Step("sims", -1)  # it only takes cores from the learner
        if step is None or not self._allowed(step, window[-1].t):
            self._votes = (None, 0)
            return None
        same, votes = self._votes
        self._votes = (step, votes + 1 if same == step else 1)
        if self._votes[1] < self.patience:
            return None
        self._trial = (step, _speed(window))
        return self._change(step, window, found.bottleneck)

    def _allowed(self, step: Step, now: float) -> bool:
        wanted = getattr(self.split.moved(step), step.what)
        return 1 <= wanted <= getattr(self.most, step.what) and now >= self._refused.get(step, 0.0)

    def _change(self, step: Step, window: Sequence[Sample], reason: str) -> Change:
        self._votes = (None, 0)
        self._quiet_until = window[-1].t + self.settle
        self.split = self.split.moved(step)
        return Change(self.split, reason)


def _updates(window: Sequence[Sample]) -> int:
    first, last = window[0].store, window[-1].store
    return last.update - first.update if first and last else 0


def _speed(window: Sequence[Sample]) -> float:
    """Trained env steps per second, from the first new update to the last: updates come in lumps."""
    marks = [(sample.t, sample.store) for sample in window if sample.store is not None]
    jumps = [(t, store) for (_, before), (t, store) in itertools.pairwise(marks) if store.update > before.update]
    if len(jumps) < 2:
        jumps = [marks[0], marks[-1]]
    (t0, first), (t1, last) = jumps[0], jumps[-1]
    return (last.counters.get("trained_steps", 0) - first.counters.get("trained_steps", 0)) / (t1 - t0)
