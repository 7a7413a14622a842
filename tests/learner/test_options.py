"""No dead options: every setting of a learner changes what it does, or is refused where nothing would read it."""

from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from services.common.config import RoleConfig
from services.common.errors import ConfigError, InvalidInput
from services.common.telemetry import Telemetry
from services.learner import assembly, server
from services.learner.batch import Batch, build_batch
from services.learner.config import LearnerConfig
from services.learner.episodes import EpisodeRules, PreparedGroup, prepare_group
from services.learner.imitation import Imitation
from services.learner.lineage import Lineage
from services.learner.opening import run_spec
from services.learner.progress import Progress
from services.learner.update import Updater
from services.policies.base import Policy
from services.policies.demodata import write_shard
from tests.learner.data import CHUNK, INSTRUCTION, STATE, make_member, small_config, small_policy, weights_of

PPO: dict[str, Any] = {"algorithm": "ppo", "learning_rate": 1e-2}
CLIPPED: dict[str, Any] = {"objective": "clipped"}
RLOO: dict[str, Any] = {"algorithm": "rloo"}
DEMOS: dict[str, Any] = {"demo_weight": 1.0, "demonstrations": ("one",), "demo_rows": 8}

UPDATES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "algorithm": ({}, RLOO),
    "advantage": ({}, {"advantage": "mean"}),
    "objective": ({}, CLIPPED),
    "ratio_level": ({}, {"ratio_level": "chunk"}),
    "weighting": ({}, {"weighting": "token"}),
    "clip_low": (CLIPPED, CLIPPED | {"clip_low": 0.5}),
    "clip_high": (CLIPPED, CLIPPED | {"clip_high": 0.5}),
    "dual_clip": (CLIPPED, CLIPPED | {"dual_clip": 1.1}),
    "importance_cap": (RLOO, RLOO | {"importance_cap": 1.0}),
    "entropy_bonus": ({}, {"entropy_bonus": 0.1}),
    "kl_weight": ({}, {"kl_weight": 0.5}),
    "informative_share": ({}, {"informative_share": 0.5}),
    "demo_weight": (DEMOS, DEMOS | {"demo_weight": 0.1}),
    "demonstrations": (DEMOS, DEMOS | {"demonstrations": ("two",)}),
    "demo_rows": (DEMOS, DEMOS | {"demo_rows": 4}),
    "discount": (PPO, PPO | {"discount": 0.5}),
    "gae_lambda": (PPO, PPO | {"gae_lambda": 0.1}),
    "value_weight": (PPO, PPO | {"value_weight": 5.0}),
    "value_clip": (PPO, PPO | {"value_clip": 0.01}),
    "score": (PPO, PPO | {"score": "differential"}),
    "learning_rate": ({}, {"learning_rate": 2e-3}),
    "warmup_updates": ({}, {"warmup_updates": 5}),
    "schedule": ({}, {"schedule": "cosine"}),
    "weight_decay": ({}, {"weight_decay": 0.5}),
    "beta1": ({}, {"beta1": 0.5}),
    "beta2": ({}, {"beta2": 0.5}),
    "grad_clip": ({"grad_clip": 1e6}, {"grad_clip": 0.1}),
    "epochs": ({}, {"epochs": 1}),
    "minibatches": ({}, {"minibatches": 3}),
    "seed": ({}, {"seed": 1}),
}
"""Settings that change the weights after one update on stale, noisy data: (settings, changed ones)."""

SPECS: dict[str, dict[str, Any]] = {
    "run": {"run": "other"},
    "model": {"model": "other"},
    "tasks": {"tasks": ("reach:2", "mirror")},
    "group_size": {"group_size": 4},
    "groups_per_update": {"groups_per_update": 3},
    "updates": {"updates": 7},
    "mode": {"mode": "sync"},
    "staleness": {"staleness": 2},
    "seed_base": {"seed_base": 5},
    "end_on_success": {"end_on_success": False},
    "filter_uniform": {"filter_uniform": False},
    "max_attempts": {"max_attempts": 3},
    "on_failure": {"on_failure": "discard"},
    "episode_bytes": {"episode_bytes": 1000},
    "grant_seconds": {"grant_seconds": 3.0},
}
"""Settings that change what the run is opened with."""

