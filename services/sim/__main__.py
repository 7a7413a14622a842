"""`python -m services.sim`, also reached by `dvla sim`; `check ADDRESS` tests a running simulator."""

import sys

from services.common.config import role_app, run_app
from services.sim.config import SimConfig


def run(config: SimConfig) -> None:
    """Run the role; the server is imported only here, so that --help answers at once."""
    from services.sim.serve import run as run_sim

    run_sim(config)


app = role_app("sim", SimConfig, run, "Serve a vectorised simulator.")


@app.command
def check(
    address: str,
    *,
    token_file: str = "",
    tls_ca: str = "",
    tls_cert: str = "",
    tls_key: str = "",
    shared_folder: str = "",
) -> None:
    """Check that the simulator at an address (unix:/path or host:port) keeps the contract."""
    from services.sim.check import run_checks

    access = SimConfig(token_file=token_file, tls_ca=tls_ca, tls_cert=tls_cert, tls_key=tls_key)
    bad = 0
    for finding in run_checks(address, access.security(), shared_folder):
        print(f"{'ok  ' if finding.ok else 'FAIL'} {finding.name}: {finding.detail}", flush=True)
        bad += not finding.ok
    if bad:
        sys.exit(1)


if __name__ == "__main__":
    sys.exit(run_app(app, sys.argv[1:]))
