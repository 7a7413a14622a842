import os
import signal
from pathlib import Path

import pytest

from services.cli.board import Progress
from services.cli.interrupts import Interrupted, Interrupts
from services.cli.progress import VARIABLE, read_progress, reporter


def test_a_child_tells_how_far_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "progress.json"
    monkeypatch.setenv(VARIABLE, str(path))
    assert read_progress(path) is None
    tell = reporter()
    tell(1, 10, "steps", "loss 1")
    assert read_progress(path) == Progress(1, 10, "steps", "loss 1")
    tell(2, 10, "steps", "loss 2")
    assert read_progress(path) == Progress(1, 10, "steps", "loss 1"), "calls in quick succession are left out"
    tell(10, 10, "steps", "loss 0")
    assert read_progress(path) == Progress(10, 10, "steps", "loss 0"), "the end is always told"


def test_without_a_launcher_progress_is_printed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    reporter()(10, 10, "steps", "loss 0")
    assert capsys.readouterr().err == "10/10 steps, loss 0\n"


def test_interrupts_are_counted_and_raised_where_it_is_safe() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with Interrupts() as interrupts:
        interrupts.check()
        os.kill(os.getpid(), signal.SIGTERM)
        interrupts.wait(5.0)
        with pytest.raises(Interrupted):
            interrupts.check()
        assert not interrupts.hurry()
        os.kill(os.getpid(), signal.SIGINT)
        assert interrupts.hurry()
    assert signal.getsignal(signal.SIGTERM) is before