ELSEWHERE: dict[str, str] = {
    "init": "test_resume.py",
    "output": "test_resume.py",
    "store": "test_process.py",
    "weights": "test_process.py",
    "differential_reward": "test_config.py",
    "micro_rows": "test_update.py",
    "activation_checkpointing": "test_regularisers.py",
    "average": "test_regularisers.py",
    "close_run": "harness.py",
    "checkpoint_updates": "test_loop.py",
    "keep_checkpoints": "test_loop.py",
    "stop_at_success": "test_store_faults.py",
    "starved_seconds": "test_store_faults.py",
    "give_up_seconds": "test_store_faults.py",
}
"""Settings whose effect a test of its own shows: the file in this folder."""

HERE = (
    "reward_range", "threads", "device", "delta_density", "delta_anchor", "shared_folder", "staging_files",
    "checkpoint_seconds", "prefetch_updates",
)  # fmt: skip
"""Settings with a test of their own below."""


def test_every_setting_is_accounted_for() -> None:
    roles = {f.name for f in fields(RoleConfig)}  # tests/common holds those
    own = {f.name for f in fields(LearnerConfig)} - roles
    tables = [*UPDATES, *SPECS, *ELSEWHERE, *HERE]
    assert len(tables) == len(set(tables))
    assert own == set(tables), own ^ set(tables)
    for name, file in ELSEWHERE.items():
        assert name in (Path(__file__).parent / file).read_text(), f"{file} does not show what {name} does"


def prepared(policy: Policy, score: Any) -> list[PreparedGroup]:
    groups = []
    for number in range(3):
        members = [make_member(policy, f"{number}{i}", (1.0, 0.3, 0.0)[i], chunks=3) for i in range(3)]
        for member in members:
            assert member.trajectory is not None
            steps = np.arange(3 * CHUNK).reshape(3, CHUNK)
            executed = np.arange(CHUNK) < member.trajectory["executed"].astype(np.int64)[:, None]
            member.trajectory["reward"] = (np.sin(steps) * executed).astype(np.float32)
            member.trajectory["success"][1, 1] = member.score > 0.5
        groups.append(prepare_group(number, "reach", members, policy, EpisodeRules(score=score)))
    return groups


def noisy(policy: Policy, config: LearnerConfig, update: int) -> Batch:
    """Data whose behaviour differs from the weights, as if they were old."""
    batch = build_batch(prepared(policy, config.score), update, Lineage(), config.normalisation)
    assert batch is not None
    generator = torch.Generator().manual_seed(5)
    shift = 0.3 * torch.randn(batch.rows.behaviour.shape, generator=generator)
    return replace(batch, rows=replace(batch.rows, behaviour=batch.rows.behaviour + shift))


def demonstrations(folder: Path) -> None:
    for number, name in enumerate(("one", "two")):
        state = np.random.default_rng(number).normal(size=(20, STATE)).astype(np.float32)
        action = np.full((20, 2), 0.3 - 0.6 * number, np.float32)
        episode, step = np.zeros(20, np.int64), np.arange(20)
        write_shard(folder / name / "a.safetensors", {"state": state}, action, episode, step, "reach", INSTRUCTION)


def updated(settings: dict[str, Any]) -> torch.Tensor:
    """All weights after the update that follows update 3, from the same start."""
    policy = small_policy(value_head=settings.get("algorithm") == "ppo")
    config = small_config(**settings)
    reference = small_policy(seed=1) if config.kl_weight else None
    updater = Updater(policy, config, reference, Imitation.from_config(policy, config))
    updater.run(updater.judge(noisy(policy, config, 3)), 3)
    return torch.cat([tensor.flatten().double() for tensor in weights_of(policy).values()])


