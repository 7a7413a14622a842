"""What an update can be told beside its loss: reference, demonstrations, informative chunks, average, memory."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from services.common.errors import ConfigError
from services.learner.batch import Batch, build_batch
from services.learner.checkpoint import read_checkpoint
from services.learner.durable import newest_folder
from services.learner.episodes import prepare_group
from services.learner.imitation import Imitation
from services.learner.informative import informative_rows
from services.learner.lineage import Lineage
from services.learner.update import Updater
from services.policies.base import Policy
from services.policies.checkpoint import load_checkpoint
from services.policies.demodata import write_shard
from tests.learner.data import (
    FAMILIES,
    STATE,
    make_member,
    same_weights,
    small_config,
    small_policy,
    weights_of,
)


def batch_for(policy: Policy, chunks: int = 4) -> Batch:
    groups = [
        prepare_group(
            n, "reach", [make_member(policy, f"{n}{i}", float(i == 0), chunks=chunks) for i in range(3)], policy
        )
        for n in range(3)
    ]
    batch = build_batch(groups, 0, Lineage(), "std")
    assert batch is not None
    return batch


def demonstrations(folder: Path) -> Path:
    rng = np.random.default_rng(0)
    state = rng.normal(size=(40, STATE)).astype(np.float32)
    episode, step = np.repeat(np.arange(4), 10), np.tile(np.arange(10), 4)
    action = np.tile(np.array([0.4, -0.3], np.float32), (40, 1))
    write_shard(
        folder / "a.safetensors", {"state": state}, action, episode, step, "reach", "move the point to the goal"
    )
    return folder


@pytest.mark.parametrize("family", FAMILIES)
def test_a_reference_holds_the_policy_near_itself(family: str) -> None:
    moved = {}
    for weight in (0.0, 30.0):
        policy, reference = small_policy(family), small_policy(family)
        batch = batch_for(policy)
        config = small_config(kl_weight=weight, epochs=12, grad_clip=1e6)
        Updater(policy, config, reference if weight else None).run(batch, 0)
        with torch.no_grad():
            scores = [p.evaluate(batch.rows.inputs, batch.rows.record).log_prob for p in (policy, reference)]
        moved[weight] = float((scores[0] - scores[1]).abs().mean())
        assert same_weights(weights_of(reference), weights_of(small_policy(family)))
    assert moved[30.0] < 0.7 * moved[0.0]


@pytest.mark.parametrize("family", FAMILIES)
def test_demonstrations_pull_and_their_draws_repeat(tmp_path: Path, family: str) -> None:
    folder = demonstrations(tmp_path)
    settings: dict[str, Any] = {"demo_weight": 1.0, "demonstrations": (str(folder),), "demo_rows": 16}
    config = small_config(**settings, learning_rate=3e-3, epochs=10)
    weights, losses = [], []
    for _ in range(2):
        policy = small_policy(family)
        imitation = Imitation.from_config(policy, config)
        assert imitation is not None
        with torch.no_grad():
            before = float(imitation.loss(99, 0))
        metrics = Updater(policy, config, imitation=imitation).run(batch_for(small_policy(family)), 0)
        with torch.no_grad():
            losses.append((before, float(imitation.loss(99, 0)), metrics["imitation_loss"]))
        weights.append(weights_of(policy))
    assert losses[0][1] < losses[0][0]
    assert losses[0] == losses[1]
    assert same_weights(weights[0], weights[1])


def test_demonstrations_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    config = small_config(demo_weight=1.0, demonstrations=(str(tmp_path),))
    with pytest.raises(ConfigError, match="cannot be used: no demonstrations in"):
        Imitation.from_config(small_policy(), config)
    demonstrations(tmp_path)
    other = small_policy(cameras=("top",), image_size=16)
    with pytest.raises(ConfigError, match="reads rgb/top"):
        Imitation.from_config(other, config)
    assert Imitation.from_config(small_policy(), small_config()) is None


def test_informative_chunks_are_those_where_outcomes_diverge() -> None:
    policy = small_policy()
    batch = batch_for(policy, chunks=10)
    action = torch.zeros_like(batch.rows.action)
    position = torch.arange(len(batch.rows)) % 10
    better = batch.advantage > 0
    action[(position == 4) & better] = 1.0  # the fifth phase decides
    batch = replace(batch, rows=replace(batch.rows, action=action))
    counts = torch.zeros(10)
    for seed in range(60):
        rows = informative_rows(batch, 0.2, seed)
        assert rows.tolist() == sorted(set(rows.tolist()))
        assert torch.equal(torch.bincount(batch.rows.episode[rows]), torch.full((9,), 2))
        counts += torch.bincount(position[rows], minlength=10)
    assert counts.argmax() == 4
    assert counts[4] > 0.6 * 60 * 9  # nearly always chosen
    assert counts.min() > 0  # but no phase is given up
    assert torch.equal(informative_rows(batch, 0.2, 7), informative_rows(batch, 0.2, 7))
    assert len(informative_rows(batch, 1.0, 0)) == len(batch.rows)


@pytest.mark.parametrize("family", FAMILIES)
def test_only_informative_chunks_are_trained(family: str) -> None:
    policy = small_policy(family)
    batch = batch_for(policy)
    metrics = Updater(policy, small_config(informative_share=0.5)).run(batch, 0)
    assert metrics["chunks_trained"] == len(batch.rows) / 2
    assert 0 <= metrics["ratio_gap"] < 1e-4


def test_the_average_trails_the_weights() -> None:
    policy = small_policy()
    updater = Updater(policy, small_config(average=0.5, epochs=1, minibatches=1))
    assert updater.average is not None
    before = weights_of(policy)
    updater.run(batch_for(policy), 0)
    after, average = weights_of(policy), updater.average.state()
    for name, tensor in average.items():
        torch.testing.assert_close(tensor, (before[name] + after[name]) / 2)
    other = Updater(small_policy(seed=3), small_config(average=0.5))
    assert other.average is not None
    other.average.load_state(average)
    assert same_weights(other.average.state(), average)
    assert Updater(policy, small_config()).average is None


@pytest.mark.parametrize("family", FAMILIES)
def test_activation_checkpointing_saves_memory_and_keeps_the_gradient(family: str) -> None:
    kept: dict[bool, int] = {}
    weights = {}
    for recompute in (False, True):
        policy = small_policy(family)
        batch = batch_for(policy)
        updater = Updater(policy, small_config(activation_checkpointing=recompute))
        sizes: list[int] = []

        def count(tensor: torch.Tensor, sizes: list[int] = sizes) -> torch.Tensor:
            sizes.append(tensor.numel() * tensor.element_size())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            policy.evaluate(batch.rows.inputs, batch.rows.record)
        kept[recompute] = sum(sizes)
        updater.run(batch, 0)
        weights[recompute] = weights_of(policy)
    assert kept[True] < 0.6 * kept[False]
    for name, tensor in weights[False].items():
        torch.testing.assert_close(weights[True][name], tensor, rtol=1e-5, atol=1e-7)


def test_settings_that_a_policy_would_ignore_are_refused() -> None:
    for policy, settings, message in (
        (small_policy("tiny-flow"), {"entropy_bonus": 0.1}, "does not depend on its weights"),
        (small_policy("tiny-flow", flow_method="fpo"), {"ratio_level": "token"}, "expected 'chunk'"),
    ):
        with pytest.raises(ConfigError, match=message):
            Updater(policy, small_config(**settings))
    Updater(small_policy("tiny-flow", flow_method="noise"), small_config(entropy_bonus=0.1))


def test_the_average_is_a_policy_in_every_checkpoint_and_goes_on_after_a_restart(make_bench: Any) -> None:
    bench = make_bench(average=0.5, updates=4, algorithm="rloo")
    assert bench.run(stop_after=2)
    newest = newest_folder(bench.folder / "run" / "checkpoints")
    assert newest is not None
    saved = read_checkpoint(newest)
    averaged = load_checkpoint(newest / "average")
    assert same_weights(weights_of(averaged), dict(saved.average))
    assert not same_weights(weights_of(averaged), weights_of(saved.policy))
    loop = bench.learner()
    assert loop._updater.average is not None
    assert same_weights(loop._updater.average.state(), dict(saved.average))
    assert bench.run()
    bench.assert_exactly_once()
