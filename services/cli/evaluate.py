"""Runs one evaluation in a system that is up: exactly the listed episodes, each once, with exactly one version."""

import time
from collections.abc import Sequence

from services.cli.board import Progress
from services.cli.control import HOLD_SECONDS, Control, EpisodeResult
from services.cli.session import Session
from services.common.bundle import Version

BEGIN_SECONDS = 60.0


def run_evaluation(
    session: Session, control: Control, name: str, version: Version, episodes: Sequence[tuple[str, int]]
) -> list[EpisodeResult]:
    """The results of all episodes, (task, seed) each, in their order. Failed ones are among them."""

    def hold() -> bool:
        control.hold(version)
        return True

    def let_go() -> bool:
        control.hold(version, 0.0)  # a held version keeps a file that the next ones may need
        return True

    def begin() -> bool:
        control.start_evaluation(name, version, episodes)
        return True

    session.until(hold, BEGIN_SECONDS, f"holding version {version}")
    session.until(begin, BEGIN_SECONDS, f"starting evaluation {name}")
    held = time.monotonic()
    while True:
        results = session.until(lambda: control.evaluation(name, 0.0), BEGIN_SECONDS, f"evaluation {name}")
        wins = sum(result.success_once for result in results)
        remark = f"success {wins / len(results):.2f}" if results else ""
        session.board.advance(Progress(len(results), len(episodes), "episodes", remark))
        if len(results) >= len(episodes):
            session.until(let_go, BEGIN_SECONDS, f"letting go of version {version}")
            return sorted(results, key=lambda result: result.number)
        if time.monotonic() - held > HOLD_SECONDS / 4:
            session.until(hold, BEGIN_SECONDS, f"holding version {version}")
            held = time.monotonic()
        session.wait(0.3)
