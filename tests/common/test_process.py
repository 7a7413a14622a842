"""A child never outlives its parent, however that one dies."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from services.common.process import boot_id

CHILD = """
import os, sys, time
from services.common.process import die_with_parent
die_with_parent(int(sys.argv[1]))
print("ready", flush=True)
time.sleep(60)
"""
PARENT = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", sys.argv[1], str(os.getpid())], stdout=subprocess.PIPE)
assert child.stdout.readline() == b"ready\\n"
print(child.pid, flush=True)
time.sleep(60)
"""


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.parametrize("sig", [signal.SIGKILL, signal.SIGTERM], ids=lambda sig: sig.name)
def test_a_child_dies_with_its_parent(sig: signal.Signals) -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT, CHILD], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert alive(child)
        parent.send_signal(sig)
        parent.wait(10)
    deadline = time.monotonic() + 10
    while alive(child) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not alive(child)


def test_a_child_whose_parent_is_gone_already_exits_at_once() -> None:
    not_the_parent = os.getppid()
    child = subprocess.run([sys.executable, "-c", CHILD, str(not_the_parent)], capture_output=True, timeout=20)
    assert child.returncode == 1
    assert not child.stdout


def test_the_boot_id_is_one_for_all_processes() -> None:
    assert re.fullmatch(r"[0-9a-f-]{36}", boot_id())
    command = "from services.common.process import boot_id; print(boot_id())"
    other = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, check=True)
    assert other.stdout.strip() == boot_id()
