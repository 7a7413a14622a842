"""Messages of the physics engine are noticed, whichever descriptor they are written to, and passed on."""

import subprocess
import sys

import pytest

CODE = """
import os, sys
from services.sim.overflow import OverflowWatch
fd, first, second = int(sys.argv[1]), *(text.encode() for text in sys.argv[2:])
watch = OverflowWatch()
os.write(2, b"all is well\\n")
os.write(fd, first)
os.write(fd, second + b"\\nmore\\n")
watch.close()
sys.stdout.write("SEEN " + repr(watch.seen))
"""
OVERFLOW = ("PhysX error: Contact buffer over", "flow detected, please increase its size to at least 7")


def run(fd: int, first: str, second: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", CODE, str(fd), first, second]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)


@pytest.mark.parametrize("fd", [1, 2])
def test_overflow_is_seen_even_in_two_writes_and_everything_is_passed_on(fd: int) -> None:
    done = run(fd, *OVERFLOW)
    assert done.stdout.endswith(f"SEEN {''.join(OVERFLOW)!r}")
    assert "all is well" in done.stderr
    assert "more" in (done.stdout if fd == 1 else done.stderr)


def test_other_messages_are_not_mistaken_for_it() -> None:
    assert run(2, "PhysX warning: ", "a triangle is large").stdout == "SEEN ''"
