"""The simulator of examples/custom_simulator: it keeps the contract, compose knows it, and a policy trains on it."""

import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from examples.custom_simulator.dial import Dial
from services.sim.check import run_checks
from services.sim.config import SimConfig, build_sim
from tests.sim.serving import serving

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "custom_simulator"


def test_it_keeps_the_contract(tmp_path: Path) -> None:
    with serving(tmp_path, partial(Dial, num_slots=3), sessions=1) as (service, _):
        assert [finding for finding in run_checks(service.address) if not finding.ok] == []


def test_it_takes_the_place_of_the_built_in_one_by_one_setting() -> None:
    sim = build_sim(SimConfig(sim="examples.custom_simulator.dial:Dial", slots=5))
    assert isinstance(sim, Dial)
    assert sim.num_slots == 5


def test_it_fits_a_page() -> None:
    assert len((FOLDER / "dial.py").read_text().splitlines()) < 90


def test_the_override_file_fits_the_compose_file() -> None:
    base: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    override: dict[str, Any] = yaml.safe_load((FOLDER / "docker-compose.override.yml").read_text())["services"]
    assert set(override) <= set(base)
    assert override["sim"]["environment"]["DVLA_SIM_SIM"] == "examples.custom_simulator.dial:Dial"
    for name, service in base.items():
        if any("/recipes" in str(volume) for volume in service.get("volumes", ())):
            assert "volumes" in override[name], f"{name} reads the recipe, which lies beside the simulator"


@pytest.mark.slow
@pytest.mark.redis
@pytest.mark.timeout(600)
def test_a_policy_learns_on_it_through_all_five_roles(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "services.cli", "train", str(FOLDER / "dial.toml"), "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=580, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    result = re.search(r"success (\d\.\d\d) -> (\d\.\d\d) \(200 held-out starts\)", done.stdout)
    assert result, done.stdout
    before, after = map(float, result.groups())
    assert before < 0.5
    assert after > 0.8
