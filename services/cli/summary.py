"""The figures of a run: success before and after, speed, idle shares, staleness, and the line that sums them up."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from services.cli.lanes import LANES, LaneShare, add_up, seconds_between, shares
from services.cli.samples import Sample, StoreSample

TRAINING = "training"
"""The stage whose time and steps count for speed and idle shares."""


@dataclass(frozen=True)
class Summary:
    """What the training stage of a run came to. Rates are per second of its wall time.

    staleness: histogram over trained groups, index = updates.
    """

    seconds: float = 0.0
    updates: int = 0
    trained_steps: int = 0
    accepted_steps: int = 0
    lanes: Mapping[str, LaneShare] = field(default_factory=dict)
    staleness: tuple[int, ...] = ()
    restarts: Mapping[str, int] = field(default_factory=dict)

    @property
    def steps_per_second(self) -> float:
        """Trained env steps per second of training wall time."""
        return self.trained_steps / self.seconds if self.seconds else 0.0

    @property
    def staleness_mean(self) -> float:
        """Mean staleness of trained groups, in updates."""
        total = sum(self.staleness)
        return sum(index * count for index, count in enumerate(self.staleness)) / total if total else 0.0

    @property
    def staleness_max(self) -> int:
        """Largest staleness of a trained group, in updates."""
        return max((index for index, count in enumerate(self.staleness) if count), default=0)


def training_spans(samples: Sequence[Sample]) -> list[list[Sample]]:
    """The samples of the training stage, one span for each time it was resumed.

    A span begins with the last sample before it, which holds the counters at its start, if it is of the same launch.
    Samples without the store's word are left out.
    """
    spans: list[list[Sample]] = []
    before: Sample | None = None
    training = False
    for sample in samples:
        if sample.store is None:
            continue
        same = before is not None and sample.launch == before.launch
        if sample.stage == TRAINING and not (training and same):
            spans.append([before] if same and before else [])
        training = sample.stage == TRAINING
        if training:
            spans[-1].append(sample)
        before = sample
    return [span for span in spans if len(span) > 1]


def steady(span: Sequence[Sample]) -> Sequence[Sample]:
    """A span without its head, where nothing could be trained yet, and its tail, where nothing was left to train.

    What the lanes wait for there says nothing about what holds a run back. A span of few updates stays whole.
    """
    updates = [_store(sample).update for sample in span]
    if updates[-1] - updates[0] < 3:
        return span
    head = max(index for index, update in enumerate(updates) if update == updates[0])
    return span[head : updates.index(updates[-1]) + 1]


def summarise(samples: Sequence[Sample]) -> Summary:
    """The figures of the training stage."""
    restarts = samples[-1].restarts if samples else {}
    ends = [(span[-1].t - span[0].t, _store(span[0]), _store(span[-1])) for span in training_spans(samples)]
    if not ends:
        return Summary(restarts=restarts)
    lane_seconds = add_up(seconds_between(steady(span)) for span in training_spans(samples))
    return Summary(
        seconds=sum(seconds for seconds, _, _ in ends),
        updates=sum(max(0, end.update - start.update) for _, start, end in ends),
        trained_steps=sum(_gained(start, end, "trained_steps") for _, start, end in ends),
        accepted_steps=sum(_gained(start, end, "accepted_steps") for _, start, end in ends),
        lanes=shares(lane_seconds),
        staleness=_staleness(ends[0][1].staleness, ends[-1][2].staleness),
        restarts=restarts,
    )


def final_line(before: float | None, after: float, starts: int, summary: Summary) -> str:
    """The one line that ends a run. Its form is a promise to whoever reads it by machine."""
    lanes = "/".join(f"{100 * _idle(summary, lane):.0f}" for lane in LANES)
    return (
        f"success {'n/a' if before is None else f'{before:.2f}'} -> {after:.2f} ({starts} held-out starts), "
        f"{summary.steps_per_second:.0f} env steps/s, lanes idle {lanes} %, "
        f"staleness mean {summary.staleness_mean:.1f} max {summary.staleness_max}"
    )


def _idle(summary: Summary, lane: str) -> float:
    return summary.lanes[lane].idle_share if lane in summary.lanes else 0.0


def _store(sample: Sample) -> StoreSample:
    return sample.store or StoreSample()


def _gained(start: StoreSample, end: StoreSample, counter: str) -> int:
    return max(0, end.counters.get(counter, 0) - start.counters.get(counter, 0))


def _staleness(start: tuple[int, ...], end: tuple[int, ...]) -> tuple[int, ...]:
    earlier = start + (0,) * (len(end) - len(start))
    return tuple(max(0, b - a) for a, b in zip(earlier, end, strict=False))
