import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.policies.noise import RowNoise


def draws(names: list[str]) -> list[torch.Tensor]:
    noise = RowNoise(names)
    return [noise.normal(3, 5), noise.uniform(7), noise.integers(4), noise.normal(1), noise.integers(1000)]


@settings(max_examples=40)
@given(st.lists(st.text(max_size=12), min_size=1, max_size=12, unique=True), st.randoms())
def test_a_row_depends_on_its_key_only(names: list[str], random: np.random.Generator) -> None:
    order = list(range(len(names)))
    random.shuffle(order)
    whole, shuffled = draws(names), draws([names[i] for i in order])
    for a, b in zip(whole, shuffled, strict=True):
        assert torch.equal(a[order], b)
    for a, alone in zip(whole, draws(names[:1]), strict=True):
        assert torch.equal(a[:1], alone)


def test_distributions() -> None:
    noise = RowNoise([f"run/3/{row}" for row in range(2000)])
    normal, uniform = noise.normal(100).double(), noise.uniform(100).double()
    # 200,000 draws: five standard errors.
    assert abs(normal.mean()) < 0.012
    assert abs(normal.var() - 1) < 0.016
    assert abs((normal**4).mean() - 3) < 0.11
    assert abs(uniform.mean() - 0.5) < 0.0033
    assert 0 <= uniform.min() < uniform.max() < 1
    counts = torch.stack([noise.integers(5) for _ in range(50)]).flatten().bincount()
    assert len(counts) == 5
    assert (counts - 20_000).abs().max() < 650


def test_rows_and_draws_are_uncorrelated() -> None:
    normal = RowNoise([str(row) for row in range(300)]).normal(300).double()
    for table in (normal, normal.T):
        correlations = torch.corrcoef(table) - torch.eye(300)
        assert correlations.abs().max() < 6 / 300**0.5
        assert abs((correlations**2).sum() / (300 * 299) * 300 - 1) < 0.1


def test_later_draws_differ_from_earlier_ones() -> None:
    noise = RowNoise(["a"])
    assert not torch.equal(noise.normal(4), noise.normal(4))
    assert noise.normal(0).shape == (1, 0)
