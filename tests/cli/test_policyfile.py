import json
from pathlib import Path
from typing import Any

import pytest

from services.cli.policyfile import check_fits, check_same, read_policy_config
from services.common.errors import ConfigError
from services.common.spec import ActionSpec, SimSpec, TaskSpec, TensorSpec
from services.policies.config import PolicyConfig

SIM = SimSpec(
    observation=(TensorSpec("state", "float32", (4,)), TensorSpec("rgb/top", "uint8", (16, 16, 3))),
    action=ActionSpec(2, (-1.0, -1.0), (1.0, 1.0), "velocity"),
    tasks=(TaskSpec("reach", "reach", 20),),
    starts="state",
    backend="toy/numpy",
)


def policy(folder: Path, **settings: Any) -> Path:
    images = {"image_size": 16} if settings.get("cameras") else {}
    config = PolicyConfig(**{"action_dim": 2, "state_dim": 4} | images | settings)
    (folder / "policy.json").write_text(json.dumps({"config": config.to_json()}))
    return folder


def test_a_policy_may_read_less_than_the_simulator_offers(tmp_path: Path) -> None:
    check_fits(policy(tmp_path), SIM)
    check_fits(policy(tmp_path, state_dim=0, cameras=("top",)), SIM)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"action_dim": 4}, "has 4 action dimensions; the simulator (toy/numpy, velocity) has 2"),
        ({"state_dim": 9}, "reads 'state' of shape [9]; the simulator offers state [4], rgb/top [16, 16, 3]"),
        ({"cameras": ("side",)}, "reads 'rgb/side'"),
        ({"cameras": ("top",), "image_size": 64}, "reads 'rgb/top' of shape [64, 64, 3]"),
    ],
)
def test_a_policy_of_another_simulator_is_refused(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_fits(policy(tmp_path, **settings), SIM)
    assert message in str(caught.value)


def test_a_policy_that_contradicts_the_recipe_is_refused(tmp_path: Path) -> None:
    folder = policy(tmp_path, cameras=("top",))
    check_same(folder, {"family": "tiny-flow", "cameras": ("top",)})
    with pytest.raises(ConfigError, match=r"\[policy\] family = 'tiny-oft', but the policy in .* has family"):
        check_same(folder, {"family": "tiny-oft"})


def test_a_folder_without_a_readable_policy_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no policy in"):
        read_policy_config(tmp_path)
    (tmp_path / "policy.json").write_text("{")
    with pytest.raises(ConfigError, match="describes no policy"):
        read_policy_config(tmp_path)
