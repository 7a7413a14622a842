"""A bench per test, closed afterwards."""

from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from tests.learner.harness import Bench


@pytest.fixture
def make_bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Bench]]:
    """Makes benches in short temporary folders (socket paths are limited to about 100 bytes)."""
    benches: list[Bench] = []
    with TemporaryDirectory(prefix="lrn") as folder:

        def make(**settings: Any) -> Bench:
            place = Path(folder) / str(len(benches))
            place.mkdir()
            benches.append(Bench(place, monkeypatch, **settings))
            return benches[-1]

        yield make
        for bench in benches:
            bench.store.stop()
