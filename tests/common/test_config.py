"""Defaults, then recipe, then environment, then flags; anything bad is one clear line and exit code 2."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.common.config import RoleConfig, check_keys, field_names, read_recipe, role_app, run_app
from services.common.errors import ConfigError, DvlaError, Unavailable


@dataclass(frozen=True, kw_only=True)
class ToyConfig(RoleConfig):
    """Settings of a toy."""

    listen: str = "127.0.0.1:1"
    peers: tuple[str, ...] = ("a:1",)
    """Addresses."""
    count: int = 3
    """How many."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.count < 1:
            raise ConfigError(f"count = {self.count}; expected 1 or more")


Outcome = tuple[int, ToyConfig | None, str]
Run = Callable[..., Outcome]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs the toy's command; answers exit code, the configuration that it ran with, and what it printed."""

    def run(*tokens: str, error: Exception | None = None) -> Outcome:
        seen: list[ToyConfig] = []

        def main(config: ToyConfig) -> None:
            seen.append(config)
            if error is not None:
                raise error

        code = run_app(role_app("toy", ToyConfig, main, "A toy."), tokens)
        return code, seen[0] if seen else None, capsys.readouterr().err

    return run


@pytest.fixture
def recipe(tmp_path: Path) -> Callable[[str], str]:
    def write(text: str) -> str:
        (tmp_path / "recipe.toml").write_text(text)
        return str(tmp_path / "recipe.toml")

    return write


# Precedence ---------------------------------------------------------------------------------------------------

levels = st.none() | st.integers(1, 9)


@given(in_recipe=levels, in_environment=levels, in_flags=levels, recipe_by_flag=st.booleans())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
def test_the_last_of_recipe_environment_and_flags_wins(
    run: Run,
    recipe: Callable[[str], str],
    in_recipe: int | None,
    in_environment: int | None,
    in_flags: int | None,
    recipe_by_flag: bool,
) -> None:
    path = recipe(f"[toy]\ncount = {in_recipe}\n" if in_recipe else "[other]\nx = 1\n")
    with pytest.MonkeyPatch.context() as patch:
        tokens = ["--recipe", path] if recipe_by_flag else []
        if not recipe_by_flag:
            patch.setenv("DVLA_TOY_RECIPE", path)
        if in_environment:
            patch.setenv("DVLA_TOY_COUNT", str(in_environment))
        if in_flags:
            tokens += ["--count", str(in_flags)]
        expected = in_flags or in_environment or in_recipe or 3
        assert run(*tokens) == (0, ToyConfig(count=expected), "")


def test_every_kind_of_field_can_come_from_every_place(
    run: Run, recipe: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = '[toy]\npeers = ["b:1", "c:2"]\ninsecure = true\ndrain_seconds = 1\nlog_level = "debug"\nlisten = "r:1"\n'
    path = recipe(text)
    expected = ToyConfig(peers=("b:1", "c:2"), insecure=True, drain_seconds=1.0, log_level="debug", listen="r:1")
    assert run("--recipe", path) == (0, expected, "")
    assert run(f"--recipe={path}") == (0, expected, "")
    monkeypatch.setenv("DVLA_TOY_PEERS", "d:1 e:2")
    monkeypatch.setenv("DVLA_TOY_INSECURE", "false")
    monkeypatch.setenv("DVLA_TOY_DRAIN_SECONDS", "0.5")
    expected = ToyConfig(peers=("d:1", "e:2"), insecure=False, drain_seconds=0.5, log_level="debug", listen="r:1")
    assert run("--recipe", path) == (0, expected, "")
    flags = ("--peers", "f:1", "--peers", "g:2", "--insecure", "--drain-seconds", "0", "--log-level", "error")
    expected = ToyConfig(peers=("f:1", "g:2"), insecure=True, drain_seconds=0.0, log_level="error", listen="r:1")
    assert run("--recipe", path, *flags) == (0, expected, "")


def test_variables_that_kubernetes_adds_are_no_settings(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DVLA_TOY_SERVICE_HOST", "10.0.0.1")
    monkeypatch.setenv("DVLA_TOY_PORT", "tcp://10.0.0.1:50051")
    assert run() == (0, ToyConfig(), "")


# Bad input ----------------------------------------------------------------------------------------------------


def assert_one_line(outcome: Outcome, *parts: str) -> None:
    code, config, printed = outcome
    assert code == 2
    assert config is None
    assert printed.startswith("error: ")
    assert printed.count("\n") == 1
    assert printed.endswith("\n")
    assert "Traceback" not in printed
    for part in parts:
        assert part in printed


@pytest.mark.parametrize(
    ("tokens", "parts"),
    [
        (["--cuont", "1"], ["--cuont", "Did you mean --count?"]),
        (["--count", "many"], ["--count", '"many"', "int"]),
        (["--count", "0"], ["count = 0; expected 1 or more"]),
        (["--count"], ["--count", "requires an argument"]),
        (["surplus"], ["surplus"]),
        (["--listen", "nonsense"], ["listen = 'nonsense'; expected unix:/path or host:port"]),
        (["--listen", "host:65536"], ["listen = 'host:65536'"]),
        (["--listen", "host:-1"], ["listen = 'host:-1'"]),
        (["--listen", "host:"], ["listen = 'host:'"]),
        (["--log-level", "loud"], ["log_level = 'loud'; expected debug, info, warning or error"]),
        (["--drain-seconds", "-1"], ["drain_seconds = -1.0; expected 0 or more"]),
        (["--drain-seconds", "nan"], ["drain_seconds = nan"]),
        (["--metrics-port", "65536"], ["metrics_port = 65536; expected 0 to 65535"]),
        (["--recipe"], ["--recipe"]),
        (["--recipe", "/no/such.toml"], ["'/no/such.toml' does not exist; recipes/ holds ready ones"]),
        (["--recipe", "/"], ["'/' cannot be read: Is a directory"]),
    ],
    ids=" ".join,
)
def test_a_bad_flag_is_one_line(run: Run, tokens: list[str], parts: list[str]) -> None:
    assert_one_line(run(*tokens), *parts)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("[toy]\ncuont = 1\n", ["unknown key 'cuont' in [toy] of the recipe; did you mean 'count'?"]),
        ("[toy]\nzzz = 1\n", ["unknown key 'zzz'", "known keys: listen, name"]),
        ('[toy]\ncount = "many"\n', ["count", "recipe", '"many"']),
        ("[toy]\ncount = true\n", ["count", "recipe"]),
        ("[toy]\ncount = [1, 2]\n", ["count"]),
        ("[toy]\ncount = { a = 1 }\n", ["count"]),
        ("[toy]\ncount = 0\n", ["count = 0; expected 1 or more"]),
        ("toy = 3\n", ["[toy] of the recipe is not a table"]),
        ("[toy\n", ["not valid TOML", "line 1"]),
    ],
)
def test_a_bad_recipe_is_one_line(run: Run, recipe: Callable[[str], str], text: str, parts: list[str]) -> None:
    assert_one_line(run("--recipe", recipe(text)), *parts)