@pytest.mark.parametrize("name", UPDATES)
def test_it_changes_the_update(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    demonstrations(tmp_path)
    base, changed = UPDATES[name]
    assert changed.keys() - base.keys() <= {name} or name == "algorithm"
    first, again, other = (updated(settings) for settings in (base, base, changed))
    assert torch.equal(first, again)
    assert float((first - other).abs().max()) > 1e-6


@pytest.mark.parametrize("name", SPECS)
def test_it_changes_the_run(name: str) -> None:
    policy = small_policy().spec
    assert run_spec(small_config(), policy) != run_spec(small_config(**SPECS[name]), policy)


UNREAD: tuple[dict[str, Any], ...] = (
    RLOO | {"clip_low": 0.3},
    RLOO | {"clip_high": 0.3},
    RLOO | {"dual_clip": 3.0},
    RLOO | {"objective": "clipped"},
    RLOO | {"advantage": "std"},
    CLIPPED | {"importance_cap": 3.0},
    {"discount": 0.9},
    {"gae_lambda": 0.9},
    {"value_weight": 1.0},
    {"value_clip": 0.2},
    {"demo_rows": 3},
    {"demonstrations": ("one",)},
    {"demo_weight": 1.0},
    {"reward_range": (0.0, 1.0)},
    {"algorithm": "ppo", "advantage": "std"},
    {"algorithm": "ppo", "filter_uniform": True},
    {"algorithm": "ppo", "informative_share": 0.5},
    {"score": "sum"},
    {"score": "sum", "end_on_success": False, "reward_range": (1.0, 0.0)},
)


@pytest.mark.parametrize("settings", UNREAD)
def test_what_nothing_would_read_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"learner setting .* expected"):
        small_config(**settings)


def test_reward_range_refuses_a_group() -> None:
    policy = small_policy()
    member = make_member(policy, "a", 1.0)
    assert member.trajectory is not None
    member.trajectory["reward"][0, 0] = 1.5
    config = small_config(score="differential", reward_range=(0.0, 1.0))
    with pytest.raises(InvalidInput, match=r"member 0 of group 1: 1 rewards lie outside"):
        prepare_group(1, "reach", [member], policy, EpisodeRules(config.score, config.reward_range))


def test_threads_and_device_reach_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    monkeypatch.setattr(assembly.torch, "set_num_threads", seen.append)  # type: ignore[attr-defined]
    assembly.prepare_torch(small_config(threads=3))
    assert seen == [3]
    monkeypatch.setattr(assembly.torch.cuda, "is_available", lambda: False)  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="device = 'cuda', but torch finds no usable GPU"):
        assembly.prepare_torch(small_config(device="cuda"))


def test_publishing_settings_reach_the_publisher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}

    class Stop(Exception):
        pass

    def publisher(*_: Any, **settings: Any) -> None:
        given.update(settings)
        raise Stop

    monkeypatch.setattr(server, "WeightPublisher", publisher)
    monkeypatch.setattr(server, "StoreClient", lambda *_, **__: None)
    config = small_config(shared_folder=str(tmp_path), staging_files=9, delta_density=0.3, delta_anchor=7)
    train: Callable[..., None] = server._train
    with pytest.raises(Stop):
        train(config, Progress(), Telemetry("learner", "test"))
    assert (given["folder"], given["files"]) == (str(tmp_path), 9)
    assert (given["rule"].density, given["rule"].anchor) == (0.3, 7)


def test_old_checkpoints_and_prefetch_follow_their_settings(make_bench: Any) -> None:
    bench = make_bench(checkpoint_updates=0, checkpoint_seconds=0.001, prefetch_updates=3)
    loop = bench.learner()
    assert loop._lanes.prefetch._ready.maxsize == 3 * bench.config.groups_per_update
    assert bench.run()
    assert bench.telemetry.metrics().get("checkpoints_coalesced", 0) >= 0
    assert len(list((bench.folder / "run" / "checkpoints").iterdir())) > 1  # beside the last one, which is always made
