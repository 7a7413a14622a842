"""`dvla weights list | show | verify | export`: a look at a running weights server."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from services.common.security import Security
from services.weights.config import WeightsConfig


@Parameter(name="*")
@dataclass(frozen=True)
class Access:
    """How to reach a weights server."""

    address: str = WeightsConfig.listen
    """Address of the server: unix:/path or host:port."""
    token_file: str = ""
    """File with the bearer token."""
    tls_ca: str = ""
    """PEM certificate authority."""
    tls_cert: str = ""
    """PEM certificate chain."""
    tls_key: str = ""
    """PEM private key."""

    def security(self) -> Security:
        """As the roles read these files."""
        files = WeightsConfig(
            token_file=self.token_file, tls_ca=self.tls_ca, tls_cert=self.tls_cert, tls_key=self.tls_key
        )
        return files.security()


_OPEN = Access()
Model = Annotated[str, Parameter(help="Name of the model.")]
Which = Annotated[str, Parameter(help="epoch-update, such as 1-37; by default the newest.")]


def add_commands(app: App) -> None:
    """Add the four to the role's application; what they do is imported when they run."""

    @app.command(name="list")
    def list_all(*, access: Access = _OPEN) -> None:
        """List the versions of all models: state, size, age, and who reads or holds them."""
        from services.weights import tools

        print(tools.describe_list(tools.list_versions(access.address, access.security())))

    @app.command
    def show(version: Which = "", *, model: Model = "policy", access: Access = _OPEN) -> None:
        """Show one version: its policy, its tensors and their hashes."""
        from services.weights import tools

        wanted = tools.parse_version(version)
        print(tools.describe_manifest(tools.read_manifest(access.address, model, wanted, access.security())))

    @app.command
    def verify(version: Which = "", *, model: Model = "policy", access: Access = _OPEN) -> None:
        """Fetch a version and compare the hash of every tensor."""
        from services.weights import tools

        started = time.monotonic()
        manifest = tools.verify_version(access.address, model, tools.parse_version(version), access.security())
        seconds = time.monotonic() - started
        print(f"{model} {manifest.version}: all {len(manifest.layout.tensors)} tensors are right ({seconds:.2f} s)")

    @app.command
    def export(path: Path, version: Which = "", *, model: Model = "policy", access: Access = _OPEN) -> None:
        """Write a version as a safetensors file, for torch or any other tool."""
        from services.weights import tools

        wanted = tools.parse_version(version)
        manifest = tools.export_version(access.address, model, wanted, path, access.security())
        print(f"{model} {manifest.version} in {path} ({manifest.length / 1e6:.1f} MB)")
