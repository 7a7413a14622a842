import os
import subprocess
import sys
from pathlib import Path

import pytest

from services.cli.__main__ import main
from services.cli.app import app
from services.cli.overview import COMMANDS, ROLE_COMMANDS
from services.cli.roles import ROLES

ROOT = Path(__file__).parents[2]
HEAVY = ("torch", "mani_skill", "sapien", "grpc", "matplotlib", "rich", "numpy", "cyclopts", "services.policies")


def run(*arguments: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "services.cli", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=120, env=os.environ | environment, cwd=ROOT, check=False
    )


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; from services.cli.__main__ import main; assert main(['--help']) == 0; "
        f"print([name for name in {HEAVY} if name in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60, cwd=ROOT
    )
    assert done.stderr.strip() == "[]"
    for name in (*COMMANDS, *ROLE_COMMANDS):
        assert f"\n  {name} " in done.stdout


def test_every_command_and_role_is_on_the_page() -> None:
    assert {name for name in app.resolved_commands() if not name.startswith("-")} == set(COMMANDS)
    assert set(ROLES) == set(ROLE_COMMANDS)


@pytest.mark.parametrize("command", [*COMMANDS, *ROLE_COMMANDS])
def test_every_command_explains_itself_without_importing_torch(command: str) -> None:
    code = (
        "import sys; from services.cli.__main__ import main\n"
        f"code = main([{command!r}, '--help'])\n"
        "print('torch' in sys.modules or 'mani_skill' in sys.modules, file=sys.stderr); sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60, cwd=ROOT
    )
    assert "--" in done.stdout
    assert done.stderr.strip() == "False"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trian"], "unknown command 'trian'; did you mean 'train'?"),
        (["leaner"], "unknown command 'leaner'; did you mean 'learner'?"),
        (["--hlp"], "unknown option '--hlp'"),
        (["train", "--resum", "x"], "Did you mean --resume?"),
        (["train"], "which recipe?"),
        (["train", "nowhere.toml"], "recipe 'nowhere.toml' does not exist"),
        (["train", "recipes/toy.toml", "--set", "learner.lr=1"], "unknown key 'lr' in [learner]"),
        (["train", "recipes/toy.toml", "--seed", "x"], "Invalid value"),
        (["train", "recipes/toy.toml", "--mode", "both"], "[run] mode = 'both'; expected one of async, sync"),
        (["train", "--resume", "nowhere"], "run 'nowhere' does not exist"),
        (["train", "recipes/toy.toml", "--resume", "nowhere"], "goes on with the recipe frozen in the run"),
        (["sim", "--slts", "3"], "Did you mean --slots?"),
        (["sim", "--slots", "0"], "slots = 0; expected 1 or more"),
        (["store", "--redis", "nowhere"], "redis = 'nowhere'; expected"),
        (["report", "nowhere"], "run 'nowhere' does not exist"),
        (["trace", "nowhere"], "run 'nowhere' does not exist"),
        (["trace"], "give the name of a run"),
        (["eval", "nowhere"], "'nowhere' is neither the folder of a policy nor a run"),
        (["runs", "lst"], "runs 'lst'"),
        (["top"], "is running"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert message in error


def test_debug_shows_the_stack_trace() -> None:
    assert "Traceback" in run("train", "nowhere.toml", "--debug").stderr
    assert "Traceback" not in run("train", "nowhere.toml").stderr


def test_a_child_does_not_outlive_its_parent(tmp_path: Path) -> None:
    """The parent is gone before the child has started: the child ends instead of becoming an orphan."""
    done = run("train", "nowhere.toml", DVLA_PARENT_PID=str(os.getpid() + 1))
    assert done.returncode == 1
    assert done.stderr == ""


def test_version() -> None:
    assert run("--version").stdout.startswith("dvla ")


def test_runs_of_an_empty_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", "list", "--out", str(tmp_path)]) == 0
    assert "no runs in" in capsys.readouterr().out


def test_doctor_names_what_it_finds() -> None:
    done = run("doctor")
    assert {line.split()[1] for line in done.stdout.splitlines()} >= {"machine", "python", "redis", "torch", "vulkan"}
