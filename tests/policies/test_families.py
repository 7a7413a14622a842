import sys

import pytest

from services.common.errors import ConfigError
from services.policies import families
from services.policies.config import PolicyConfig
from services.policies.families import family_target, register_family
from services.policies.oft import TinyOft
from services.policies.registry import build_policy
from tests.policies.toys import make_config


class Custom(TinyOft):
    """A policy of one's own."""


@pytest.fixture(autouse=True)
def own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(families, "_registered", dict(families._registered))
    monkeypatch.delenv(families.ENVIRONMENT, raising=False)


def test_builds_a_registered_class() -> None:
    register_family("tests.policies.test_families:Custom", name="mine")
    policy = build_policy(make_config(family="mine"))
    assert type(policy).__name__ == "Custom"
    assert PolicyConfig.from_json(policy.spec.config).family == "mine"


def test_builds_a_class_that_the_environment_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    target = "tests.policies.test_families:Custom"
    monkeypatch.setenv(families.ENVIRONMENT, f"other:Thing, {target}")
    assert type(build_policy(make_config(family=target))).__name__ == "Custom"


def test_a_name_from_the_network_imports_nothing() -> None:
    received = make_config().to_json() | {"family": "antigravity:Policy"}
    with pytest.raises(ConfigError, match=r"antigravity:Policy.*DVLA_POLICIES"):
        PolicyConfig.from_json(received)
    assert "antigravity" not in sys.modules


@pytest.mark.parametrize("target", ["no.such.module:Policy", "tests.policies.test_families:Missing"])
def test_says_which_class_cannot_be_imported(target: str) -> None:
    register_family(target)
    with pytest.raises(ConfigError, match=target):
        build_policy(make_config(family=target))


def test_refuses_what_is_no_policy_class() -> None:
    register_family("services.policies.config:PolicyConfig")
    with pytest.raises(ConfigError, match="no policy class"):
        build_policy(make_config(family="services.policies.config:PolicyConfig"))
    with pytest.raises(ConfigError, match="module:Class"):
        register_family("just_a_module")


def test_unknown_families_are_answered_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="tiny-flow, tiny-oft"):
        family_target("tiny-fow")
