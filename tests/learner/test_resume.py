"""A learner that stops and goes on is the same as one that never stopped."""

from collections.abc import Callable

import pytest
import torch

from services.common.bundle import Version
from services.common.errors import ConfigError
from services.learner.checkpoint import read_checkpoint
from services.learner.durable import newest_folder
from services.learner.resume import start_or_resume
from services.policies.checkpoint import load_checkpoint, save_checkpoint
from tests.learner.data import FAMILIES, same_weights, small_config, small_policy, weights_of
from tests.learner.harness import Bench

Make = Callable[..., Bench]


def final_state(bench: Bench) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    folder = newest_folder(bench.folder / "run" / "checkpoints")
    assert folder is not None
    state = read_checkpoint(folder)
    assert state.version.update == 6
    return weights_of(state.policy), dict(state.optimiser)


@pytest.mark.parametrize("family", FAMILIES)
def test_three_and_three_updates_equal_six_bit_for_bit(make_bench: Make, family: str) -> None:
    straight, halves = make_bench(family=family), make_bench(family=family)
    assert straight.run()
    assert halves.run(stop_after=3)
    assert halves.ended == "stopped"
    assert halves.run()
    assert halves.ended == "finished"
    for a, b in zip(final_state(straight), final_state(halves), strict=True):
        assert same_weights(a, b)
    assert straight.surviving() == halves.surviving()
    halves.assert_exactly_once()


def test_versions_stay_monotone_over_restarts(make_bench: Make) -> None:
    """S26: every version is newer than all before it, and a resumed learner continues the count."""
    bench = make_bench()
    bench.run(stop_after=2)
    bench.run(stop_after=2)
    bench.run()
    assert list(bench.weights.sealed) == sorted(bench.weights.sealed)
    assert {version.epoch for version in bench.weights.sealed} == {1, 2, 3}
    assert {Version(1, 0), Version(2, 2), Version(3, 4), Version(3, 6)} <= bench.weights.sealed.keys()


def test_a_finished_run_is_closed_again_without_training(make_bench: Make) -> None:
    bench = make_bench()
    bench.run()
    trained = list(bench.log)
    assert bench.run()
    assert bench.log == trained
    assert bench.store.run.finished


def test_a_checkpoint_is_a_policy_that_others_can_read(make_bench: Make) -> None:
    bench = make_bench()
    bench.run()
    folder = newest_folder(bench.folder / "run" / "checkpoints")
    assert folder is not None
    assert same_weights(weights_of(load_checkpoint(folder)), final_state(bench)[0])


def test_the_published_weights_are_the_trained_ones(make_bench: Make) -> None:
    bench = make_bench()
    bench.run()
    newest = bench.weights.newest
    assert newest == Version(1, 6)
    arrays = bench.weights.arrays(newest)
    for name, tensor in final_state(bench)[0].items():
        assert arrays[name].tobytes() == tensor.numpy().tobytes()


def test_foreign_checkpoints_are_refused(make_bench: Make) -> None:
    bench = make_bench()
    bench.run(stop_after=1)
    with pytest.raises(ConfigError, match="of run 'test', expected 'other'"):
        start_or_resume(small_config(bench.folder, run="other"))
    save_checkpoint(bench.folder / "init", small_policy("tiny-flow"))
    with pytest.raises(ConfigError, match=r"another policy .*family = 'tiny-oft' instead of 'tiny-flow'"):
        start_or_resume(bench.config)


def test_a_missing_init_is_one_clear_line(make_bench: Make) -> None:
    bench = make_bench(init="/nowhere")
    with pytest.raises(ConfigError, match="init = '/nowhere' cannot be used: no policy"):
        start_or_resume(bench.config)


def test_an_output_folder_that_cannot_be_written_is_one_clear_line(make_bench: Make) -> None:
    bench = make_bench()
    (bench.folder / "run").write_text("a file")
    with pytest.raises(ConfigError, match=r"output = .* cannot be written to"):
        bench.learner()
