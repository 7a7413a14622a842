"""Role configuration: a frozen dataclass filled from a TOML recipe, then the environment, then flags.

`role_app(name, ConfigClass, run)` makes the command of a role. Values come, later ones winning, from the
dataclass defaults, the section `[name]` of `--recipe FILE`, variables such as `DVLA_SIM_LISTEN`, and flags such
as `--listen`. Anything unknown or impossible is one clear line and exit code 2. No torch, and no grpc until a
role really runs, so that `--help` answers at once.
"""

import os
import sys
import tomllib
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, cast, get_args

import cyclopts
from cyclopts import App, CycloptsError, Parameter

from services.common.errors import ConfigError, DvlaError

if TYPE_CHECKING:
    from services.common.security import Security

ConfigT = TypeVar("ConfigT", bound="RoleConfig")


@dataclass(frozen=True, kw_only=True)
class RoleConfig:
    """What every role can be told."""

    listen: str = ""
    """Address to serve on: unix:/path or host:port."""
    name: str = ""
    """Name of this replica in status, logs and traces; made from host and process id if empty."""
    token_file: str = ""
    """File with the bearer token that callers must send and that this role sends."""
    tls_cert: str = ""
    """PEM certificate chain of this role."""
    tls_key: str = ""
    """PEM private key of this role."""
    tls_ca: str = ""
    """PEM certificate authority; with it, both sides must present certificates (mTLS)."""
    insecure: bool = False
    """Serve beyond loopback without any protection."""
    reflection: bool = False
    """Serve gRPC reflection, so that tools such as grpcurl can list services."""
    metrics_port: int = 0
    """Port of the Prometheus endpoint; 0 for none."""
    metrics_host: str = "127.0.0.1"
    """Host of the Prometheus endpoint."""
    drain_seconds: float = 3.0
    """Time that calls in flight get on SIGTERM."""
    log_level: str = "info"
    """debug, info, warning or error."""
    debug: bool = False
    """Show stack traces."""

    def __post_init__(self) -> None:
        if self.listen:
            check_address("listen", self.listen)
        if self.log_level not in ("debug", "info", "warning", "error"):
            raise ConfigError(f"log_level = {self.log_level!r}; expected debug, info, warning or error")
        if not self.drain_seconds >= 0:
            raise ConfigError(f"drain_seconds = {self.drain_seconds}; expected 0 or more")
        if not 0 <= self.metrics_port < 65536:
            raise ConfigError(f"metrics_port = {self.metrics_port}; expected 0 to 65535")

    def security(self) -> "Security":
        """Token and TLS files of this role."""
        from services.common.security import Security

        token = _read_token(self.token_file) if self.token_file else ""
        return Security(token=token, tls_cert=self.tls_cert, tls_key=self.tls_key, tls_ca=self.tls_ca)

    def replica(self, role: str) -> str:
        """The replica's name."""
        import socket

        return self.name or f"{role}-{socket.gethostname()}-{os.getpid()}"


def check_address(field: str, address: str) -> None:
    """Refuse what is neither unix:/path nor host:port; `field` names the setting."""
    port = address.rpartition(":")[2]
    if not address.startswith("unix:") and not (
        ":" in address and port.isascii() and port.isdigit() and int(port) < 65536
    ):
        raise ConfigError(f"{field} = {address!r}; expected unix:/path or host:port, such as 127.0.0.1:50051")


def _read_token(path: str) -> str:
    try:
        token = Path(path).read_bytes().strip()
    except OSError as error:
        raise ConfigError(f"token_file = {path!r} cannot be read: {error.strerror}") from error
    if not token:
        raise ConfigError(f"token_file = {path!r} is empty; write a random token into it")
    if not all(0x20 < byte < 0x7F for byte in token):  # all that a header can carry
        raise ConfigError(f"token_file = {path!r} holds more than one word of printable ASCII; write one token into it")
    return token.decode()


def read_recipe(path: Path) -> dict[str, Any]:
    """The TOML file as a dictionary; raises ConfigError with file and line if it cannot be read."""
    try:
        return tomllib.loads(path.read_text())
    except FileNotFoundError as error:
        raise ConfigError(f"recipe {str(path)!r} does not exist; recipes/ holds ready ones") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"recipe {str(path)!r} is not valid TOML: {error}") from error
    except OSError as error:
        raise ConfigError(f"recipe {str(path)!r} cannot be read: {error.strerror}") from error


def check_keys(section: str, given: dict[str, Any], known: Sequence[str]) -> None:
    """Refuse an unknown key of a recipe section and say which known key is nearest."""
    for key in given:
        if key not in known:
            near = get_close_matches(key, known, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(known)}"
            raise ConfigError(f"unknown key {key!r} in [{section}] of the recipe; {hint}")


def field_names(cls: type) -> list[str]:
    """Names of a config class's fields."""
    return [f.name for f in fields(cls)]


def role_app(name: str, config_class: type[ConfigT], run: Callable[[ConfigT], None], summary: str) -> App:
    """The command-line application of one role."""
    app = App(name=name, help=summary, version_flags=[])

    def command(
        config: Any = None,
        *,
        recipe: Annotated[Path | None, Parameter(help=f"TOML recipe; its section [{name}] is read.")] = None,
    ) -> None:
        run(config if config is not None else config_class())

    command.__annotations__["config"] = Annotated[config_class | None, Parameter(name="*")]
    app.default(command)
    return app


def run_app(app: App, tokens: Sequence[str]) -> int:
    """Run a role's app on command-line tokens and return the exit code; prints one line for a bad setting."""
    section = app.name[0]
    prefix = f"DVLA_{section.upper()}_"
    try:
        recipe = _recipe(tokens) or os.environ.get(prefix + "RECIPE", "")
        values = _section(Path(recipe), section, field_names(_config_class(app))) if recipe else {}
        # Unknown variables are no error: Kubernetes adds some, such as DVLA_SIM_SERVICE_HOST, for every service.
        app.config = (cyclopts.config.Env(prefix, command=False), cyclopts.config.Dict(values, source="recipe"))
        app(tokens, exit_on_error=False, print_error=False, result_action="return_value")
    except CycloptsError as error:
        cause = error.__cause__
        plain = ConfigError(str(error)).with_traceback(error.__traceback__)
        return report(cause if isinstance(cause, DvlaError) else plain, "--debug" in tokens)
    except DvlaError as error:
        return report(error, "--debug" in tokens)
    return 0


def report(error: DvlaError, debug: bool) -> int:
    """Print an error as one line, with `debug` after its stack trace; returns the exit code."""
    if debug:
        traceback.print_exception(error)
    print(f"error: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
    return error.exit_code


def _recipe(tokens: Sequence[str]) -> str:
    for index, token in enumerate(tokens):
        if token == "--recipe" and index + 1 < len(tokens):
            return tokens[index + 1]
        if token.startswith("--recipe="):
            return token.removeprefix("--recipe=")
    return ""


def _config_class(app: App) -> type:
    """The dataclass that `role_app` annotated the app's command with."""
    annotated = app.default_command.__annotations__["config"]
    return cast(type, get_args(get_args(annotated)[0])[0])


def _section(recipe: Path, section: str, known: Sequence[str]) -> dict[str, Any]:
    values = read_recipe(recipe).get(section, {})
    if not isinstance(values, dict):
        raise ConfigError(f"[{section}] of the recipe is not a table")
    check_keys(section, values, known)
    return {key.replace("_", "-"): value for key, value in values.items()}
