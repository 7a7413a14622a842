"""`dvla store`: serves the rollout store over one Redis."""

import sys
from typing import TYPE_CHECKING

from services.common.config import role_app, run_app
from services.rollout.store.config import StoreConfig

if TYPE_CHECKING:
    from cyclopts import App


def run(config: StoreConfig) -> None:
    """Run the role in this process."""
    from services.common.server import run_role
    from services.rollout.store.server import serve

    run_role(lambda: serve(config), config)


def app() -> "App":
    """The command `dvla store`."""
    return role_app("store", StoreConfig, run, "Keep episodes: admission, groups, leases, each trained exactly once.")


def main() -> int:
    """Entry point of `python -m services.rollout.store`."""
    return run_app(app(), sys.argv[1:])


if __name__ == "__main__":
    raise SystemExit(main())
