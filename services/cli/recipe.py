"""A recipe: one TOML file that says everything about a run, checked as a whole before anything is started.

[run] [demos] [sft] [eval] belong to the launcher (`sections`), [policy] to `PolicyConfig`, and [sim] [rollout] [store]
[learner] [weights] to the roles. Unknown sections and keys, wrong types and impossible combinations are one clear line
each (ConfigError, exit code 2). No torch.
"""

import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from services.cli.roles import ROLES
from services.cli.sections import DemosSection, EvalSection, RunSection, SftSection
from services.cli.typed import build
from services.common.config import check_keys, read_recipe
from services.common.errors import ConfigError, DvlaError
from services.policies.families import FLOW, OFT

if TYPE_CHECKING:
    from services.common.config import RoleConfig
    from services.learner.config import LearnerConfig
    from services.policies.config import PolicyConfig
    from services.sim.config import SimConfig

Table = dict[str, Any]

SECTIONS = ("run", "policy", "demos", "sft", "eval", *ROLES)
MODEL = "policy"
"""Name of the policy on the weight plane, if the recipe gives none."""


@dataclass(frozen=True)
class Recipe:
    """A checked recipe. policy and roles: the keys that were given, by section; defaults are the roles' own."""

    name: str
    run: RunSection
    demos: DemosSection
    sft: SftSection
    eval: EvalSection
    policy: Table
    roles: Mapping[str, Table]

    def role(self, name: str, **given: Any) -> "RoleConfig":
        """The configuration of a role; `given` are the settings that the launcher owns."""
        table = {key: value for key, value in self.roles[name].items() if key not in given}
        return build(ROLES[name].config_class(), name, table, given)

    @property
    def sim(self) -> "SimConfig":
        """The simulator's configuration; addresses in it mean nothing."""
        return cast("SimConfig", self.role("sim"))

    @property
    def learner(self) -> "LearnerConfig":
        """The learner's configuration; addresses and folders in it mean nothing."""
        tasks = self.roles["learner"].get("tasks") or self.tasks or ("unknown",)
        owned: Table = dict.fromkeys(("init", "output", "store", "weights"), "unknown")
        owned |= self.demonstrations("unknown")
        return cast("LearnerConfig", self.role("learner", **owned, tasks=tuple(tasks), mode=self.run.mode))

    def demonstrations(self, own: str) -> Table:
        """The learner's `demonstrations` where the recipe leaves them out: the warm start's, `own` being its folder."""
        learner = self.roles["learner"]
        if not learner.get("demo_weight") or learner.get("demonstrations"):
            return {}
        folder = self.sft.demos or own
        return {"demonstrations": (folder,)} if folder else {}

    @property
    def tasks(self) -> tuple[str, ...]:
        """Tasks of the built-in simulator; empty for one that only runs can ask."""
        return () if self.run.sim or ":" in self.sim.sim else self.sim.tasks

    @property
    def makes_demos(self) -> bool:
        """Whether a scripted expert demonstrates before training."""
        return bool(self.demos.episodes and not (self.run.sim or self.sft.init or self.sft.demos))

    def policy_config(self, **inferred: Any) -> "PolicyConfig":
        """The policy; `inferred` holds what the simulator says where the recipe says nothing."""
        from services.policies.config import PolicyConfig

        return PolicyConfig(**(inferred | self.policy))

    def seed_of(self, section: DemosSection | SftSection) -> int:
        """The seed of a section, by default the run's."""
        return self.run.seed if section.seed is None else section.seed

    def sections(self) -> dict[str, Table]:
        """Everything as TOML sections, to freeze it in the run folder."""
        own = {name: asdict(getattr(self, name)) for name in ("demos", "sft", "eval")}
        return {"run": asdict(self.run), "policy": self.policy, **own, **self.roles}


def load_recipe(path: Path, overrides: Iterable[str] = (), **run: Any) -> Recipe:
    """Read, override (`section.key=value`; `run` sets keys of [run]) and check a recipe."""
    tables = read_recipe(path)
    for section, table in tables.items():
        if section not in SECTIONS:
            raise ConfigError(f"unknown section [{section}] in {path.name}; {_nearest(section)}")
        if not isinstance(table, dict):
            raise ConfigError(f"{section} = {table!r} in {path.name} stands outside of any section; put it below one")
    for text in overrides:
        section, key, value = parse_override(text)
        tables.setdefault(section, {})[key] = value
    tables.setdefault("run", {}).update({key: value for key, value in run.items() if value is not None})
    return parse_recipe(path.stem, tables)


