"""Runs a weights server: `dvla weights`; with list, show, verify or export looks at a running one."""

import sys

from services.common.config import role_app, run_app
from services.weights.commands import add_commands
from services.weights.config import WeightsConfig


def run(config: WeightsConfig) -> None:
    """Run until stopped."""
    from services.common.server import run_role
    from services.weights.server import serve

    run_role(lambda: serve(config), config)


app = role_app("weights", WeightsConfig, run, "A weights server: versions of policy weights, as root or as relay.")
add_commands(app)

if __name__ == "__main__":
    sys.exit(run_app(app, sys.argv[1:]))
