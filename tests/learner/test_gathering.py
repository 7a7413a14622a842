"""Sharded parameters become one whole version on rank 0, tensor by tensor."""

import os
import socket
from pathlib import Path

import torch
import torch.multiprocessing as mp
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from services.common.bundle import plan, views
from services.common.staging import Stage
from services.learner.snapshot import Staging, gathered
from services.policies.raw import dtype_name


def rank_main(rank: int, port: int, folder: str) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    distributed.init_process_group("gloo", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 5), nn.ReLU(), nn.Linear(5, 3))
    plain = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    fully_shard(model)
    state = model.state_dict()
    assert all(isinstance(tensor, DTensor) for tensor in state.values())
    if rank == 0:
        layout = plan((name, dtype_name(t.dtype), tuple(t.shape)) for name, t in state.items())
        staging = Staging(layout, torch.device("cpu"), Stage(None, layout.length))
        staging.fill(state)
        found = views(layout, staging.settle())
        assert all(torch.equal(torch.from_numpy(found[name].copy()), tensor) for name, tensor in plain.items())
    else:
        for _ in gathered(state):
            pass
    distributed.barrier()
    distributed.destroy_process_group()
    (Path(folder) / f"done-{rank}").touch()


def test_fsdp_parameters_are_gathered(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.start_processes(  # type: ignore[attr-defined, no-untyped-call]
        rank_main, (port, str(tmp_path)), nprocs=2, start_method="spawn"
    )
    assert {path.name for path in tmp_path.iterdir()} == {"done-0", "done-1"}


def test_one_whole_tensor_at_a_time() -> None:
    alive: list[str] = []

    class Sharded:
        def __init__(self, name: str) -> None:
            self.name = name

        def full_tensor(self) -> str:
            alive.append(self.name)
            return self.name

    state = {name: Sharded(name) for name in "abc"}
    walk = gathered(state)  # type: ignore[arg-type]
    assert alive == []
    assert next(walk)[0] == "a"
    assert alive == ["a"]
