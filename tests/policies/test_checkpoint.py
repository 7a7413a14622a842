import json
from pathlib import Path

import pytest
import torch

from services.common.errors import ConfigError, InvalidInput, NotFound
from services.policies.checkpoint import load_checkpoint, save_checkpoint
from services.policies.config import PolicyConfig
from tests.policies.toys import HEADS, act, inputs_for, make_config, make_policy


def weights_file(folder: Path) -> Path:
    (path,) = folder.glob("weights-*.safetensors")
    return path


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_comes_back_exactly(head: str, dtype: str, tmp_path: Path) -> None:
    policy = make_policy(dtype=dtype, **HEADS[head])
    policy.get_buffer("normaliser.action_scale").mul_(0.3)
    save_checkpoint(tmp_path, policy)
    again = load_checkpoint(tmp_path, PolicyConfig.from_json(policy.spec.config))
    assert again.spec == policy.spec
    inputs = inputs_for(policy, 3)
    assert torch.equal(act(policy, inputs, [0, 1, 2]).log_prob, act(again, inputs, [0, 1, 2]).log_prob)


def test_replacing_leaves_one_policy(tmp_path: Path) -> None:
    for seed in (0, 1):
        save_checkpoint(tmp_path, make_policy(seed))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["policy.json", weights_file(tmp_path).name]
    again = load_checkpoint(tmp_path)
    assert torch.equal(again.state_dict()["expert.position"], make_policy(1).state_dict()["expert.position"])


def test_a_crash_between_the_two_files_keeps_the_old_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_checkpoint(tmp_path, make_policy(0))
    dumps = json.dumps

    def crash(*args: object, **kwargs: object) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(json, "dumps", crash)
    with pytest.raises(KeyboardInterrupt):
        save_checkpoint(tmp_path, make_policy(1))
    monkeypatch.setattr(json, "dumps", dumps)
    again = load_checkpoint(tmp_path)
    assert torch.equal(again.state_dict()["expert.position"], make_policy(0).state_dict()["expert.position"])


def test_another_configuration_is_refused_by_name(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, make_policy(noise_level=0.3))
    with pytest.raises(ConfigError, match=r"noise_level = 0.3, this recipe asks for 0.5"):
        load_checkpoint(tmp_path, make_config())
    with pytest.raises(ConfigError, match="tiny-oft"):
        load_checkpoint(tmp_path, make_config(family="tiny-oft"))


def test_damage_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=r"policy\.json"):
        load_checkpoint(tmp_path)
    save_checkpoint(tmp_path, make_policy())
    path = weights_file(tmp_path)
    data = path.read_bytes()
    for damaged in (data[:-1], data[:-1] + bytes([data[-1] ^ 1]), b""):
        path.write_bytes(damaged)
        with pytest.raises(InvalidInput, match="hash"):
            load_checkpoint(tmp_path)
    path.unlink()
    with pytest.raises(InvalidInput, match="missing"):
        load_checkpoint(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": "dvla-policy-1"}', '{"format": "pickle"}'])
def test_a_malformed_description_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "policy.json").write_text(text)
    with pytest.raises(InvalidInput, match=r"policy\.json"):
        load_checkpoint(tmp_path)


def test_weights_outside_the_folder_are_not_read(tmp_path: Path) -> None:
    inside, outside = tmp_path / "inside", tmp_path / "outside"
    save_checkpoint(outside, make_policy())
    save_checkpoint(inside, make_policy())
    weights_file(inside).unlink()
    description = json.loads((inside / "policy.json").read_text())
    description["weights"]["file"] = f"../outside/{weights_file(outside).name}"
    (inside / "policy.json").write_text(json.dumps(description))
    with pytest.raises(InvalidInput, match="missing"):
        load_checkpoint(inside)


def test_load_state_is_strict_and_changes_nothing_on_failure() -> None:
    policy = make_policy()
    state = {name: tensor.clone() + 1 for name, tensor in policy.trainable_state().items()}
    name = next(iter(state))
    wrong_states = [
        {k: v for k, v in state.items() if k != name},
        state | {"extra": torch.zeros(1)},
        state | {name: torch.zeros(1, 2, 3)},
        state | {name: state[name].double()},
    ]
    before = {key: tensor.clone() for key, tensor in policy.trainable_state().items()}
    for wrong in wrong_states:
        with pytest.raises(InvalidInput, match=f"{name}|extra"):
            policy.load_state(wrong)
        assert all(torch.equal(tensor, before[key]) for key, tensor in policy.trainable_state().items())
    pointers = {key: tensor.data_ptr() for key, tensor in policy.trainable_state().items()}
    policy.load_state(state)
    assert all(torch.equal(tensor, state[key]) for key, tensor in policy.trainable_state().items())
    assert pointers == {key: tensor.data_ptr() for key, tensor in policy.trainable_state().items()}
