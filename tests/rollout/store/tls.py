"""Certificates, and a TLS proxy before a Redis socket, for servers that are built without TLS."""

import asyncio
import ssl
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest


def make_certificates(folder: Path) -> None:
    """ca.pem, and pairs server, client and stranger; the last is signed by nobody we trust."""
    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
    (folder / "san").write_text("subjectAltName=DNS:localhost,IP:127.0.0.1")
    for ca, names in (("ca", ("server", "client")), ("other", ("stranger",))):
        _openssl(folder, "req", "-x509", *key, "-keyout", f"{ca}.key", "-out", f"{ca}.pem", "-subj", "/CN=ca")
        for name in names:
            _openssl(
                folder, "req", "-new", *key, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}"
            )
            sign = ("x509", "-req", "-in", f"{name}.csr", "-CA", f"{ca}.pem", "-CAkey", f"{ca}.key", "-CAcreateserial")
            _openssl(folder, *sign, "-out", f"{name}.pem", "-days", "2", "-extfile", "san")


def _openssl(folder: Path, *arguments: str) -> None:
    try:
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True, timeout=60)
    except FileNotFoundError:
        pytest.skip("openssl is not installed")


class TlsProxy:
    """Ends TLS on a loopback port, asks for a client certificate if `mutual`, and passes bytes to a Unix socket."""

    def __init__(self, upstream: Path, folder: Path, mutual: bool) -> None:
        self._upstream = upstream
        self._context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(folder / "ca.pem"))
        self._context.load_cert_chain(folder / "server.pem", folder / "server.key")
        self._context.verify_mode = ssl.CERT_REQUIRED if mutual else ssl.CERT_NONE
        self.port = 0

    async def __aenter__(self) -> "TlsProxy":
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=self._context)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *error: object) -> None:
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        replies, requests = await asyncio.open_unix_connection(str(self._upstream))
        back = asyncio.create_task(_copy(replies, writer))
        with suppress(OSError):
            await _copy(reader, requests)
        back.cancel()
        requests.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(2**20):
        writer.write(data)
        await writer.drain()
