"""`dvla weights list | show | verify | export` against a real server, as a user calls them."""

import json
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch

from services.common.bundle import Version, bundle
from services.common.config import run_app
from services.common.errors import ConfigError, NotFound
from services.common.spec import Array
from services.common.weights_client import WeightPublisher
from services.weights import tools
from services.weights.__main__ import app
from tests.weights.hosting import Host, stamped


@pytest.fixture
def address(host: Host, folder: Path) -> str:
    address = host.start()
    writer = WeightPublisher(address, "policy", folder=str(folder / "shm"))
    rng = np.random.default_rng(0)
    shared = rng.normal(size=(3, 2)).astype(np.float32)
    halves = rng.integers(0, 2**15, 6, dtype=np.uint16)
    arrays: dict[str, Array] = {"a": shared, "tied": shared, "b": halves}
    writer.publish(*stamped(1, 1, model="policy"))
    manifest, buffer = bundle("policy", Version(1, 2), arrays, {"b": "bfloat16"}, {"policy": json.dumps({"x": 1})})
    writer.publish(manifest, buffer)
    writer.close()
    return address


def test_the_four_commands(address: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def run(*words: str) -> str:
        assert run_app(app, [*words, "--address", address]) == 0
        return capsys.readouterr().out

    listed = run("list").splitlines()
    assert [line.split()[:3] for line in listed[1:]] == [["policy", "1-2", "sealed"], ["policy", "1-1", "sealed"]]
    shown = run("show")
    assert "policy 1-2: 2 tensors" in shown
    assert "'b' bfloat16[6]" in shown
    assert "'tied' is 'a'" in shown
    assert 'policy: {"x": 1}' in shown
    assert "'layer.weight' float32[5000, 50]" in run("show", "1-1")
    assert "policy 1-2: all 2 tensors are right" in run("verify")
    path = tmp_path / "w.safetensors"
    assert "policy 1-2 in" in run("export", str(path))
    loaded = safetensors.torch.load_file(path)
    rng = np.random.default_rng(0)
    assert torch.equal(loaded["a"], torch.from_numpy(rng.normal(size=(3, 2)).astype(np.float32)))
    assert loaded["b"].dtype == torch.bfloat16
    assert run_app(app, ["export", str(path), "--address", address]) == 2
    assert "exists" in capsys.readouterr().err


def test_wrong_names_are_one_clear_line(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_app(app, ["verify", "7-7", "--address", address]) != 0
    assert "the newest is 1-2" in capsys.readouterr().err
    with pytest.raises(NotFound):
        tools.read_manifest(address, "other", None)
    with pytest.raises(ConfigError, match="epoch-update"):
        tools.parse_version("seven")


def test_an_empty_server_says_so(host: Host) -> None:
    assert tools.describe_list(tools.list_versions(host.start())) == "no versions"
