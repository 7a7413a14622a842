"""Runs a rollout worker: `dvla rollout`."""

import sys

from services.common.config import role_app, run_app
from services.rollout.worker.config import RolloutConfig


def run(config: RolloutConfig) -> None:
    """Run until stopped. torch is imported only here, so that --help and a bad setting answer at once."""
    from services.common.server import run_role
    from services.rollout.worker.server import prepare, serve

    prepare(config)
    run_role(lambda: serve(config), config)


app = role_app("rollout", RolloutConfig, run, "A rollout worker: infers actions, drives simulators, writes episodes.")

if __name__ == "__main__":
    sys.exit(run_app(app, sys.argv[1:]))
