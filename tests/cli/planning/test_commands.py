"""`dvla profile` measures a real recipe; `dvla plan` reads that, speaks plainly, and writes files that parse."""

import json
import tomllib
from pathlib import Path

import pytest
import yaml

from services.cli.__main__ import main
from services.cli.planning.inventory import Inventory, NodeSection
from services.cli.planning.search import find_plan
from services.cli.planning.writing import write_plan
from services.cli.recipe import parse_recipe
from services.common.errors import ConfigError
from tests.cli.planning.test_plan import example

ROOT = Path(__file__).parents[3]
ONE = Inventory((NodeSection(name="box", gpus=8, memory_gb=141),))
CORES = Inventory((NodeSection(name="box", cores=8, memory_gb=800),))
MANY = Inventory((NodeSection(name="a", count=2, gpus=8, memory_gb=141), NodeSection(name="b", gpus=4, memory_gb=141)))


def test_profile_then_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    profile, there, plan = tmp_path / "p.json", tmp_path / "i.toml", tmp_path / "plan.json"
    there.write_text('[[nodes]]\nname = "box"\ncores = 4\nmemory_gb = 64\n')
    assert main(["profile", str(ROOT / "recipes" / "toy.toml"), "--quick", "--to", str(profile)]) == 0
    data = json.loads(profile.read_text())
    assert not data["emulated"]
    assert data["sim"]["envs"] == [1, 4, 8]
    assert all(seconds > 0 for seconds in data["sim"]["step_seconds"] + data["inference"]["call_seconds"])
    assert data["learner"]["steps_per_update"] == 8 * 8 * 20
    assert data["publish"]["bytes"] > 1000
    capsys.readouterr()
    recipe = tmp_path / "best.toml"
    assert main(["plan", str(profile), str(there), "--write", str(recipe), "--json", str(plan)]) == 0
    told = capsys.readouterr().out
    assert "env steps/s predicted" in told
    assert "bottleneck: " in told
    assert "neighbours:" in told
    assert json.loads(plan.read_text())["neighbours"][0]["loss"] >= 0
    assert tomllib.loads(recipe.read_text())["sim"]["slots"] >= 1


@pytest.mark.parametrize("inventory", [ONE, CORES])
def test_a_plan_for_one_machine_becomes_a_recipe_and_a_compose_override(tmp_path: Path, inventory: Inventory) -> None:
    plan = find_plan(example(), inventory)
    write_plan(plan, tmp_path / "best.toml")
    write_plan(plan, tmp_path / "override.yml")
    tables = tomllib.loads((tmp_path / "best.toml").read_text())
    parse_recipe("best", {**tables, "sim": tables["sim"] | {"sim": "toy", "tasks": ["reach"]}})
    override = yaml.safe_load((tmp_path / "override.yml").read_text())["services"]
    base = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    assert override.keys() <= base.keys()
    assert override["sim"]["scale"] == tables["run"]["sims"]
    assert int(override["sim"]["environment"]["DVLA_SIM_SLOTS"]) == tables["sim"]["slots"]


def test_a_plan_for_many_nodes_becomes_placement(tmp_path: Path) -> None:
    plan = find_plan(example(train_seconds=0.0005), MANY)
    write_plan(plan, tmp_path / "kubernetes.yaml")
    documents = list(yaml.safe_load_all((tmp_path / "kubernetes.yaml").read_text()))
    names = {document["metadata"]["name"]: document for document in documents}
    assert {"dvla-sim", "dvla-rollout", "dvla-learner", "dvla-store", "dvla-weights"} <= names.keys()
    assert ("dvla-relay" in names) == plan.best.relay
    beside = names["dvla-sim"]["spec"]["template"]["spec"]["affinity"]["podAffinity"]
    assert "dvla-rollout" in json.dumps(beside)
    with pytest.raises(ConfigError, match="the plan uses several"):
        write_plan(plan, tmp_path / "override.yml")
    with pytest.raises(ConfigError, match=r"expected a name that ends in"):
        write_plan(plan, tmp_path / "plan.txt")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plan", "nowhere.json", "nowhere.toml"], "profile 'nowhere.json' does not exist"),
        (["plan", "README.md", "nowhere.toml"], "cannot be read"),
        (["profile", "nowhere.toml"], "does not exist"),
        (["profile", "recipes/toy.toml", "--envs", "0"], "expected numbers of 1 or more"),
        (["profile", "recipes/toy.toml", "--set", "run.sim=unix:/x"], "is an address"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
