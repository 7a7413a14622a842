"""Bulk work on tensors by several threads. It pays because copying and hashing free the interpreter lock."""

import os
import threading
from collections.abc import Callable, Sequence

THREADS = min(4, len(os.sched_getaffinity(0)))
SMALL = 8 * 1024 * 1024
"""Below so many bytes a thread costs more than it brings."""


def in_parts(sizes: Sequence[int], work: Callable[[range], None]) -> None:
    """Call `work` with ranges of item numbers that together cover all items; returns when all are done.

    sizes: bytes of each item. Raises the first error, after all threads have ended.
    """
    if THREADS < 2 or len(sizes) < 2 or sum(sizes) < SMALL:
        work(range(len(sizes)))
        return
    parts = iter(_cut(sizes, 4 * THREADS))
    lock, errors = threading.Lock(), list[Exception]()

    def run() -> None:
        while not errors:
            with lock:
                part = next(parts, None)
            if part is None:
                return
            try:
                work(part)
            except Exception as error:  # noqa: BLE001 - raised below, in the caller's thread
                errors.append(error)

    helpers = [threading.Thread(target=run, daemon=True) for _ in range(THREADS - 1)]
    for helper in helpers:
        helper.start()
    run()
    for helper in helpers:
        helper.join()
    if errors:
        raise errors[0]


def _cut(sizes: Sequence[int], count: int) -> list[range]:
    """Consecutive ranges of about equal bytes."""
    share, parts, start, filled = sum(sizes) / count, list[range](), 0, 0
    for number, size in enumerate(sizes):
        filled += size
        if filled >= share:
            parts.append(range(start, number + 1))
            start, filled = number + 1, 0
    if start < len(sizes):
        parts.append(range(start, len(sizes)))
    return parts