def parse_override(text: str) -> tuple[str, str, Any]:
    """`section.key=value` in parts; the value is TOML if it can be read as that, else a plain text."""
    match = re.fullmatch(r"(\w+)\.([\w-]+)=(.*)", text, re.DOTALL)
    if not match:
        raise ConfigError(f"--set {text!r}; expected section.key=value, such as learner.learning_rate=1e-4")
    section, key, value = match.groups()
    if section not in SECTIONS:
        raise ConfigError(f"--set {text!r}: there is no section {section!r}; {_nearest(section)}")
    try:
        return section, key.replace("-", "_"), tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return section, key.replace("-", "_"), value


def parse_recipe(name: str, tables: Mapping[str, Table]) -> Recipe:
    """Check tables as a whole and make a recipe of them."""
    run = build(RunSection, "run", tables.get("run", {}))
    recipe = Recipe(
        name=name,
        run=run,
        demos=build(DemosSection, "demos", tables.get("demos", {})),
        sft=build(SftSection, "sft", tables.get("sft", {})),
        eval=build(EvalSection, "eval", tables.get("eval", {})),
        policy=dict(tables.get("policy", {})),
        roles={role: _with_run(role, tables.get(role, {}), run) for role in ROLES},
    )
    for role, info in ROLES.items():
        for key in sorted(info.owned.keys() & tables.get(role, {}).keys()):
            raise ConfigError(f"[{role}] {key} is not for a recipe of `dvla train` ({info.owned[key]}); leave it out")
    check_together(recipe)
    return recipe


SEED_STRIDE = 100_000
"""Training starts of run seed n begin at index n * SEED_STRIDE, so that runs of different seeds share none."""


def _with_run(role: str, table: Table, run: RunSection) -> Table:
    """A role's section with what [run] means for it."""
    if role == "learner":
        return {"seed": run.seed, "seed_base": run.seed * SEED_STRIDE % 2**29} | table
    if role == "sim" and run.sim_class:
        return table | {"sim": run.sim_class}
    return dict(table)


def check_together(recipe: Recipe) -> None:
    """All sections by themselves, then what they must agree on."""
    sim, learner = recipe.sim, recipe.learner
    for role in ("rollout", "store", "weights"):
        recipe.role(role)
    policy = _check_policy(recipe)
    if not learner.groups and policy.family in (OFT, FLOW) and not policy.value_head:
        raise ConfigError(f"[learner] algorithm = {learner.algorithm!r} needs values; set [policy] value_head = true")
    for task, _ in learner.task_shares:
        if recipe.tasks and task not in recipe.tasks:
            raise ConfigError(f"[learner] tasks names {task!r}; [sim] tasks serves only {', '.join(recipe.tasks)}")
    if "state_dim" in recipe.policy and policy.state_dim and sim.observation == "rgb":
        raise ConfigError(
            f"[policy] state_dim = {policy.state_dim}, but [sim] observation = 'rgb' has no state; use 'rgb+state' or "
            "leave state_dim out"
        )
    if policy.cameras and sim.observation == "state":
        raise ConfigError(
            f"[policy] cameras = {list(policy.cameras)}, but [sim] observation = 'state' has no images; use 'rgb'"
        )
    if recipe.sft.init:
        from services.cli.policyfile import check_same

        check_same(Path(recipe.sft.init), recipe.policy)
    if recipe.sft.demos and not any(Path(recipe.sft.demos).glob("*.safetensors")):
        raise ConfigError(f"[sft] demos = {recipe.sft.demos!r} holds no demonstrations; `dvla demos` writes some")
    if recipe.makes_demos:
        _check_expert(recipe)


def _check_policy(recipe: Recipe) -> "PolicyConfig":
    from services.policies.config import PolicyConfig

    check_keys("policy", recipe.policy, [f.name for f in fields(PolicyConfig)])
    try:
        return recipe.policy_config(action_dim=1, state_dim=0 if recipe.policy.get("cameras") else 1)
    except (ConfigError, TypeError) as error:
        raise ConfigError(f"[policy] {error}") from error


def _check_expert(recipe: Recipe) -> None:
    """Demonstrations need a scripted expert of every task."""
    from services.common.spec import ActionSpec
    from services.sim.experts import Expert

    action = ActionSpec(1, (-1.0,), (1.0,), recipe.sim.control_mode)
    for task in recipe.tasks:
        try:
            Expert(task, action)
        except DvlaError as error:
            raise ConfigError(f"[sim] tasks: {error}; or set demos.episodes = 0") from error


def _nearest(section: str) -> str:
    near = get_close_matches(section, SECTIONS, 1)
    return f"did you mean {near[0]!r}?" if near else f"sections: {', '.join(SECTIONS)}"
