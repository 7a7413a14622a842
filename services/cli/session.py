"""A running set of roles as one object: supervised, polled, shown, and always ended.

The launcher's main thread waits only through `wait` and `until`, which supervise meanwhile and notice Ctrl-C.
"""

import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from types import TracebackType
from typing import Self, TypeVar

from services.cli.board import Board
from services.cli.child import Child, ChildSpec, describe_exit, last_error
from services.cli.interrupts import Interrupts
from services.cli.progress import VARIABLE, read_progress
from services.cli.runfolder import RunFolder, write_json
from services.cli.samples import Sample
from services.cli.spans import COLLECT_SECONDS, SpanFile, SpanReader
from services.cli.status import Poller, RunClient
from services.cli.supervisor import RestartPolicy, RoleFailed, Supervisor
from services.common.errors import Exhausted, NotFound, Unavailable

TICK_SECONDS = 0.1
SAMPLE_SECONDS = 1.0
"""Samples are kept this far apart ..."""
SAMPLE_SHARE = 1 / 2000
"""... or by this share of the run so far: a run of days keeps some thousands."""

T = TypeVar("T")


class Session:
    """Enter it, add children, wait; leaving it ends every child, in order if there is time for it."""

    def __init__(self, run: RunFolder, board: Board, interrupts: Interrupts, policy: RestartPolicy) -> None:
        self.run, self.board = run, board
        self._interrupts = interrupts
        self._supervisor = Supervisor(self._happened, policy)
        self._poller: Poller | None = None
        self._client: RunClient | None = None
        self._kept = self._spans_kept = float("-inf")
        self._spans: SpanReader | None = None
        self._span_file = SpanFile(run.spans)
        self._evaluation = ""
        self.latest: Sample | None = None
        self._launch = int(run.read_state().get("launches", 0)) + 1
        run.update_state(launches=self._launch)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self._poller is not None:
                self._poller.stop()
            self.board.roles = ()
            self.board.enter("stopping")
            self._supervisor.stop(self._interrupts.hurry)
        finally:
            self._supervisor.kill()
            if self._client is not None:
                self._client.close()
            self.run.live.unlink(missing_ok=True)

    def start(self, specs: Iterable[ChildSpec]) -> None:
        """Start and supervise these children."""
        self._supervisor.add(specs)

    def stop(self, names: Iterable[str]) -> None:
        """End these children for good."""
        for name in names:
            self._supervisor.remove(name)

    def finished(self, name: str) -> bool:
        """Whether a child that may finish has finished."""
        return self._supervisor.children[name].finished

    def again(self, name: str) -> None:
        """Start a child again that has finished."""
        self._supervisor.children[name].finished = False

    def poll(self, name: str, addresses: Mapping[str, str]) -> None:
        """Begin to sample the roles at these addresses; `name` is the run's name in the store."""
        self._client = RunClient(name, addresses)
        self._spans = SpanReader(self._client.channels, time.monotonic() - self.board.elapsed())
        write_json(self.run.live, {"run": name, "addresses": dict(addresses)})
        self._poller = Poller(self._sample, self._keep)
        self._poller.start()

    def follow(self, name: str, address: str) -> None:
        """Sample one more role."""
        if self._client is not None and self._spans is not None:
            self._client.add(name, address)
            self._spans.follow(self._client.channels)

    def forget(self, name: str) -> None:
        """Sample a role no more."""
        if self._client is not None and self._spans is not None and name in self._client.channels:
            self._client.drop(name)
            self._spans.follow(self._client.channels)

    def enter(self, stage: str, evaluation: str = "") -> None:
        """A new stage of the run."""
        self._evaluation = evaluation
        self.board.enter(stage)
        self.run.update_state(stage=stage)
        self.run.event(self.board.elapsed(), "launcher", "stage", stage)

    def tell(self, text: str) -> None:
        """Record something of interest and show it."""
        self.run.event(self.board.elapsed(), "launcher", "note", text)
        self.board.note(text)

    def wait(self, seconds: float) -> None:
        """Wait so long; raises Interrupted on Ctrl-C and RoleFailed if a role cannot be kept alive."""
        deadline = time.monotonic() + seconds
        while True:
            self._interrupts.check()
            self._supervisor.tick()
            left = deadline - time.monotonic()
            if left <= 0:
                return
            self._interrupts.wait(min(TICK_SECONDS, left))

    def until(self, ask: Callable[[], T | None], seconds: float, what: str) -> T:
        """Ask again and again until there is an answer; a peer that is away for a while only delays it."""
        deadline = time.monotonic() + seconds
        while True:
            with suppress(Unavailable, NotFound, Exhausted):
                answer = ask()
                if answer is not None:
                    return answer
            if time.monotonic() > deadline:
                raise Unavailable(
                    f"{what} took longer than {seconds:.0f} s; the reason may be in {self.run.path / 'logs'}"
                )
            self.wait(TICK_SECONDS)

    def job(self, spec: ChildSpec) -> None:
        """Run a child to its end and show its progress; raises RoleFailed if it fails."""
        told = self.run.path / f".{spec.name}-progress.json"
        told.unlink(missing_ok=True)
        child = Child(spec, {VARIABLE: str(told)})
        child.start()
        try:
            while (code := child.ended()) is None:
                self.wait(TICK_SECONDS)
                progress = read_progress(told)
                if progress is not None:
                    self.board.advance(progress)
        finally:
            child.end(spec.grace_seconds)
            told.unlink(missing_ok=True)
        if code:
            reason = last_error(spec.log) or describe_exit(code)
            raise RoleFailed(f"{spec.name}: {reason}", [], exit_code=2 if code == 2 else 1)

    def counter(self, name: str) -> int:
        """A counter of the store, by the latest sample."""
        store = self.latest.store if self.latest else None
        return store.counters.get(name, 0) if store else 0

    def restarts(self) -> dict[str, int]:
        """Restarts so far, by child."""
        return self._supervisor.restarts()

    def _sample(self) -> Sample:
        assert self._client is not None
        stage, evaluation = self.board.stage, self._evaluation
        sample = self._client.ask(self.board.elapsed(), stage, evaluation, self._supervisor.restarts())
        return replace(sample, launch=self._launch)

    def _keep(self, sample: Sample) -> None:
        running = [name for name, child in list(self._supervisor.children.items()) if not child.finished]
        self.board.roles = tuple(name for name in running if name != "redis")
        self.board.add(sample)
        self.latest = sample
        if self._spans is not None and sample.t - self._spans_kept >= COLLECT_SECONDS:
            self._spans_kept = sample.t
            self._span_file.add(self._spans.collect())
        if sample.t - self._kept >= max(SAMPLE_SECONDS, sample.t * SAMPLE_SHARE):
            self._kept = sample.t
            with self.run.samples.open("a") as file:
                file.write(sample.to_json() + "\n")
            write_json(self.run.path / "facts.json", self._client.facts if self._client else {})

    def _happened(self, name: str, what: str, detail: str) -> None:
        self.run.event(self.board.elapsed(), name, what, detail)
        if what in ("died", "restarted"):
            self.board.note(f"{name} {what}" + (f": {detail}" if detail and what == "died" else ""))
