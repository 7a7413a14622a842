"""The committed stubs are what the .proto files give, load on this runtime, and the protos pass buf's rules."""

import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
STEMS = sorted(path.stem for path in (ROOT / "protos/dvla/v1").glob("*.proto"))


def run(*command: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=170, check=False)


def test_committed_stubs_match_the_protos() -> None:
    done = run("bash", "protos/generate.sh", "--check")
    assert done.returncode == 0, done.stdout + done.stderr


def test_protos_pass_buf_lint() -> None:
    buf = shutil.which("buf", path=str(Path(sys.executable).parent)) or shutil.which("buf")
    assert buf, "buf is missing; it comes with the dev extra"
    done = run(buf, "lint", cwd=ROOT / "protos")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("stem", STEMS)
def test_stubs_load_and_know_their_file(stem: str) -> None:
    module = import_module(f"dvla.v1.{stem}_pb2")
    assert module.DESCRIPTOR.name == f"dvla/v1/{stem}.proto"
    assert module.DESCRIPTOR.package == "dvla.v1"
