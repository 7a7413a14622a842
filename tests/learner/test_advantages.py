"""Group-relative advantages against an independent float64 reference, and where there is no signal."""

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.learner.advantages import EPSILON, group_advantages
from services.learner.objective import Normalisation

Floats = npt.NDArray[np.float64]
KINDS: tuple[Normalisation, ...] = ("std", "mean", "leave-one-out")


def reference(scores: list[float], kind: Normalisation) -> Floats:
    """One group, with numpy, written from the formulas."""
    values = np.asarray(scores, np.float64)
    if values.max() == values.min():
        return np.zeros(len(values))
    if kind == "std":
        return np.asarray((values - values.mean()) / (values.std(ddof=1) + EPSILON))
    if kind == "mean":
        return np.asarray(values - values.mean())
    return np.asarray([value - np.delete(values, i).mean() for i, value in enumerate(values)])


def advantages(groups: list[list[float]], order: list[int], kind: Normalisation) -> list[Floats]:
    """Advantages per group, computed on members in a shuffled order and put back."""
    flat = [(number, score) for number, scores in enumerate(groups) for score in scores]
    shuffled = [flat[i] for i in order]
    group = torch.tensor([7 * number + 3 for number, _ in shuffled])  # numbers need not be dense
    out = group_advantages(torch.tensor([s for _, s in shuffled], dtype=torch.float64), group, kind)
    back = np.empty(len(flat))
    back[order] = out.double().numpy()
    return np.split(back, np.cumsum([len(scores) for scores in groups])[:-1])


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
@settings(max_examples=40)
def test_matches_the_reference_for_groups_of_any_size_in_any_order(kind: Normalisation, data: st.DataObject) -> None:
    score = st.floats(-100, 100, allow_nan=False).map(lambda value: round(value, 3))
    groups = data.draw(st.lists(st.lists(score, min_size=1, max_size=8), min_size=1, max_size=6))
    order = data.draw(st.permutations(range(sum(map(len, groups)))))
    for got, scores in zip(advantages(groups, order, kind), groups, strict=True):
        np.testing.assert_allclose(got, reference(scores, kind), rtol=1e-5, atol=1e-5)


def test_unequal_groups_stay_bounded_with_zero_mean() -> None:
    """S11: groups of 3, 2 and 3, because a member failed; arrival shuffled."""
    groups = [[1.0, 0.0, 0.0], [1.0, 0.0], [0.0, 1.0, 1.0]]
    for got in advantages(groups, [5, 2, 7, 0, 3, 6, 1, 4], "std"):
        assert abs(got.sum()) < 1e-6
        assert np.abs(got).max() < 1.2


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("score", [0.0, 1.0, 0.35, 1 / 3, 1e300, -0.1])
@pytest.mark.parametrize("size", [1, 3, 7, 8])
def test_equal_scores_give_exactly_zero(kind: Normalisation, score: float, size: int) -> None:
    """S12: the mean of equal scores can differ from them in the last bit; no advantage may come of it."""
    got = group_advantages(torch.full((size,), score, dtype=torch.float64), torch.zeros(size, dtype=torch.long), kind)
    assert got.tolist() == [0.0] * size


def test_seven_against_one_stays_bounded() -> None:
    scores = torch.tensor([1.0] * 7 + [0.0], dtype=torch.float64)
    got = group_advantages(scores, torch.zeros(8, dtype=torch.long), "std")
    assert got.abs().max() < 7 / np.sqrt(8) + 1e-6
    assert abs(float(got.sum())) < 1e-5
