"""The update on a GPU: the same ratios and nearly the same weights as on a CPU."""

import pytest
import torch

from services.learner.batch import build_batch
from services.learner.lineage import Lineage
from services.learner.update import Updater
from tests.learner.data import FAMILIES, make_group, small_config, small_policy


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
def test_an_update_on_a_gpu(family: str) -> None:
    weights = []
    for device in ("cpu", "cuda"):
        policy = small_policy(family).to(device)
        groups = [make_group(small_policy(family), i, (1.0, 0.0, 0.5)) for i in range(4)]
        batch = build_batch(groups, 0, Lineage(), "std", device)
        assert batch is not None
        metrics = Updater(policy, small_config(device=device, learning_rate=1e-4, minibatches=1)).run(batch, 0)
        assert metrics["ratio_gap"] < 1e-4
        weights.append({name: tensor.cpu() for name, tensor in policy.trainable_state().items()})
    for name in weights[0]:
        torch.testing.assert_close(weights[0][name], weights[1][name], rtol=1e-3, atol=1e-4)
