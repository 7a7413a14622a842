"""Demonstrations on disk and in memory: episodes as flat arrays, cut into action chunks for imitation. No torch.

A folder holds `*.safetensors` shards with the arrays `obs/<name>` [N, ...], `action` float32 [N, D], `episode` int64
[N] and `step` int64 [N], ordered by (episode, step), whole episodes only. Each shard's header says in JSON, under
the key `demos`, the task and its instruction. `write_shard` writes one, `load_demos` reads all.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from services.common.errors import InvalidInput, NotFound
from services.common.spec import Array, BoolArray, FloatArray, IntArray, Observation

HEADER = "demos"
_COLUMNS = ("action", "episode", "step")


@dataclass(frozen=True)
class Demos:
    """N steps of demonstrations, ordered by episode and step.

    observation: name -> [N, ...]. action: float32 [N, D], environment units. episode: int64 [N], unique across shards.
    instruction: int64 [N], index into `instructions`.
    """

    observation: Observation
    action: FloatArray
    episode: IntArray
    instruction: IntArray
    instructions: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.action)

    def texts(self, rows: IntArray) -> list[str]:
        """The instruction of each of these rows."""
        return [self.instructions[index] for index in self.instruction[rows]]


def write_shard(path: Path, observation: Observation, action: FloatArray, episode: IntArray, step: IntArray,
                task: str, instruction: str, **details: Any) -> None:  # fmt: skip
    """Write one shard of one task, whole or not at all. `details` (JSON-able) go to the header as well."""
    arrays = {f"obs/{name}": np.ascontiguousarray(array) for name, array in observation.items()}
    arrays |= {"action": action, "episode": episode, "step": step}
    _check_shard(path, arrays)
    header = {HEADER: json.dumps({"task": task, "instruction": instruction} | details)}
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    save_file(arrays, partial, metadata=header)
    os.replace(partial, path)


def load_demos(folders: Sequence[Path]) -> Demos:
    """All shards of these folders, in order of name. Raises NotFound without any, InvalidInput on a malformed one."""
    paths = [path for folder in folders for path in sorted(folder.glob("*.safetensors"))]
    if not paths:
        raise NotFound(f"no demonstrations in {', '.join(map(str, folders))}: write some with `dvla demos`")
    shards = [_read_shard(path) for path in paths]
    names = set(shards[0][0])
    for path, (arrays, _) in zip(paths, shards, strict=True):
        if set(arrays) != names:
            raise InvalidInput(f"{path} holds {sorted(arrays)}, others {sorted(names)}: use one kind of demos")
    instructions = tuple(dict.fromkeys(header["instruction"] for _, header in shards))
    return Demos(
        observation={
            name.removeprefix("obs/"): np.concatenate([arrays[name] for arrays, _ in shards])
            for name in sorted(names) if name.startswith("obs/")
        },
        action=np.concatenate([arrays["action"] for arrays, _ in shards]).astype(np.float32, copy=False),
        episode=_unique_episodes([arrays["episode"] for arrays, _ in shards]),
        instruction=np.concatenate(
            [np.full(len(arrays["action"]), instructions.index(header["instruction"])) for arrays, header in shards]
        ),
        instructions=instructions,
    )  # fmt: skip


def chunk_at(demos: Demos, rows: IntArray, chunk: int) -> tuple[FloatArray, BoolArray]:
    """Action chunks [B, C, D] that start at these rows, and masks [B, C] that are false past the episode's end."""
    wanted = rows[:, None] + np.arange(chunk)  # (B, C)
    inside = np.minimum(wanted, len(demos) - 1)
    mask = (wanted < len(demos)) & (demos.episode[inside] == demos.episode[rows][:, None])
    # Past the end the last valid action is repeated: a value the network could produce, in case somebody reads it.
    last = rows + mask.sum(axis=1) - 1
    return demos.action[np.minimum(inside, last[:, None])], mask


def _read_shard(path: Path) -> tuple[dict[str, Array], dict[str, Any]]:
    try:
        with safe_open(path, framework="numpy") as file:
            arrays: dict[str, Array] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            header = json.loads((file.metadata() or {}).get(HEADER, "{}"))
    except (SafetensorError, json.JSONDecodeError, OSError) as error:
        raise InvalidInput(f"{path} is no readable shard of demonstrations ({error}): write it again") from error
    if not isinstance(header, dict) or not isinstance(header.get("instruction"), str):
        raise InvalidInput(f"{path} names no instruction in its header: expected JSON under the key {HEADER!r}")
    _check_shard(path, arrays)
    return arrays, header


def _check_shard(path: Path, arrays: dict[str, Array]) -> None:
    if missing := [name for name in _COLUMNS if name not in arrays]:
        raise InvalidInput(f"{path} lacks {', '.join(missing)}: expected {', '.join(_COLUMNS)} and obs/<name>")
    action, episode, step = (arrays[name] for name in _COLUMNS)
    if action.ndim != 2 or not np.isfinite(action).all():
        raise InvalidInput(f"{path}: action must be finite [N, D], got {action.dtype}{action.shape}")
    if wrong := [name for name, array in arrays.items() if len(array) != len(action)]:
        raise InvalidInput(f"{path}: {wrong[0]} has {len(arrays[wrong[0]])} rows, action has {len(action)}")
    follows = (episode[1:] == episode[:-1]) & (step[1:] == step[:-1] + 1)
    if not (follows | ((episode[1:] != episode[:-1]) & (step[1:] == 0))).all() or (len(step) and step[0] != 0):
        raise InvalidInput(f"{path}: rows must be ordered by episode, and each episode's step must count 0, 1, 2, ...")


def _unique_episodes(shards: Sequence[Array]) -> IntArray:
    """Number the episodes 0, 1, 2, ... across shards, whose own numbers may repeat."""
    changes = [np.concatenate([[True], episode[1:] != episode[:-1]])[: len(episode)] for episode in shards]
    return np.cumsum(np.concatenate(changes), dtype=np.int64) - 1
