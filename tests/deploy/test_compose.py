"""docker-compose.yml and the Dockerfiles agree with the roles: settings, images, protection, shared steps."""

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml

from services.cli.roles import ROLES

ROOT = Path(__file__).resolve().parents[2]
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
SERVICES: dict[str, Any] = COMPOSE["services"]
VARIABLE = re.compile(r"\$\{(\w+):-([^}]*)\}")


def test_every_role_is_a_service() -> None:
    assert set(ROLES) <= set(SERVICES)
    assert "redis" in SERVICES


@pytest.mark.parametrize("role", ROLES)
def test_variables_are_settings_of_the_role(role: str) -> None:
    known = {field.name for field in fields(ROLES[role].config_class())} | {"recipe"}
    prefix = f"DVLA_{role.upper()}_"
    given = {name.removeprefix(prefix).lower() for name in SERVICES[role]["environment"] if name.startswith("DVLA_")}
    assert given <= known
    assert {"listen", "token_file", "recipe"} <= given


@pytest.mark.parametrize("role", ROLES)
def test_roles_can_be_scaled_and_are_not_published(role: str) -> None:
    assert not {"container_name", "ports", "hostname"} & SERVICES[role].keys()
    assert "shared:/dev/shm/dvla-10001" in SERVICES[role]["volumes"]


def test_redis_keeps_what_it_accepted() -> None:
    command = SERVICES["redis"]["command"]
    for setting in ("--appendonly yes", "--appendfsync everysec", "--maxmemory-policy noeviction"):
        assert setting in command
    assert "ports" not in SERVICES["redis"]


def test_settings_and_defaults_are_listed() -> None:
    used = dict(VARIABLE.findall((ROOT / "docker-compose.yml").read_text()))
    listed = dict(re.findall(r"^(\w+)=(.*)$", (ROOT / ".env.example").read_text(), re.MULTILINE))
    assert listed == used


@pytest.mark.parametrize("role", ROLES)
def test_images_run_without_root_and_report_their_health(role: str) -> None:
    text = (ROOT / f"deploy/docker/{role}.Dockerfile").read_text()
    for line in ("USER dvla", f'ENTRYPOINT ["dvla", "{role}"]', "HEALTHCHECK", f"DVLA_HEALTH_OF={role}"):
        assert line in text
    assert ("install_torch.sh" in text) == (role not in ("store", "weights"))


def test_images_share_their_first_steps() -> None:
    """Steps that are equal in every file are built once; one that differs is built five times."""
    files = [(ROOT / f"deploy/docker/{role}.Dockerfile").read_text() for role in ROLES]
    shared = [text[text.index("FROM") : text.index("python.sh environment")] for text in files]
    assert len(set(shared)) == 1
    heavy = [text[text.index("FROM") : text.index("ARG EXTRAS")] for text in files if "install_torch.sh" in text]
    assert len(set(heavy)) == 1
