"""The loop's order: strict turns in mode sync, none of its waits in mode async; checkpoints on demand."""

import threading
from collections.abc import Callable

from services.common.bundle import Version
from services.learner.checkpoint import read_checkpoint
from tests.learner.harness import Bench

Make = Callable[..., Bench]


def test_sync_trains_only_after_the_last_version_is_published(make_bench: Make) -> None:
    bench = make_bench(mode="sync")
    assert bench.run()
    bench.assert_exactly_once()
    assert bench.store.run.spec.staleness == 0
    assert bench.published == [(update, Version(1, update)) for update in range(6)]
    assert list(bench.weights.sealed) == [Version(1, update) for update in range(7)]


def test_async_does_not_wait_for_the_weight_plane(make_bench: Make) -> None:
    """A weights server that answers nothing after the first version holds up no update."""
    bench = make_bench()
    trained = threading.Event()
    publish = bench.weights.publish

    def slow(*arguments: object) -> Version:
        if bench.weights.sealed:
            trained.wait(60)
        return publish(*arguments)  # type: ignore[arg-type]

    bench.weights.publish = slow  # type: ignore[method-assign, assignment]
    loop = bench.learner()
    record = loop._record

    def recorded(*arguments: object) -> None:
        record(*arguments)  # type: ignore[arg-type]
        if len(bench.log) == bench.config.updates:
            trained.set()

    loop._record = recorded  # type: ignore[method-assign, assignment]
    loop.run(0)
    assert {newest for _, newest in bench.published} == {Version(1, 0)}
    assert bench.weights.newest == Version(1, 6)
    assert bench.telemetry.metrics()["versions_coalesced"] > 0
    bench.assert_exactly_once()


def test_a_checkpoint_on_demand_is_written_after_the_current_update(make_bench: Make) -> None:
    bench = make_bench(checkpoint_updates=0)
    loop = bench.learner()
    future = bench.progress.request_checkpoint()
    loop.run(0)
    version, path = future.result(0)
    assert version < Version(1, 6)
    assert read_checkpoint(path).version == version
    assert bench.progress.checkpoint == Version(1, 6)


def test_old_checkpoints_are_deleted(make_bench: Make) -> None:
    bench = make_bench(checkpoint_updates=1, keep_checkpoints=2)
    bench.run()
    names = {path.name for path in (bench.folder / "run" / "checkpoints").iterdir()}
    assert len(names) == 2
    assert "1-6" in names


def test_a_disk_that_refuses_a_checkpoint_does_not_end_the_run(make_bench: Make) -> None:
    """Training goes on; the next checkpoint that is due succeeds."""
    bench = make_bench(checkpoint_updates=2)
    root = bench.folder / "run" / "checkpoints"
    loop = bench.learner()
    root.write_text("in the way")
    train = loop._train

    def clear(groups: object) -> None:
        if len(bench.log) == 5:
            root.unlink(missing_ok=True)
        train(groups)  # type: ignore[arg-type]

    loop._train = clear  # type: ignore[method-assign]
    loop.run(0)
    assert bench.progress.state == "finished"
    assert [path.name for path in root.iterdir()] == ["1-6"]
    bench.assert_exactly_once()
