import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from services.cli.recipe import Recipe, load_recipe, parse_override, parse_recipe
from services.cli.toml import dumps
from services.common.errors import ConfigError

RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*.toml"))
TOY: dict[str, dict[str, Any]] = {"sim": {"sim": "toy", "tasks": ["reach"]}}


def recipe(**sections: dict[str, Any]) -> Recipe:
    names = TOY.keys() | sections.keys()
    return parse_recipe("test", {name: TOY.get(name, {}) | sections.get(name, {}) for name in names})


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipes_in_the_tree_are_fine_and_survive_freezing(path: Path, tmp_path: Path) -> None:
    loaded = load_recipe(path)
    frozen = tmp_path / path.name
    frozen.write_text(dumps(loaded.sections()))
    assert load_recipe(frozen) == loaded


def test_the_recipes_that_are_promised_are_there() -> None:
    assert {p.stem for p in RECIPES} >= {"pushcube", "pushcube-oft", "pickcube", "pushcube-rgb", "gpu", "toy"}
    default = load_recipe(next(path for path in RECIPES if path.stem == "pushcube"))
    assert default.run.mode == "async"
    assert default.run.sims == 2
    assert default.eval.episodes == 300
    assert default.demos.keep_failures
    assert default.policy["family"] == "tiny-flow"
    assert default.sim.control_mode == "pd_ee_delta_pos"


