"""Runs a weights server: `dvla weights`."""

import sys

from services.common.config import role_app, run_app
from services.weights.config import WeightsConfig


def run(config: WeightsConfig) -> None:
    """Run until stopped."""
    from services.common.server import run_role
    from services.weights.server import serve

    run_role(lambda: serve(config), config)


app = role_app("weights", WeightsConfig, run, "A weights server: versions of policy weights, as root or as relay.")

if __name__ == "__main__":
    sys.exit(run_app(app, sys.argv[1:]))
