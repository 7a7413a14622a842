"""One update: ratios of on-policy data, micro-batches, masks, determinism, steps that must not be made."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from services.learner.batch import Batch, build_batch
from services.learner.lineage import Lineage
from services.learner.update import Updater, learning_rate
from services.policies.base import Policy
from tests.learner.data import FAMILIES, make_group, same_weights, small_config, small_policy, weights_of


def batch_for(policy: Policy, groups: int = 4, version: tuple[int, int] = (1, 0), update: int = 0) -> Batch:
    made = [make_group(policy, i, (1.0, 0.0, 0.5), version) for i in range(groups)]
    batch = build_batch(made, update, Lineage(), "std")
    assert batch is not None
    return batch


def trained(
    family: str, change: Callable[[Batch], Batch] = lambda batch: batch, stale: int = 0, **settings: Any
) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """Weights and metrics after one update from fresh weights, on data that is `stale` updates old."""
    policy = small_policy(family)
    batch = change(batch_for(policy, update=stale))
    metrics = Updater(policy, small_config(**settings)).run(batch, stale)
    return weights_of(policy), metrics


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("micro_rows", [1, 8, 1000])
@pytest.mark.parametrize("level", ["auto", "token", "chunk"])
def test_ratio_of_on_policy_data_is_one(family: str, micro_rows: int, level: str) -> None:
    """S14, with dropout configured: data from exactly these weights, scored in other batches than it was made in."""
    policy = small_policy(family, dropout=0.3)
    updater = Updater(policy, small_config(micro_rows=micro_rows, ratio_level=level, minibatches=1, epochs=1))
    assert 0 <= updater.run(batch_for(policy), 0)["ratio_gap"] < 1e-4


def test_flow_noise_chains_have_ratio_one() -> None:
    policy = small_policy("tiny-flow", flow_method="noise")
    updater = Updater(policy, small_config(minibatches=1, epochs=1))
    assert updater.run(batch_for(policy), 0)["ratio_gap"] < 1e-4


def test_without_on_policy_data_there_is_no_ratio_gap() -> None:
    policy = small_policy()
    metrics = Updater(policy, small_config()).run(batch_for(policy, version=(1, 0), update=1), 1)
    assert "ratio_gap" not in metrics


def test_a_wrong_behaviour_shows_as_a_ratio_gap() -> None:
    """The metric is an alarm: it must ring."""

    def shift(batch: Batch) -> Batch:
        return replace(batch, rows=replace(batch.rows, behaviour=batch.rows.behaviour + 0.01))

    assert trained("tiny-oft", shift, minibatches=1)[1]["ratio_gap"] > 5e-3


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("objective", ["clipped", "decoupled"])
@pytest.mark.parametrize("weighting", ["trajectory", "token"])
def test_micro_batches_do_not_change_the_update(family: str, objective: str, weighting: str) -> None:
    settings: dict[str, Any] = {
        "objective": objective,
        "weighting": weighting,
        "entropy_bonus": 0.01 if family == "tiny-oft" else 0.0,
        "learning_rate": 1e-4,
    }
    whole, metrics = trained(family, micro_rows=1000, **settings)
    parts, part_metrics = trained(family, micro_rows=3, **settings)
    for name in whole:
        torch.testing.assert_close(parts[name], whole[name], rtol=1e-3, atol=2e-5)
    for name in ("loss", "clip_fraction", "entropy", "grad_norm"):
        assert part_metrics[name] == pytest.approx(metrics[name], rel=2e-2, abs=2e-4)


@pytest.mark.parametrize("level", ["token", "action", "chunk"])
def test_masked_actions_never_change_a_weight(level: str) -> None:
    """Tokens, log-probabilities and everything else of unexecuted actions may be anything."""

    def scramble(batch: Batch) -> Batch:
        rows, hidden = batch.rows, ~batch.rows.mask
        assert hidden.any()
        behaviour, tokens = rows.behaviour.clone(), rows.record["tokens"].clone()
        behaviour[hidden], tokens[hidden] = 50.0, 17
        return replace(batch, rows=replace(rows, behaviour=behaviour, record=rows.record | {"tokens": tokens}))

    settings: dict[str, Any] = {"ratio_level": level, "entropy_bonus": 0.01, "stale": 1}
    clean, dirty = trained("tiny-oft", **settings), trained("tiny-oft", scramble, **settings)
    assert same_weights(clean[0], dirty[0])
    assert clean[1] == dirty[1]


@pytest.mark.parametrize("family", FAMILIES)
def test_equal_inputs_give_equal_bits_and_seeds_matter(family: str) -> None:
    first, again, other = trained(family), trained(family), trained(family, seed=1)
    assert same_weights(first[0], again[0])
    assert first[1] == again[1]
    assert not same_weights(first[0], other[0])


def test_a_likely_good_action_becomes_likelier() -> None:
    policy = small_policy()
    batch = batch_for(policy)

    def advantage_weighted() -> float:
        with torch.no_grad():
            log_prob = policy.evaluate(batch.rows.inputs, batch.rows.record).log_prob
        per_row = torch.where(batch.rows.mask[:, :, None], log_prob, 0.0).sum((1, 2))
        return float((per_row * batch.advantage).sum())

    before = advantage_weighted()
    Updater(policy, small_config()).run(batch, 0)
    assert advantage_weighted() > before + 0.1


def test_a_gradient_that_is_not_finite_makes_no_step() -> None:
    def break_it(batch: Batch) -> Batch:
        return replace(batch, advantage=torch.full_like(batch.advantage, float("inf")))

    weights, metrics = trained("tiny-oft", break_it)
    assert same_weights(weights, weights_of(small_policy("tiny-oft")))
    assert metrics["skipped_steps"] == metrics["optimiser_steps"] == 4


def test_more_minibatches_than_rows_is_fine() -> None:
    policy = small_policy()
    batch = build_batch([make_group(policy, 1, (1.0, 0.0))], 0, Lineage(), "std")
    assert batch is not None
    rows = len(batch.rows)
    metrics = Updater(policy, small_config(minibatches=6, epochs=1)).run(batch, 0)
    assert 1 <= metrics["optimiser_steps"] <= rows


@pytest.mark.parametrize("family", FAMILIES)
def test_objectives_agree_on_data_of_the_current_weights(family: str) -> None:
    clipped, decoupled = trained(family, objective="clipped"), trained(family, objective="decoupled")
    assert same_weights(clipped[0], decoupled[0])
    assert not same_weights(clipped[0], trained(family, stale=1, objective="decoupled")[0])


def test_importance_weight_is_truncated() -> None:
    def older(batch: Batch) -> Batch:
        return replace(batch, rows=replace(batch.rows, behaviour=batch.rows.behaviour - 5.0))

    metrics = trained("tiny-oft", older, stale=1, importance_cap=1.5)[1]
    assert metrics["importance_mean"] == pytest.approx(1.5)


def test_optimiser_state_round_trip_continues_bit_for_bit() -> None:
    policy, twin = small_policy(), small_policy()
    config = small_config()
    batch = batch_for(policy)
    updater = Updater(policy, config)
    updater.run(batch, 0)
    twin.load_state(weights_of(policy))
    other = Updater(twin, config)
    other.load_optimiser_state({name: tensor.clone() for name, tensor in updater.optimiser_state().items()})
    updater.run(batch, 1)
    other.run(batch, 1)
    assert same_weights(weights_of(policy), weights_of(twin))


def test_learning_rate_schedules() -> None:
    config = small_config(updates=10, warmup_updates=2, learning_rate=1.0, schedule="linear")
    rates = [learning_rate(config, update) for update in range(10)]
    assert rates[:2] == [0.5, 1.0]
    assert rates[-1] == pytest.approx(0.1)
    assert rates == sorted(rates[:2]) + sorted(rates[2:], reverse=True)
    assert learning_rate(small_config(updates=10, learning_rate=1.0), 9) == 1.0
    assert learning_rate(small_config(updates=10, learning_rate=1.0, schedule="cosine"), 4) == pytest.approx(0.55)
