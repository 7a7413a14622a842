"""Publishers, readers, relays and tools behind a bearer token and mutual TLS."""

import socket
import subprocess
from pathlib import Path

import pytest

from services.common.bundle import Version
from services.common.errors import DvlaError
from services.common.security import Security
from services.common.weights_client import WeightPublisher, WeightSubscriber, fetch_once
from services.weights import relay, tools
from tests.weights.hosting import Host, check_stamp, stamped

V = Version


def certificates(folder: Path) -> dict[str, str]:
    """A certificate for localhost that is its own authority; both ends present it."""
    key, cert = folder / "key.pem", folder / "cert.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=localhost"]
    extra = ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1", "-keyout", str(key), "-out", str(cert)]
    subprocess.run([*command, *extra], check=True, capture_output=True)
    return {"tls_cert": str(cert), "tls_key": str(key), "tls_ca": str(cert)}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def test_everything_works_with_token_and_mutual_tls_and_nothing_without(
    host: Host, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay, "DISCOVER_SECONDS", 0.1)
    files = certificates(folder)
    (folder / "token").write_text("secret")
    settings = {**files, "token_file": str(folder / "token")}
    root, near = (f"localhost:{free_port()}" for _ in range(2))
    host.start("root", listen=root, **settings)
    host.start("near", listen=near, upstream=root, durable_folder="", shared=str(folder / "node"), **settings)
    security = Security(token="secret", **files)
    writer = WeightPublisher(root, "policy", security=security, folder=str(folder / "apart"))
    reader = WeightSubscriber(near, "policy", check_stamp, security=security, folder=str(folder / "farther"))
    reader.start()
    writer.fence(1)
    for update in (1, 2):
        writer.publish(*stamped(1, update))
        assert reader.wait(V(1, update), 20) == V(1, update)
    check_stamp(*fetch_once(root, "policy", security=security, folder=str(folder / "apart")))
    assert tools.list_versions(near, security)[0].version == V(1, 2)
    for other in (Security(token="wrong", **files), Security(**files), Security(token="secret")):
        stranger = WeightPublisher(root, "policy", security=other, folder=str(folder / "apart"), patience=0.2)
        with pytest.raises(DvlaError):
            stranger.publish(*stamped(1, 3))
        with pytest.raises(DvlaError):
            fetch_once(root, "policy", security=other)
        stranger.close()
    assert fetch_once(root, "policy", security=security)[0].version == V(1, 2)
    reader.close()
    writer.close()
