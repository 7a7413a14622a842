"""Lane 1's inference: one thread that joins the waiting rows of all sessions into one policy call.

Weights swap here and only here, between two calls, by exchanging a reference.
"""

import asyncio
import queue
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from services.common.errors import DvlaError
from services.common.spec import Array, FloatArray
from services.common.telemetry import BUSY, Telemetry
from services.policies.base import Act, Mode, Policy, numpy_record
from services.policies.noise import RowNoise

VersionKey = tuple[int, int]
"""(epoch, update)."""
Call = tuple[Sequence["Row"], "Future[list[Chunk]]"]
"""Rows that wait, and where their chunks go."""


@dataclass(frozen=True)
class Row:
    """One row of a policy call. pin: evaluate exactly this version; None takes the newest."""

    observation: Mapping[str, Array]
    instruction: str
    noise_key: str
    mode: Mode
    pin: VersionKey | None = None


@dataclass(frozen=True)
class Chunk:
    """What the policy answered for one row. action float32 [C, D] in environment units, unclipped."""

    action: FloatArray
    log_prob: FloatArray
    record: dict[str, Array]
    value: float | None
    version: VersionKey


class PolicyRunner:
    """Runs policy calls in a thread of its own. `swap` and `pin` may be called from any thread.

    batch_wait: seconds that the first rows of a call wait for others at most. callers: how many may ask at the same
    time; once all of them have, waiting would bring no more rows. 0 means not known.
    """

    def __init__(self, telemetry: Telemetry, max_batch: int, threads: int, device: str) -> None:
        self._telemetry, self._max_batch, self._threads = telemetry, max_batch, threads
        self.batch_wait, self.callers = 0.0, 0
        self._device = torch.device(device)
        self._waiting: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
        self._live: tuple[VersionKey, Policy] | None = None
        self._pinned: dict[VersionKey, Policy] = {}
        self._damage = ""
        self._calling = threading.Lock()
        self._lane = telemetry.lane("inference", "rows")
        self._thread = threading.Thread(target=self._run, name="inference", daemon=True)
        self._thread.start()

    @property
    def version(self) -> VersionKey | None:
        """The version that the next call will use."""
        live = self._live
        return live[0] if live else None

    def swap(self, version: VersionKey, policy: Policy) -> Policy | None:
        """Use this policy from the next call on; returns the one that it replaces, free after `settle`."""
        previous, self._live = self._live, (version, policy)
        self._damage = ""
        return previous[1] if previous else None

    @contextmanager
    def paused(self) -> Iterator[None]:
        """No policy call runs inside the block."""
        with self._calling:
            yield

    def poison(self, reason: str) -> None:
        """The live policy is damaged: refuse calls until the next `swap`."""
        self._damage = reason
        self._telemetry.count("policies_poisoned")

    def settle(self) -> None:
        """Wait until no call is running that began before the last `swap`, so that the replaced policy is free."""
        with self._calling:
            return

    def pin(self, version: VersionKey, policy: Policy) -> None:
        """Keep a version for evaluation; older pins are dropped."""
        self._pinned = {**dict(list(self._pinned.items())[-1:]), version: policy}

    def is_pinned(self, version: VersionKey) -> bool:
        """Whether rows may ask for this version."""
        return version in self._pinned

    async def act(self, rows: Sequence[Row]) -> list[Chunk]:
        """One chunk per row."""
        future: Future[list[Chunk]] = Future()
        self._waiting.put((rows, future))
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        """End the thread."""
        self._waiting.put(None)
        self._thread.join(timeout=10)

    def _run(self) -> None:
        torch.set_num_threads(self._threads)
        while (first := self._waiting.get()) is not None:
            calls = self._joined(first)
            # A session that ended meanwhile has cancelled its future.
            with self._lane.during(BUSY):
                self._serve([call for call in calls if call[1].set_running_or_notify_cancel()])

    def _joined(self, first: Call) -> list[Call]:
        """The first call and what others ask meanwhile: what waits already, and what comes within the bounded wait."""
        calls, deadline = [first], time.monotonic() + self.batch_wait
        while sum(len(rows) for rows, _ in calls) < self._max_batch:
            patient = self.batch_wait > 0 and not 0 < self.callers <= len(calls)
            left = deadline - time.monotonic() if patient else 0.0
            try:
                more = self._waiting.get(timeout=left) if left > 0 else self._waiting.get_nowait()
            except queue.Empty:
                break
            if more is None:
                self._waiting.put(None)
                break
            calls.append(more)
        return calls

    def _serve(self, calls: Sequence[Call]) -> None:
        try:
            with self._calling:
                chunks = self._answer([row for rows, _ in calls for row in rows])
        except Exception as error:  # noqa: BLE001 - whoever waits raises it
            if len(calls) > 1:  # one session's bad row must not fail the others
                for call in calls:
                    self._serve([call])
            else:
                calls[0][1].set_exception(error)
            return
        done = 0
        for rows, future in calls:
            future.set_result(chunks[done : done + len(rows)])
            done += len(rows)

    def _answer(self, rows: Sequence[Row]) -> list[Chunk]:
        """Group rows by what must be the same in one call: version and mode."""
        groups: dict[tuple[VersionKey | None, Mode], list[int]] = {}
        for index, row in enumerate(rows):
            groups.setdefault((row.pin, row.mode), []).append(index)
        out: dict[int, Chunk] = {}
        for (pin, mode), group in groups.items():
            version, policy = self._policy(pin)
            for start in range(0, len(group), self._max_batch):
                part = group[start : start + self._max_batch]
                out |= zip(part, self._call(version, policy, mode, [rows[i] for i in part]), strict=True)
        return [out[index] for index in range(len(rows))]

    def _policy(self, pin: VersionKey | None) -> tuple[VersionKey, Policy]:
        if pin is not None:
            if pin not in self._pinned:
                raise DvlaError(f"version {pin} is not loaded for evaluation")
            return pin, self._pinned[pin]
        if self._live is None:
            raise DvlaError("no weights yet")
        if self._damage:
            raise DvlaError(f"the weights are damaged: {self._damage}; waiting for the next version")
        return self._live

    def _call(self, version: VersionKey, policy: Policy, mode: Mode, rows: Sequence[Row]) -> list[Chunk]:
        names = rows[0].observation
        observation = {name: np.stack([row.observation[name] for row in rows]) for name in names}
        inputs = policy.preprocess(observation, [row.instruction for row in rows])
        with torch.inference_mode():
            act = policy.act(inputs, mode, RowNoise([row.noise_key for row in rows], self._device))
            actions = policy.postprocess(act.actions)
        self._telemetry.count("policy_calls")
        self._telemetry.count("policy_rows", len(rows))
        return _split(act, actions, version)


def _split(act: Act, actions: FloatArray, version: VersionKey) -> list[Chunk]:
    record = numpy_record(act.record)
    log_prob = act.log_prob.detach().float().cpu().numpy()
    value = None if act.value is None else act.value.detach().float().cpu().numpy()
    return [
        Chunk(
            action=actions[row],
            log_prob=log_prob[row],
            record={name: array[row] for name, array in record.items()},
            value=None if value is None else float(value[row]),
            version=version,
        )
        for row in range(len(actions))
    ]
