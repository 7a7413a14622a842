"""Parts of the weight benchmark that need one process only: what a swap costs sampling, and deltas."""

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

import numpy as np
import torch
from torch import Tensor

from benchmarks.common import Report
from services.common import bundle, delta
from services.common.bundle import Version, plan
from services.common.telemetry import Telemetry
from services.policies.base import Policy
from services.rollout.worker.loading import InPlaceSink
from services.rollout.worker.policy_runner import PolicyRunner

MB = 1024 * 1024


class Tensors:
    """As much of a policy as loading touches."""

    def __init__(self, state: dict[str, Tensor]) -> None:
        self._state = state

    def trainable_state(self) -> dict[str, Tensor]:
        return self._state


def pauses(report: Report, rounds: int) -> None:
    """How long sampling stands still for a swap, without and with a spare policy."""
    size, count = 256 * MB, 32
    state = {f"layer.{i}": torch.ones(size // count // 2, dtype=torch.bfloat16) for i in range(count)}
    layout = plan((name, "bfloat16", tuple(t.shape)) for name, t in state.items())
    source = np.ones(layout.length, np.uint8)
    paused, copied = list[float](), list[float]()

    @contextmanager
    def pause() -> Iterator[None]:
        started = time.monotonic()
        yield
        paused.append(time.monotonic() - started)

    policy = cast(Policy, Tensors(state))
    sink = InPlaceSink(lambda manifest: policy, lambda manifest, loaded: None, pause)
    views = {t.name: source[t.offset : t.offset + t.length] for t in layout.tensors}
    for update in range(rounds + 2):
        manifest = bundle.seal(layout, "policy", Version(1, update), source)
        sink.begin(manifest)
        sink.copy(source)
        sink.finish()
        sink.abort()
        started = time.monotonic()
        for name, tensor in state.items():
            tensor.view(torch.uint8).numpy()[:] = views[name]
        copied.append(time.monotonic() - started)
    beyond = [1e3 * (pause - copy) for pause, copy in zip(paused[2:], copied[2:], strict=True)]
    report.add(
        "256 MB: sampling pause per swap beyond the copy, no spare",
        beyond,
        "ms",
        "< 1 ms",
        statistics.median(beyond) < 1,
    )
    runner = PolicyRunner(Telemetry("rollout", "bench"), 8, 1, "cpu")
    swaps = []
    for update in range(1000):
        started = time.monotonic()
        runner.swap((1, update), policy)
        swaps.append(1e3 * (time.monotonic() - started))
    runner.close()
    report.add("sampling pause per swap with a spare policy", swaps, "ms", "0", statistics.median(swaps) < 0.01)


def deltas(report: Report) -> None:
    """bfloat16 weights whose float32 masters move by up to the learning rate: density, size, speed, dense instead."""
    weights = torch.randn(16_000_000, generator=torch.Generator().manual_seed(0)).mul_(0.02)
    layout = plan([("w", "bfloat16", (len(weights),))])
    old = packed(layout, weights)
    rule = delta.DeltaRule()
    for rate in (1e-6, 3e-6, 1e-5, 3e-5, 1e-4):
        moved = weights + (torch.rand(len(weights), generator=torch.Generator().manual_seed(1)) * 2 - 1) * rate
        new = packed(layout, moved)
        started = time.monotonic()
        coded = delta.encode(layout, Version(1, 1), old, new)
        encoding = time.monotonic() - started
        assert coded is not None
        restored = old.copy()
        started = time.monotonic()
        delta.apply(layout, restored, coded.data)
        applying = time.monotonic() - started
        exact = restored.tobytes() == new.tobytes()
        each = len(coded.data) / coded.changed
        report.add(
            f"delta at learning rate {rate:.0e}: bytes per changed element",
            each,
            "B",
            "<= 3.0, bit-exact",
            each <= 3.0 and exact,
            f"density {coded.density:.1%}, {len(coded.data) / layout.length:.1%} of dense, encode "
            f"{layout.length / encoding / 1e9:.2f} GB/s, apply {layout.length / applying / 1e9:.2f} GB/s",
        )
        dense = delta.encode(layout, Version(1, 1), old, new, rule.density) is None
        words = "dense" if dense else "delta"
        report.add(
            f"delta at learning rate {rate:.0e}: {words} is chosen",
            100 * coded.density,
            "% changed",
            "dense above 10 %",
            dense is (coded.density > rule.density),
        )


def packed(layout: bundle.Layout, weights: Tensor) -> np.ndarray:
    """Rounded to bfloat16, flat."""
    buffer = np.zeros(layout.length, np.uint8)
    raw = weights.to(torch.bfloat16).view(torch.uint8).numpy()
    buffer[: len(raw)] = raw
    return buffer