def test_a_recipe_in_another_encoding_is_one_line(run: Run, tmp_path: Path) -> None:
    (tmp_path / "r.toml").write_bytes(b"\xff\xfe[\0t\0")
    assert_one_line(run("--recipe", str(tmp_path / "r.toml")), "not valid TOML", "utf-8")


@pytest.mark.parametrize(
    ("name", "value"), [("COUNT", "many"), ("COUNT", "0"), ("INSECURE", "maybe"), ("RECIPE", "/x")]
)
def test_a_bad_variable_is_one_line(run: Run, monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(f"DVLA_TOY_{name}", value)
    assert_one_line(run(), name.lower() if value == "0" else value)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("task = 'x' is unknown;\n  choose y"), 2),
        (Unavailable("redis is away; start it"), 1),
        (DvlaError("e"), 1),
    ],
)
def test_an_error_of_the_running_role_is_one_line_and_its_own_code(run: Run, error: DvlaError, code: int) -> None:
    seen, config, printed = run(error=error)
    assert (seen, printed) == (code, f"error: {' '.join(str(error).split())}\n")
    assert config == ToyConfig()


def test_a_bug_of_the_running_role_is_not_hidden(run: Run) -> None:
    with pytest.raises(ZeroDivisionError):
        run(error=ZeroDivisionError())


@pytest.mark.parametrize(
    "tokens", [["--count", "many"], ["--count", "0"], ["--recipe", "/no/such.toml"], ["--cuont", "1"]]
)
def test_debug_shows_the_trace_before_the_line(run: Run, tokens: list[str]) -> None:
    _, _, line = run(*tokens)
    code, _, printed = run(*tokens, "--debug")
    assert code == 2
    assert printed.startswith("Traceback")
    assert 'File "' in printed
    assert printed.endswith(line)


# Token files and recipes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("content", [b"abc", b"abc\n", b"  abc \r\n\n"])
def test_a_token_is_the_one_word_of_its_file(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "token").write_bytes(content)
    assert RoleConfig(token_file=str(tmp_path / "token")).security().token == "abc"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty; write a random token into it"),
        (b" \n\n", "is empty"),
        (b"two words", "more than one word"),
        (b"two\nlines", "more than one word"),
        ("tökén".encode(), "printable ASCII"),
        (b"\xff\xfe", "printable ASCII"),
        (b"nul\0", "printable ASCII"),
    ],
)
def test_a_token_that_no_header_can_carry_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "token").write_bytes(content)
    with pytest.raises(ConfigError, match=message) as refused:
        RoleConfig(token_file=str(tmp_path / "token")).security()
    assert "token_file = " in str(refused.value)
    assert "tök" not in str(refused.value)


def test_a_token_file_that_is_missing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"token_file = .*missing.* cannot be read: No such file"):
        RoleConfig(token_file=str(tmp_path / "missing")).security()


def test_without_a_token_file_there_is_no_token() -> None:
    assert RoleConfig().security().token == ""


def test_a_replica_is_named_by_its_user_or_by_host_and_process() -> None:
    assert RoleConfig(name="left").replica("sim") == "left"
    made = RoleConfig().replica("sim")
    assert made.startswith("sim-")
    assert made.endswith(f"-{os.getpid()}")


def test_keys_of_a_section_are_checked_one_by_one(recipe: Callable[[str], str]) -> None:
    values: dict[str, Any] = read_recipe(Path(recipe("[toy]\ncount = 1\n")))["toy"]
    check_keys("toy", values, field_names(ToyConfig))
    assert {"listen", "peers", "count", "debug"} <= set(field_names(ToyConfig))
