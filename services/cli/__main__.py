"""The `dvla` command. Each command imports what it needs when it runs, so that `dvla --help` answers at once."""

import os
import sys
from collections.abc import Sequence

from services.cli.overview import COMMANDS, ROLE_COMMANDS, STORE_COMMANDS, overview


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code: 0 done, 1 failed, 2 bad input, 130 interrupted."""
    _obey_parent()
    tokens = list(sys.argv[1:] if arguments is None else arguments)
    if not tokens or tokens[0] in ("--help", "-h", "help"):
        print(overview())
        return 0
    try:
        return _dispatch(tokens)
    except KeyboardInterrupt:
        return 130


def _dispatch(tokens: Sequence[str]) -> int:
    name = tokens[0]
    if name == "store" and tokens[1:2] and tokens[1] in STORE_COMMANDS:
        from services.cli.app import run_command
        from services.cli.store_command import app

        return run_command(tokens[1:], app)
    if name in ROLE_COMMANDS:
        from services.cli.roles import ROLES
        from services.common.config import run_app

        return run_app(ROLES[name].app(), tokens[1:])
    if name == "--version":
        from importlib.metadata import version

        print(f"dvla {version('dvla')}")
        return 0
    if name in COMMANDS:
        from services.cli.app import run_command

        return run_command(tokens)
    return _unknown(name)


def _unknown(name: str) -> int:
    from difflib import get_close_matches

    near = get_close_matches(name, [*COMMANDS, *ROLE_COMMANDS], 1)
    hint = f"did you mean {near[0]!r}?" if near else "`dvla --help` lists all commands"
    print(f"error: unknown {'option' if name.startswith('-') else 'command'} {name!r}; {hint}", file=sys.stderr)
    return 2


def _obey_parent() -> None:
    """End with the launcher, even if that is killed by SIGKILL. Children of this process have their own parent."""
    parent = os.environ.pop("DVLA_PARENT_PID", "")
    if parent:
        from services.common.process import die_with_parent

        die_with_parent(int(parent))


if __name__ == "__main__":
    raise SystemExit(main())
