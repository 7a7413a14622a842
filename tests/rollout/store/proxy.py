"""A proxy before a Redis socket that swallows replies: the command is executed, and the connection dies."""

import asyncio
from collections.abc import Callable
from pathlib import Path


class SwallowingProxy:
    """Listens on `path`. `swallow(command)` is asked for each request, and True loses its reply."""

    def __init__(self, path: Path, upstream: Path, swallow: Callable[[bytes], bool]) -> None:
        self.url = f"unix://{path}"
        self.swallowed = 0
        self._path, self._upstream, self._swallow = path, upstream, swallow
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> "SwallowingProxy":
        self._server = await asyncio.start_unix_server(self._serve, str(self._path))
        return self

    async def __aexit__(self, *error: object) -> None:
        if self._server:
            self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        replies, requests = await asyncio.open_unix_connection(str(self._upstream))
        back = asyncio.create_task(self._copy(replies, writer))
        try:
            while data := await reader.read(2**20):
                lost = self._swallow(data)
                if lost:
                    self.swallowed += 1
                    back.cancel()
                requests.write(data)
                await requests.drain()
                if lost:
                    await replies.read(2**20)  # executed for certain
                    break
        finally:
            back.cancel()
            writer.close()
            requests.close()

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(2**20):
            writer.write(data)
            await writer.drain()
