"""Runs a learner: `dvla learner`."""

import sys

from services.common.config import role_app, run_app
from services.learner.config import LearnerConfig


def run(config: LearnerConfig) -> None:
    """Run until the run is finished, a stop is asked for, or something fails for good."""
    from services.common.server import run_role
    from services.learner.server import serve

    run_role(lambda: serve(config), config)


app = role_app("learner", LearnerConfig, run, "A learner: trains the policy of a run and publishes its weights.")

if __name__ == "__main__":
    sys.exit(run_app(app, sys.argv[1:]))
