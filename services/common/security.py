"""Who may listen where, and how callers prove themselves: Unix sockets and loopback need nothing, others do."""

import ipaddress
from dataclasses import dataclass
from pathlib import Path

import grpc

from services.common.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Security:
    """Bearer token and TLS files. Empty means not used."""

    token: str = ""
    tls_cert: str = ""
    tls_key: str = ""
    tls_ca: str = ""

    def server_credentials(self) -> grpc.ServerCredentials | None:
        """TLS credentials of a server; with a CA, clients must present a certificate (mTLS)."""
        if not self.tls_cert:
            return None
        pair = (_read(self.tls_key, "tls_key"), _read(self.tls_cert, "tls_cert"))
        ca = _read(self.tls_ca, "tls_ca") if self.tls_ca else None
        return grpc.ssl_server_credentials([pair], ca, require_client_auth=ca is not None)

    def channel_credentials(self) -> grpc.ChannelCredentials | None:
        """TLS credentials of a client, if a CA is given."""
        if not self.tls_ca:
            return None
        key = _read(self.tls_key, "tls_key") if self.tls_key else None
        cert = _read(self.tls_cert, "tls_cert") if self.tls_cert else None
        return grpc.ssl_channel_credentials(_read(self.tls_ca, "tls_ca"), key, cert)


def require_protected(listen: str, security: Security, insecure: bool) -> None:
    """Refuse an open port: anything but a Unix socket or loopback needs a token, mTLS or an explicit flag."""
    if listen.startswith("unix:") or insecure or security.token or (security.tls_cert and security.tls_ca):
        return
    host = listen.rsplit(":", 1)[0].strip("[]")
    if host == "localhost" or (_is_ip(host) and ipaddress.ip_address(host).is_loopback):
        return
    raise ConfigError(
        f"listen = {listen!r} is reachable from other machines without any protection; give --token-file, or "
        "--tls-cert, --tls-key and --tls-ca, or accept the risk with --insecure"
    )


def _is_ip(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _read(path: str, field: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"{field} = {path!r} cannot be read: {error.strerror}; give a readable PEM file") from error
