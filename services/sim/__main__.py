"""`python -m services.sim`, also reached by `dvla sim`."""

import sys

from services.common.config import role_app, run_app
from services.sim.config import SimConfig


def run(config: SimConfig) -> None:
    """Run the role; the server is imported only here, so that --help answers at once."""
    from services.sim.serve import run as run_sim

    run_sim(config)


app = role_app("sim", SimConfig, run, "Serve a vectorised simulator.")

if __name__ == "__main__":
    sys.exit(run_app(app, sys.argv[1:]))
