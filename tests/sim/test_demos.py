"""Scripted experts and the demonstrations that they give, on the toy simulator."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from services.common.errors import ConfigError, Unsupported
from services.common.seeds import DEMONSTRATIONS
from services.common.spec import ActionSpec, Array
from services.policies.demodata import load_demos
from services.sim.config import SimConfig
from services.sim.demos import HEADER, DemoPlan, Episode, generate
from services.sim.experts import Expert, with_noise

TOY = SimConfig(sim="toy", tasks=("reach", "mirror"))


def rate(episodes: list[Episode]) -> float:
    return float(np.mean([episode.success for episode in episodes]))


@pytest.mark.parametrize("task", ["reach", "mirror"])
def test_the_competent_expert_always_succeeds(task: str, tmp_path: Path) -> None:
    assert rate(generate(TOY, DemoPlan(task, 60), tmp_path, processes=0)) == 1.0


def test_the_biased_expert_succeeds_now_and_then_and_its_failures_are_kept(tmp_path: Path) -> None:
    done: list[tuple[int, int]] = []
    episodes = generate(
        TOY, DemoPlan("reach", 200, bias=1.0, noise=0.05), tmp_path, 0, lambda *progress: done.append(progress)
    )
    assert 0.1 < rate(episodes) < 0.35
    assert done[-1] == (200, 200)
    assert done == sorted(done)
    demos = load_demos([tmp_path])
    assert len(np.unique(demos.episode)) == 200
    assert len(demos) == sum(episode.steps for episode in episodes)
    assert demos.instructions == ("move the point to the goal",)
    assert all(episode.seed in DEMONSTRATIONS for episode in episodes)


def test_failures_can_be_left_out(tmp_path: Path) -> None:
    plan = DemoPlan("reach", 50, bias=1.0, noise=0.0, keep_failures=False)
    episodes = generate(TOY, plan, tmp_path, processes=0)
    kept = sum(episode.kept for episode in episodes)
    assert 0 < kept < 50
    assert len(np.unique(load_demos([tmp_path]).episode)) == kept


def read(folder: Path) -> dict[str, dict[str, Array]]:
    shards = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="numpy") as file:
            shards[path.name] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return shards


def test_data_do_not_depend_on_the_number_of_processes(tmp_path: Path) -> None:
    plan = DemoPlan("reach", 25, seed=7)
    generate(TOY, plan, tmp_path / "one", processes=0)
    generate(TOY, plan, tmp_path / "two", processes=2)
    one, two = read(tmp_path / "one"), read(tmp_path / "two")
    assert list(one) == list(two) == [f"reach-{index:05d}.safetensors" for index in range(3)]
    for name, arrays in one.items():
        for key, array in arrays.items():
            assert np.array_equal(array, two[name][key])
    assert not list(tmp_path.rglob("*.partial"))


def test_labels_are_clean_while_noise_moves_the_point(tmp_path: Path) -> None:
    generate(TOY, DemoPlan("reach", 10, noise=0.4), tmp_path, processes=0)
    (arrays,) = read(tmp_path).values()
    expert = Expert("reach", ActionSpec(2, (-1, -1), (1, 1)))
    state, action = (arrays[name].astype(np.float32) for name in ("obs/state", "action"))
    assert np.array_equal(expert(state), action)
    moved = np.diff(state[:, :2], axis=0) / 0.15
    same = arrays["episode"][1:] == arrays["episode"][:-1]
    assert np.abs(moved - action[:-1])[same].mean() > 0.1


def test_the_header_says_what_made_the_shard(tmp_path: Path) -> None:
    generate(TOY, DemoPlan("mirror", 3, seed=5, bias=0.5, noise=0.2), tmp_path, processes=0)
    (path,) = tmp_path.glob("*.safetensors")
    with safe_open(path, framework="numpy") as file:
        header = json.loads(file.metadata()[HEADER])
    assert header["task"] == "mirror"
    assert header["instruction"] == "move the point opposite to the goal"
    assert (header["seed"], header["bias"], header["noise"], header["backend"]) == (5, 0.5, 0.2, "toy/numpy")
    assert header["action"]["control_mode"] == "velocity"
    assert [episode["episode"] for episode in header["episodes"]] == [0, 1, 2]


def test_images_are_recorded_as_the_policy_sees_them(tmp_path: Path) -> None:
    config = SimConfig(sim="toy", tasks=("reach",), observation="rgb", image_size=16)
    generate(config, DemoPlan("reach", 2), tmp_path, processes=0)
    (arrays,) = read(tmp_path).values()
    assert arrays["obs/rgb/top"].dtype == np.uint8
    assert set(arrays) == {"obs/rgb/top", "action", "episode", "step"}


def test_tasks_without_an_expert_are_refused() -> None:
    with pytest.raises(Unsupported, match="no scripted expert for task 'Nope-v1'; there are some for"):
        Expert("Nope-v1", ActionSpec(4, (-1,) * 4, (1,) * 4))
    with pytest.raises(Unsupported, match="acts in pd_ee_delta_pos, not 'pd_joint_pos'"):
        Expert("PushCube-v1", ActionSpec(8, (-1,) * 8, (1,) * 8, "pd_joint_pos"))


def test_impossible_plans() -> None:
    with pytest.raises(ConfigError, match="episodes = 0"):
        DemoPlan("reach", 0)
    with pytest.raises(ConfigError, match="noise = -1"):
        DemoPlan("reach", 1, noise=-1)


def test_noise_has_the_asked_size_and_none_is_none() -> None:
    rng = np.random.default_rng(0)
    actions = np.zeros((4000, 2), np.float32)
    assert np.std(with_noise(actions, 0.25, rng)) == pytest.approx(0.25, rel=0.05)
    assert with_noise(actions, 0.0, rng) is actions
