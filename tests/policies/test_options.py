"""No dead options: every setting of a policy changes what it is or does, or is refused where nothing reads it."""

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from services.common.errors import ConfigError
from services.policies.config import SIZES, PolicyConfig
from services.policies.noise import RowNoise
from services.policies.registry import build_policy
from services.policies.sft import fit_normalisation
from tests.policies.toys import INSTRUCTION, inputs_for, make_config, make_policy

OFT: dict[str, Any] = {"family": "tiny-oft"}
NOISE: dict[str, Any] = {"flow_method": "noise"}
FPO: dict[str, Any] = {"flow_method": "fpo"}
RGB: dict[str, Any] = {"cameras": ("top",)}

ACTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "family": ({}, OFT),
    "size": ({}, {"size": "s"}),
    "chunk": ({}, {"chunk": 5}),
    "action_dim": ({}, {"action_dim": 2}),
    "temperature": (OFT, OFT | {"temperature": 0.5}),
    "denoising_steps": ({}, {"denoising_steps": 2}),
    "flow_method": ({}, NOISE),
    "noise_reduction": (NOISE, NOISE | {"noise_reduction": "sum"}),
    "noise_level": ({}, {"noise_level": 0.2}),
    "flow_samples": (FPO, FPO | {"flow_samples": 3}),
    "value_head": ({}, {"value_head": True}),
    "dtype": ({}, {"dtype": "bfloat16"}),
    "autocast": ({}, {"autocast": True}),
}
"""Settings that change what `act` returns: (settings, changed ones)."""

ELSEWHERE = (
    "state_dim", "cameras", "image_size", "patch", "instruction_bytes", "action_norm", "ratio_level", "token_spread",
    "dropout", "compile", "options",
)  # fmt: skip


def acted(settings: dict[str, Any]) -> dict[str, torch.Tensor]:
    policy = make_policy(**settings)
    act = policy.act(inputs_for(policy, 4), "train", RowNoise([f"{row}" for row in range(4)]))
    value = {} if act.value is None else {"value": act.value}
    return {"actions": act.actions, "log_prob": act.log_prob} | act.record | value


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(a[name].shape == b[name].shape and torch.equal(a[name], b[name]) for name in a)


def test_every_setting_is_accounted_for() -> None:
    assert {f.name for f in fields(PolicyConfig)} == {*ACTS, *ELSEWHERE}


@pytest.mark.parametrize("name", ACTS)
def test_it_changes_how_the_policy_acts(name: str) -> None:
    base, changed = ACTS[name]
    assert same(acted(base), acted(base))
    assert not same(acted(base), acted(changed))


def test_inputs_follow_their_settings() -> None:
    for changed in ({"state_dim": 7}, RGB, RGB | {"image_size": 32}, {"instruction_bytes": 90}):
        policy, other = make_policy(), make_policy(**changed)
        shapes = [{n: t.shape for n, t in inputs_for(p, 1, INSTRUCTION).items()} for p in (policy, other)]
        assert shapes[0] != shapes[1], changed
    fine, coarse = (make_policy(**RGB, patch=patch) for patch in (8, 16))
    assert sum(p.numel() for p in fine.parameters()) != sum(p.numel() for p in coarse.parameters())


def test_imitation_follows_its_settings() -> None:
    actions = torch.rand(4, 4, 3, generator=torch.Generator().manual_seed(0))
    for changed in (OFT | {"token_spread": 0.3}, OFT | {"dropout": 0.5}):
        losses = []
        for settings in (OFT, changed):
            policy = make_policy(**settings)
            noise = RowNoise([f"{row}" for row in range(4)])
            losses.append(policy.sft_loss(inputs_for(policy, 4), actions, torch.ones(4, 4, dtype=torch.bool), noise))
        assert not torch.equal(losses[0], losses[1]), changed
    scales = []
    for norm in ("quantile", "meanstd"):
        policy = make_policy(action_norm=norm)
        rng = np.random.default_rng(0)
        fit_normalisation(policy, rng.normal(size=(50, 6)).astype(np.float32), actions.numpy().reshape(-1, 3))
        scales.append(policy.trainable_state()["normaliser.action_scale"].clone())
    assert not torch.equal(scales[0], scales[1])


def test_the_learner_hears_the_ratio_level_and_custom_policies_their_options() -> None:
    assert make_policy(**OFT).spec.ratio_level == "token"
    assert make_policy(**OFT, ratio_level="chunk").spec.ratio_level == "chunk"
    assert make_config(options={"depth": 3}).to_json()["options"] == {"depth": 3}
    with pytest.raises(ConfigError, match="options"):
        make_config(**OFT).__class__(**{**make_config(**OFT).__dict__, "options": {"x": object()}})


@pytest.mark.parametrize("family", ["tiny-oft", "tiny-flow"])
def test_sizes_by_name_span_a_third_of_a_million_to_thirty_million(family: str) -> None:
    counts = []
    for size in SIZES:
        with torch.device("meta"):
            policy = build_policy(replace(make_config(family=family), size=size), device="meta")
        counts.append(sum(p.numel() for p in policy.parameters()) / 1e6)
    assert counts == sorted(counts)
    assert counts[0] < 0.4
    assert 25 < counts[-1] < 45


@pytest.mark.parametrize("head", [OFT, {}, NOISE, FPO])
def test_autocast_scores_its_own_actions_in_the_same_precision(head: dict[str, Any]) -> None:
    policy = make_policy(**head, autocast=True, value_head=True)
    inputs = inputs_for(policy, 8)
    act = policy.act(inputs, "train", RowNoise([f"{row}" for row in range(8)]))
    scored = policy.evaluate(inputs, act.record)
    assert scored.log_prob.dtype == act.log_prob.dtype == torch.float32
    assert (scored.log_prob - act.log_prob).abs().max() < 1e-4
    plain = make_policy(**head, value_head=True).evaluate(inputs, act.record)
    assert not torch.equal(plain.log_prob, scored.log_prob)
    scored.log_prob.sum().backward()
    gradients = [p.grad for p in policy.parameters() if p.grad is not None]
    assert {gradient.dtype for gradient in gradients} == {torch.float32}
    assert policy.estimate(inputs).dtype == torch.float32


def test_compile_marks_every_layer_and_other_policies_refuse(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compiled: list[str] = []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **_: compiled.append(type(self).__name__))
    build_policy(make_config(compile=True))
    assert sorted(compiled) == ["Block"] * 2 + ["ExpertLayer"] * 2
    compiled.clear()
    build_policy(make_config())
    assert compiled == []


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("family", ["tiny-oft", "tiny-flow"])
def test_compiled_layers_score_what_they_acted(family: str) -> None:
    policy, plain = make_policy(family=family, compile=True), make_policy(family=family)
    for rows in (8, 3):
        policy.zero_grad()
        inputs = inputs_for(policy, rows)
        act = policy.act(inputs, "train", RowNoise([f"{row}" for row in range(rows)]))
        scored = policy.evaluate(inputs, act.record)
        assert (scored.log_prob - act.log_prob).abs().max() < 1e-4
        torch.testing.assert_close(plain.evaluate(inputs, act.record).log_prob, scored.log_prob, rtol=1e-3, atol=1e-4)
        scored.log_prob.sum().backward()
        assert all(torch.isfinite(p.grad).all() for p in policy.parameters() if p.grad is not None)
