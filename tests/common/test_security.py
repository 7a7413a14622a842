"""Nobody serves beyond this machine without protection, and a missing file is one clear error."""

from pathlib import Path

import pytest

from services.common.errors import ConfigError
from services.common.security import Security, require_protected

TOKEN = Security(token="t")
MUTUAL = Security(tls_cert="c", tls_key="k", tls_ca="a")
ONE_SIDED = Security(tls_cert="c", tls_key="k")


@pytest.mark.parametrize(
    "listen",
    ["unix:/run/x", "unix:x", "localhost:50051", "127.0.0.1:0", "127.9.9.9:1", "[::1]:50051"],
)
def test_unix_sockets_and_loopback_need_nothing(listen: str) -> None:
    require_protected(listen, Security(), insecure=False)


@pytest.mark.parametrize(
    "listen",
    [
        "0.0.0.0:50051",
        "[::]:50051",
        "192.168.0.9:1",
        "example.org:50051",
        "localhost.example.org:1",
        "dns:localhost:1",
        ":50051",
        "50051",
        "",
        "unix-abstract:x",
        "127.0.0.1:1,0.0.0.0:2",
    ],
)
def test_everything_else_needs_a_token_or_mutual_tls_or_the_flag(listen: str) -> None:
    for security in (Security(), ONE_SIDED, Security(tls_ca="a")):
        with pytest.raises(ConfigError, match="--insecure") as refused:
            require_protected(listen, security, insecure=False)
        assert repr(listen) in str(refused.value)
    for security, insecure in ((TOKEN, False), (MUTUAL, False), (Security(), True)):
        require_protected(listen, security, insecure)


@pytest.mark.parametrize("field", ["tls_cert", "tls_key", "tls_ca"])
@pytest.mark.parametrize("side", [Security.server_credentials, Security.channel_credentials])
def test_a_missing_file_is_named(tmp_path: Path, field: str, side: object) -> None:
    good = tmp_path / "good.pem"
    good.write_text("x")
    files = {name: str(good) for name in ("tls_cert", "tls_key", "tls_ca")} | {field: str(tmp_path / "missing.pem")}
    with pytest.raises(ConfigError, match=rf"{field} = .*missing\.pem.* cannot be read: No such file"):
        side(Security(**files))  # type: ignore[operator]


def test_a_certificate_without_its_key_is_refused(tmp_path: Path) -> None:
    (tmp_path / "cert.pem").write_text("x")
    with pytest.raises(ConfigError, match="tls_key = ''"):
        Security(tls_cert=str(tmp_path / "cert.pem")).server_credentials()


def test_without_files_there_is_no_tls() -> None:
    assert Security().server_credentials() is None
    assert Security().channel_credentials() is None