def test_checking_a_recipe_imports_nothing_heavy() -> None:
    code = (
        "import sys; from pathlib import Path; from services.cli.recipe import load_recipe; "
        f"load_recipe(Path({str(RECIPES[0])!r})); "
        "print([name for name in ('torch', 'mani_skill', 'grpc', 'matplotlib') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"


BAD = [
    ({"leaner": {}}, None),
    ({"run": {"sed": 1}}, "unknown key 'sed' in [run] of the recipe; did you mean 'seed'?"),
    ({"sim": {"slot": 4}}, "unknown key 'slot' in [sim] of the recipe; did you mean 'slots'?"),
    ({"policy": {"famly": "tiny-flow"}}, "unknown key 'famly' in [policy] of the recipe; did you mean 'family'?"),
    ({"policy": {"family": "tiny-flw"}}, "[policy] unknown policy family 'tiny-flw'"),
    ({"policy": {"chunk": 0}}, "[policy] policy setting chunk is 0"),
    ({"run": {"mode": "asinc"}}, "[run] mode = 'asinc'; expected one of async, sync"),
    ({"run": {"sims": 0}}, "[run] sims = 0; expected 1 or more"),
    ({"run": {"name": "a/b"}}, "[run] name = 'a/b'; expected"),
    ({"run": {"sim": "nonsense"}}, "[run] sim = 'nonsense'; expected module:Class, unix:/path or host:port"),
    ({"learner": {"group_size": 1}}, "[learner] learner setting group_size = 1; expected 2 or more"),
    ({"learner": {"groups_per_update": 0}}, "groups_per_update = 0"),
    ({"learner": {"group_size": 4, "groups_per_update": 2, "minibatches": 9}}, "minibatches = 9; expected at most"),
    ({"learner": {"algorithm": "ppo"}}, "[learner] algorithm = 'ppo' needs values; set [policy] value_head = true"),
    ({"learner": {"algorithm": "rloo", "clip_low": 0.1}}, "clip_low = 0.1; expected no such setting unless"),
    ({"learner": {"reward_range": ["a"]}}, "[learner] reward_range = 'a'; expected a number"),
    ({"learner": {"learning_rate": "fast"}}, "[learner] learning_rate = 'fast'; expected a number"),
    ({"learner": {"staleness": 2}, "run": {"mode": "sync"}}, "staleness = 2; expected 0 in mode sync"),
    ({"learner": {"tasks": ["mirror"]}}, "[learner] tasks names 'mirror'; [sim] tasks serves only reach"),
    ({"learner": {"mode": "sync"}}, "[learner] mode is not for a recipe of `dvla train` (set run.mode instead)"),
    ({"store": {"redis": "redis://x"}}, "[store] redis is not for a recipe of `dvla train`"),
    ({"sim": {"sim": "mujoco"}}, "[sim] sim = 'mujoco'; expected"),
    ({"sim": {"sim": "maniskill", "tasks": ["PushCubes-v1"]}}, "no scripted expert for task 'PushCubes-v1'"),
    ({"sim": {"sim": "maniskill", "tasks": ["PushCube-v1"], "control_mode": "pd_joint_pos"}}, "pd_ee_delta_pos"),
    ({"policy": {"state_dim": 4}, "sim": {"observation": "rgb"}}, "[policy] state_dim = 4, but [sim] observation"),
    ({"policy": {"cameras": ["top"]}}, "[policy] cameras = ['top'], but [sim] observation = 'state' has no images"),
    ({"eval": {"episodes": 0}}, "[eval] episodes = 0; expected 1 or more"),
    ({"sft": {"steps": 0}}, "[sft] steps = 0; expected more than 0"),
    ({"sft": {"init": "nowhere"}}, "no policy in 'nowhere'"),
    ({"sft": {"demos": "nowhere"}}, "[sft] demos = 'nowhere' holds no demonstrations"),
]


@pytest.mark.parametrize(("sections", "message"), [case for case in BAD if case[1]])
def test_bad_recipes_are_named(sections: dict[str, dict[str, Any]], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        recipe(**sections)
    assert message in str(caught.value)
    assert caught.value.exit_code == 2
    assert "\n" not in str(caught.value)


def test_an_unknown_section_is_named(tmp_path: Path) -> None:
    path = tmp_path / "r.toml"
    path.write_text("[leaner]\nupdates = 3\n")
    with pytest.raises(ConfigError, match=r"unknown section \[leaner\] in r.toml; did you mean 'learner'"):
        load_recipe(path)
    path.write_text("seed = 3\n")
    with pytest.raises(ConfigError, match=r"unknown section \[seed\]"):
        load_recipe(path)
    path.write_text("run = 3\n")
    with pytest.raises(ConfigError, match="stands outside of any section"):
        load_recipe(path)
    path.write_text("[run\n")
    with pytest.raises(ConfigError, match="is not valid TOML"):
        load_recipe(path)


def test_overrides() -> None:
    assert parse_override("learner.learning_rate=1e-4") == ("learner", "learning_rate", 1e-4)
    assert parse_override("run.mode=sync") == ("run", "mode", "sync")
    assert parse_override('sim.tasks=["a", "b"]') == ("sim", "tasks", ["a", "b"])
    assert parse_override("sim.max-steps=3") == ("sim", "max_steps", 3)
    for text in ("learner", "learner.x", "x=1"):
        with pytest.raises(ConfigError, match=r"expected section.key=value"):
            parse_override(text)
    with pytest.raises(ConfigError, match="did you mean 'learner'"):
        parse_override("lerner.updates=3")


def test_the_command_line_wins(tmp_path: Path) -> None:
    path = tmp_path / "r.toml"
    path.write_text(dumps(TOY | {"run": {"seed": 1, "sims": 3}}))
    loaded = load_recipe(path, ["learner.updates=7", "run.sims=5"], seed=9, mode=None)
    assert (loaded.run.seed, loaded.run.sims, loaded.learner.updates) == (9, 5, 7)
    assert tomllib.loads(dumps(loaded.sections()))["run"]["seed"] == 9


def test_seeds_follow_the_run() -> None:
    first, second = recipe(run={"seed": 1}), recipe(run={"seed": 2})
    assert first.learner.seed == 1
    assert first.seed_of(first.demos) == 1
    assert first.learner.seed_base != second.learner.seed_base
    assert recipe(run={"seed": 1}, demos={"seed": 5}).seed_of(recipe(demos={"seed": 5}).demos) == 5
    assert recipe(run={"seed": 1}, learner={"seed": 8}).learner.seed == 8


def test_a_simulator_of_your_own_takes_the_place_of_the_built_in_one() -> None:
    own = recipe(run={"sim": "robots.sim:Arm"})
    assert own.sim.sim == "robots.sim:Arm"
    assert own.tasks == ()
    assert not own.makes_demos
    away = recipe(run={"sim": "10.0.0.2:7431"})
    assert away.run.sim_address == "10.0.0.2:7431"
    assert away.run.sim_class == ""
    assert recipe(run={"sim": "unix:/tmp/s.sock"}).run.sim_address == "unix:/tmp/s.sock"


def test_the_imitation_loss_reads_the_demonstrations_of_the_warm_start() -> None:
    assert recipe(learner={"demo_weight": 0.1}).demonstrations("runs/a/demos") == {"demonstrations": ("runs/a/demos",)}
    given = recipe(learner={"demo_weight": 0.1, "demonstrations": ["x"]})
    assert given.demonstrations("runs/a/demos") == {}
    assert given.learner.demonstrations == ("x",)
    assert recipe().demonstrations("runs/a/demos") == {}
