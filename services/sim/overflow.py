"""Notices PhysX's messages about full GPU buffers, which mean lost contacts: physics that must not be trained on.

The engine writes them to standard error or output from C++, so both file descriptors are led through a pipe; every
line is passed on unchanged.
"""

import os
import re
import threading

_OVERFLOW = re.compile(rb"(?i)overflow|increase capacity")


class OverflowWatch:
    """`seen` is the first overflow message since the start, or empty. Only for a process of its own."""

    def __init__(self) -> None:
        self.seen = ""
        self._saved = {fd: os.dup(fd) for fd in (1, 2)}
        self._threads = [threading.Thread(target=self._pump, args=self._divert(fd), daemon=True) for fd in (1, 2)]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Give the descriptors back and read what is left."""
        for fd, saved in self._saved.items():
            os.dup2(saved, fd)  # closes the pipe's last writing end, which ends its pump
        for thread in self._threads:
            thread.join(timeout=5)
        for saved in self._saved.values():
            os.close(saved)

    def _divert(self, fd: int) -> tuple[int, int]:
        reading, writing = os.pipe()
        os.dup2(writing, fd)
        os.close(writing)
        return reading, self._saved[fd]

    def _pump(self, reading: int, onward: int) -> None:
        rest = b""
        with os.fdopen(reading, "rb", buffering=0) as pipe:
            while data := pipe.read(65536):
                os.write(onward, data)
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    self._look(line)
        self._look(rest)

    def _look(self, line: bytes) -> None:
        if not self.seen and _OVERFLOW.search(line):
            self.seen = line.decode(errors="replace").strip()[:200]
