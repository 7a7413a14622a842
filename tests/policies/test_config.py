import json
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.errors import ConfigError
from services.common.spec import ActionSpec, SimSpec, TaskSpec, TensorSpec
from services.policies.config import SIZES, DType, PolicyConfig
from tests.policies.toys import make_config

names = st.text(st.characters(categories=["L", "N"]), min_size=1, max_size=8)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=5),
    lambda x: st.lists(x) | st.dictionaries(names, x),
)


@st.composite
def configs(draw: st.DrawFn) -> PolicyConfig:
    family = draw(st.sampled_from(["tiny-oft", "tiny-flow"]))
    cameras = tuple(draw(st.lists(names, unique=True, max_size=3)))
    patch = draw(st.sampled_from([4, 8]))
    own: dict[str, Any] = {}  # settings that this family reads; others are refused
    if family == "tiny-flow":
        own["flow_method"] = method = draw(st.sampled_from(["sde", "noise", "fpo"]))
        own["action_norm"] = draw(st.sampled_from(["quantile", "meanstd"]))
        own["denoising_steps"] = draw(st.integers(1, 20))
        if method == "sde":
            own["noise_level"] = draw(st.floats(0.01, 2))
        elif method == "noise":
            own["noise_reduction"] = draw(st.sampled_from(["mean", "sum"]))
        else:
            own["flow_samples"] = draw(st.integers(1, 20))
    else:
        own["temperature"] = draw(st.floats(0.01, 10))
        own["token_spread"] = draw(st.floats(0, 1))
    if cameras:
        own |= {"patch": patch, "image_size": patch * draw(st.integers(1, 16))}
    if own.get("flow_method") != "fpo":
        own["ratio_level"] = draw(st.sampled_from(["auto", "token", "action", "chunk"]))
    dtype: DType = draw(st.sampled_from(["float32", "bfloat16"]))
    return PolicyConfig(
        action_dim=draw(st.integers(1, 32)),
        family=family,
        size=draw(st.sampled_from(sorted(SIZES))),
        chunk=draw(st.integers(1, 50)),
        state_dim=draw(st.integers(0 if cameras else 1, 99)),
        cameras=cameras,
        instruction_bytes=draw(st.integers(1, 256)),
        value_head=draw(st.booleans()),
        dropout=draw(st.floats(0, 0.9)),
        options=draw(st.dictionaries(names, json_values, max_size=3)),
        dtype=dtype,
        autocast=dtype == "float32" and draw(st.booleans()),
        compile=draw(st.booleans()),
        **own,
    )


@settings(max_examples=40)
@given(configs())
def test_survives_json(config: PolicyConfig) -> None:
    assert PolicyConfig.from_json(json.loads(json.dumps(config.to_json()))) == config


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"family": "tiny-fow"}, "tiny-fow"),
        ({"family": 7}, "family"),
        ({"size": "xxl"}, "size"),
        ({"chunk": 0}, "chunk"),
        ({"chunk": 2.5}, "chunk"),
        ({"action_dim": True}, "action_dim"),
        ({"state_dim": -1}, "state_dim"),
        ({"state_dim": 0}, "state_dim"),
        ({"cameras": "top"}, "cameras"),
        ({"cameras": ("top", "top")}, "cameras"),
        ({"cameras": ("top",), "image_size": 60}, "image_size"),
        ({"patch": 5}, "patch"),
        ({"instruction_bytes": 0}, "instruction_bytes"),
        ({"temperature": 0.0}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"denoising_steps": 0}, "denoising_steps"),
        ({"noise_level": float("inf")}, "noise_level"),
        ({"flow_method": "cps"}, "flow_method"),
        ({"family": "tiny-oft", "flow_method": "noise"}, "flow_method"),
        ({"family": "tiny-oft", "action_norm": "meanstd"}, "action_norm"),
        ({"noise_reduction": "max"}, "noise_reduction"),
        ({"ratio_level": "episode"}, "ratio_level"),
        ({"value_head": 1}, "value_head"),
        ({"dropout": 1.0}, "dropout"),
        ({"dtype": "float16"}, "dtype"),
        ({"dtype": "bfloat16", "autocast": True}, "autocast"),
        ({"compile": 1}, "compile"),
        ({"flow_method": "fpo", "ratio_level": "token"}, "ratio_level"),
        ({"flow_method": "fpo", "flow_samples": 0}, "flow_samples"),
        ({"flow_samples": 4}, "flow_samples"),
        ({"flow_method": "fpo", "noise_level": 0.3}, "noise_level"),
        ({"temperature": 0.5}, "temperature"),
        ({"family": "tiny-oft", "denoising_steps": 8}, "denoising_steps"),
        ({"image_size": 128}, "image_size"),
        ({"options": {"x": object()}}, "options"),
    ],
)
def test_refuses_impossible_values_by_name(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        make_config(**settings)


def test_refuses_json_of_another_version_or_with_unknown_or_missing_fields() -> None:
    good = make_config().to_json()
    with pytest.raises(ConfigError, match="version 99"):
        PolicyConfig.from_json(good | {"version": 99})
    with pytest.raises(ConfigError, match="'temprature'"):
        PolicyConfig.from_json(good | {"temprature": 1.0})
    with pytest.raises(ConfigError, match="action_dim is missing"):
        PolicyConfig.from_json({"version": 1})


def test_each_family_has_its_own_ratio_level_unless_told() -> None:
    assert make_config(family="tiny-oft").effective_ratio_level == "token"
    assert make_config(family="tiny-flow").effective_ratio_level == "chunk"
    assert make_config(family="tiny-flow", ratio_level="action").effective_ratio_level == "action"


def test_reads_shapes_from_the_simulator() -> None:
    tensors = (TensorSpec("rgb/base_camera", "uint8", (128, 128, 3)), TensorSpec("state", "float32", (18,)))
    action = ActionSpec(7, (-1.0,) * 7, (1.0,) * 7)
    sim = SimSpec(tensors, action, (TaskSpec("t", "do it", 50),), "state", "toy")
    config = PolicyConfig.for_sim(sim, chunk=8)
    assert (config.action_dim, config.state_dim, config.image_size, config.chunk) == (7, 18, 128, 8)
    assert config.observation == ("state", "rgb/base_camera")
    assert PolicyConfig.for_sim(sim, cameras=()).observation == ("state",)


def test_configuration_and_demo_data_do_not_import_torch() -> None:
    code = "import sys, services.policies.config, services.policies.demodata; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "False"
