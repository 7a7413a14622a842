"""Our AdamW against torch's, its float32 masters, and what starting it imports."""

import subprocess
import sys

import pytest
import torch
from torch import nn

from services.learner.optimiser import AdamW


def made(dtype: torch.dtype = torch.float32) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"a": (3, 4), "b": (5,), "unused": (2,)}
    return {name: nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for name, shape in shapes.items()}


def test_it_steps_as_torch_does() -> None:
    ours, theirs = made(), made()
    mine = AdamW(ours, (0.9, 0.95), 0.1)
    torchs = torch.optim.AdamW(theirs.values(), betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    for number, rate in enumerate((1e-2, 3e-3, 1e-3)):
        mine.zero_grad()
        torchs.zero_grad()
        torchs.param_groups[0]["lr"] = rate
        for name in ("a", "b"):
            gradient = torch.randn(ours[name].shape, generator=torch.Generator().manual_seed(number))
            ours[name].grad, theirs[name].grad = gradient, gradient.clone()
        mine.step(rate)
        torchs.step()
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-6, atol=1e-7)
    assert {key.partition("//")[0] for key in mine.state()} == {"a", "b"}


def test_narrow_parameters_collect_small_steps_in_a_master() -> None:
    parameters = made(torch.bfloat16)
    before = parameters["a"].detach().clone()
    optimiser = AdamW(parameters, (0.9, 0.95))
    for _ in range(100):
        parameters["a"].grad = torch.ones_like(parameters["a"])
        optimiser.step(1e-4)  # each far below the spacing of bfloat16 near 1
    moved = optimiser.state()["a//master"] - before.float()
    torch.testing.assert_close(moved, torch.full((3, 4), -1e-2), rtol=1e-2, atol=1e-4)
    assert torch.equal(parameters["a"], optimiser.state()["a//master"].bfloat16())
    assert not torch.equal(parameters["a"], before)


def test_state_of_other_parameters_is_refused() -> None:
    optimiser = AdamW(made(), (0.9, 0.95))
    optimiser.parameters["a"].grad = torch.ones(3, 4)
    optimiser.step(1e-3)
    state = {name: value.clone() for name, value in optimiser.state().items()}
    other = AdamW(made(), (0.9, 0.95))
    other.load_state(state)
    assert all(torch.equal(value, other.state()[name]) for name, value in state.items())
    for name, value, error in (
        ("c//exp_avg", torch.zeros(1), KeyError),
        ("b//exp_avg", torch.zeros(5), KeyError),
        ("a//exp_avg", torch.zeros(4, 3), ValueError),
    ):
        with pytest.raises(error):
            other.load_state(state | {name: value})


def test_a_step_does_not_import_the_compiler() -> None:
    """torch's optimisers do, at their first use: 1.7 s of a learner's start."""
    program = (
        "import sys, torch\n"
        "from services.learner.optimiser import AdamW\n"
        "p = torch.nn.Parameter(torch.zeros(3)); p.grad = torch.ones(3)\n"
        "AdamW({'p': p}, (0.9, 0.95)).step(1e-3)\n"
        "print('torch._dynamo' in sys.modules, float(p[0]))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    loaded, moved = done.stdout.split()
    assert loaded == "False"
    assert float(moved) == pytest.approx(-1e-3, rel=1e-4)
