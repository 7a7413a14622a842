from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.errors import InvalidInput, NotFound
from services.policies.demodata import Demos, chunk_at, load_demos, write_shard


def write(path: Path, lengths: list[int], instruction: str = "go", **changes: Any) -> dict[str, np.ndarray]:
    count = sum(lengths)
    random = np.random.default_rng(count)
    arrays: dict[str, Any] = {
        "observation": {
            "state": random.random((count, 3), np.float32),
            "rgb/top": np.zeros((count, 4, 4, 3), np.uint8),
        },
        "action": random.random((count, 2), np.float32),
        "episode": np.repeat(np.arange(len(lengths)), lengths),
        "step": np.concatenate([np.arange(n) for n in lengths]),
    }
    write_shard(path, **(arrays | changes), task="t", instruction=instruction, expert="scripted")
    return arrays


def test_shards_join_into_one_set(tmp_path: Path) -> None:
    a = write(tmp_path / "0.safetensors", [3, 1])
    b = write(tmp_path / "1.safetensors", [2], "stop")
    demos = load_demos([tmp_path])
    assert len(demos) == 6
    assert demos.episode.tolist() == [0, 0, 0, 1, 2, 2]
    assert demos.texts(np.arange(6)) == ["go"] * 4 + ["stop"] * 2
    assert np.array_equal(demos.action, np.concatenate([a["action"], b["action"]]))
    assert demos.observation["rgb/top"].dtype == np.uint8
    assert demos.observation["state"].shape == (6, 3)


@settings(max_examples=40)
@given(st.lists(st.integers(1, 6), min_size=1, max_size=5), st.integers(1, 8))
def test_chunks_stop_at_the_end_of_their_episode(lengths: list[int], chunk: int) -> None:
    count = sum(lengths)
    episode = np.repeat(np.arange(len(lengths)), lengths)
    action = np.arange(count, dtype=np.float32)[:, None]
    demos = Demos({}, action, episode, np.zeros(count, np.int64), ("go",))
    actions, mask = chunk_at(demos, np.arange(count), chunk)
    for row in range(count):
        end = int(np.flatnonzero(episode == episode[row])[-1])
        expected = [min(row + k, end) for k in range(chunk)]
        assert actions[row, :, 0].tolist() == expected
        assert mask[row].tolist() == [row + k <= end for k in range(chunk)]


def test_malformed_shards_are_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "bad.safetensors"
    for changes, reason in (
        ({"step": np.array([0, 1, 1, 0])}, "ordered"),
        ({"step": np.array([1, 2, 3, 0])}, "ordered"),
        ({"episode": np.array([0, 0, 1, 1])}, "ordered"),
        ({"action": np.full((4, 2), np.nan, np.float32)}, "finite"),
        ({"action": np.zeros(4, np.float32)}, "finite"),
        ({"observation": {"state": np.zeros((5, 3), np.float32)}}, "obs/state has 5 rows"),
    ):
        with pytest.raises(InvalidInput, match=reason):
            write(path, [3, 1], **changes)
    assert not path.exists()
    path.write_bytes(b"no safetensors")
    with pytest.raises(InvalidInput, match=r"bad\.safetensors is no readable"):
        load_demos([tmp_path])


def test_shards_with_other_observations_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "0.safetensors", [2])
    write(tmp_path / "1.safetensors", [2], observation={"state": np.zeros((2, 3), np.float32)})
    with pytest.raises(InvalidInput, match=r"1\.safetensors"):
        load_demos([tmp_path])


def test_an_empty_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="dvla demos"):
        load_demos([tmp_path])
