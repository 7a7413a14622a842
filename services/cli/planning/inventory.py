"""What there is to run on: kinds of nodes, their devices, memory and links, from a TOML file."""

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.cli.typed import build
from services.common.config import check_keys
from services.common.errors import ConfigError

GIB, GBIT = 2**30, 1e9 / 8
DEVICES_LIMIT = 100_000


@dataclass(frozen=True, kw_only=True)
class NodeSection:
    """[[nodes]]: nodes that are alike. Give gpus or cores."""

    name: str
    """Name of this kind of node, and its label in a cluster."""
    count: int = 1
    """How many there are."""
    gpus: int = 0
    """Devices of each, where they are GPUs."""
    cores: int = 0
    """Devices of each, where they are CPU cores."""
    memory_gb: float
    """Memory that may be used: of each GPU, or of the node, which its cores share."""
    speed: float = 1.0
    """How fast a device is, compared with the one that was profiled."""

    def __post_init__(self) -> None:
        if bool(self.gpus) == bool(self.cores) or min(self.gpus, self.cores) < 0:
            raise ConfigError(f"node {self.name!r} has gpus = {self.gpus}, cores = {self.cores}; expected one of them")
        if self.count < 1:
            raise ConfigError(f"node {self.name!r} has count = {self.count}; expected 1 or more")
        if not self.memory_gb > 0 or not self.speed > 0:
            raise ConfigError(f"node {self.name!r} has memory_gb or speed of 0 or less; expected more")

    @property
    def devices(self) -> int:
        """Devices of each node."""
        return self.gpus or self.cores

    @property
    def memory(self) -> float:
        """Bytes for each device."""
        return self.memory_gb * GIB / (1 if self.gpus else self.cores)


@dataclass(frozen=True, kw_only=True)
class LinkSection:
    """[links]: how fast devices talk, and what sharing one costs."""

    between_gbit: float = 10.0
    """Between nodes, each way, for each node."""
    within_gbit: float = 100.0
    """Between the devices of a node."""
    interference: float = 0.1
    """Share of its speed that a device loses where learner and simulators share it."""

    def __post_init__(self) -> None:
        if not self.between_gbit > 0 or not self.within_gbit > 0:
            raise ConfigError("between_gbit and within_gbit; expected more than 0")
        if not 0 <= self.interference < 1:
            raise ConfigError(f"interference = {self.interference}; expected 0 or more and less than 1")

    @property
    def between(self) -> float:
        """Bytes a second."""
        return self.between_gbit * GBIT

    @property
    def within(self) -> float:
        """Bytes a second."""
        return self.within_gbit * GBIT


@dataclass(frozen=True)
class Inventory:
    """Kinds of nodes and their links."""

    nodes: tuple[NodeSection, ...]
    links: LinkSection = LinkSection()

    def __post_init__(self) -> None:
        names = [node.name for node in self.nodes]
        if not names or len(set(names)) != len(names):
            raise ConfigError(f"nodes are called {names}; expected at least one [[nodes]], each with a name of its own")
        if self.devices > DEVICES_LIMIT:
            raise ConfigError(f"{self.devices:,} devices; expected at most {DEVICES_LIMIT:,}")

    @property
    def devices(self) -> int:
        """Devices in all."""
        return sum(node.count * node.devices for node in self.nodes)


def read_inventory(path: Path) -> Inventory:
    """An inventory file; raises ConfigError with one line that names the file and what is wrong."""
    try:
        tables = tomllib.loads(path.read_text())
    except FileNotFoundError as error:
        raise ConfigError(f"inventory {str(path)!r} does not exist; docs/performance.md shows one") from error
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"inventory {str(path)!r} cannot be read: {error}") from error
    try:
        return inventory_of(tables)
    except ConfigError as error:
        raise ConfigError(f"inventory {str(path)!r}: {error}") from error


def inventory_of(tables: dict[str, Any]) -> Inventory:
    """From the file's tables; raises ConfigError."""
    check_keys("the top", tables, ("nodes", "links"))
    nodes, links = tables.get("nodes", []), tables.get("links", {})
    if not isinstance(nodes, list) or not all(isinstance(node, dict) for node in nodes):
        raise ConfigError("nodes is no list of tables; write [[nodes]] above each")
    if not isinstance(links, dict):
        raise ConfigError(f"links = {links!r}; write a section [links]")
    return Inventory(tuple(build(NodeSection, "nodes", node) for node in nodes), build(LinkSection, "links", links))
