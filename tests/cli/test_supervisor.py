import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from services.cli.child import ChildSpec, describe_exit, last_error
from services.cli.supervisor import RestartPolicy, RoleFailed, Supervisor

QUICK = RestartPolicy(first=0.01, longest=0.05, settled=30.0, limit=3)
SLEEP = "import time; print('up', flush=True); time.sleep(60)"
STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
PARENT = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']); print('up', flush=True); time.sleep(60)"  # noqa: E501


class Events(list[tuple[str, str]]):
    def __call__(self, name: str, what: str, detail: str) -> None:
        self.append((name, what))


@pytest.fixture
def supervisor() -> Iterator[Supervisor]:
    made = Supervisor(Events(), QUICK)
    yield made
    made.kill()


def spec(tmp_path: Path, name: str, code: str, **options: object) -> ChildSpec:
    return ChildSpec(name, (sys.executable, "-c", code), tmp_path / f"{name}.log", **options)  # type: ignore[arg-type]


def tick_until(supervisor: Supervisor, condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        supervisor.tick()
        assert time.monotonic() < deadline
        time.sleep(0.01)


def alive(pid: str) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def up(tmp_path: Path, name: str, times: int = 1) -> bool:
    log = tmp_path / f"{name}.log"
    return log.exists() and log.read_text().count("up") == times


def test_a_killed_child_starts_again(tmp_path: Path, supervisor: Supervisor) -> None:
    supervisor.add([spec(tmp_path, "sim-0", SLEEP)])
    tick_until(supervisor, lambda: up(tmp_path, "sim-0"))
    os.kill(supervisor.children["sim-0"].pid, signal.SIGKILL)
    tick_until(supervisor, lambda: up(tmp_path, "sim-0", times=2))
    assert supervisor.restarts() == {"sim-0": 1}


def test_children_of_a_killed_child_end_with_it(tmp_path: Path, supervisor: Supervisor) -> None:
    supervisor.add([spec(tmp_path, "sim-0", PARENT)])
    tick_until(supervisor, lambda: up(tmp_path, "sim-0"))
    child = supervisor.children["sim-0"].pid
    grandchildren = Path(f"/proc/{child}/task/{child}/children").read_text().split()
    assert grandchildren
    os.kill(child, signal.SIGKILL)
    tick_until(supervisor, lambda: not any(alive(pid) for pid in grandchildren))


def test_it_gives_up_and_shows_the_log(tmp_path: Path, supervisor: Supervisor) -> None:
    supervisor.add([spec(tmp_path, "store", "import sys; print('error: no room'); sys.exit(1)")])
    with pytest.raises(RoleFailed, match=r"store ended 3 times in a row \(exit code 1\)") as caught:
        tick_until(supervisor, lambda: False)
    assert caught.value.log[-1] == "error: no room"
    assert caught.value.exit_code == 1


def test_a_bad_setting_is_not_tried_again(tmp_path: Path, supervisor: Supervisor) -> None:
    supervisor.add([spec(tmp_path, "sim-0", "import sys; print('error: slots = 0; expected 1'); sys.exit(2)")])
    with pytest.raises(RoleFailed, match="sim-0: slots = 0; expected 1") as caught:
        tick_until(supervisor, lambda: False)
    assert caught.value.exit_code == 2
    assert supervisor.restarts() == {}


def test_a_child_that_may_finish_is_left_alone(tmp_path: Path, supervisor: Supervisor) -> None:
    supervisor.add([spec(tmp_path, "learner", "pass", may_finish=True)])
    tick_until(supervisor, lambda: supervisor.children["learner"].finished)
    supervisor.tick()
    assert supervisor.restarts() == {}


def test_stop_goes_rank_by_rank(tmp_path: Path) -> None:
    events = Events()
    supervisor = Supervisor(events, QUICK)
    supervisor.add([spec(tmp_path, "store", SLEEP, rank=2), spec(tmp_path, "learner", SLEEP, rank=0)])
    tick_until(supervisor, lambda: up(tmp_path, "store") and up(tmp_path, "learner"))
    supervisor.stop()
    assert events[-2:] == [("learner", "stopped"), ("store", "stopped")]
    assert not any(child.pid for child in supervisor.children.values())


def test_who_does_not_stop_is_killed(tmp_path: Path, supervisor: Supervisor) -> None:
    supervisor.add([spec(tmp_path, "sim-0", STUBBORN, grace_seconds=0.2)])
    tick_until(supervisor, lambda: up(tmp_path, "sim-0"))
    supervisor.stop()
    assert supervisor.children["sim-0"].pid == 0


def test_hurry_cuts_the_grace_short(tmp_path: Path, supervisor: Supervisor) -> None:
    supervisor.add([spec(tmp_path, "sim-0", STUBBORN, grace_seconds=60.0)])
    tick_until(supervisor, lambda: up(tmp_path, "sim-0"))
    supervisor.stop(hurry=lambda: True)
    assert supervisor.children["sim-0"].pid == 0


def test_ends_in_words() -> None:
    assert describe_exit(3) == "exit code 3"
    assert describe_exit(-signal.SIGKILL) == "killed by SIGKILL"


def test_the_reason_in_a_log(tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    assert last_error(log) == ""
    log.write_text("starting\nerror: no Vulkan device\nbye\n\n")
    assert last_error(log) == "no Vulkan device"
    log.write_text("starting\n")
    assert last_error(log) == "starting"
