"""Each algorithm improves a weak policy on the toy task, in one process: no store, no simulator service."""

from typing import Any

import numpy as np
import pytest

from services.learner.batch import build_batch
from services.learner.episodes import EpisodeRules
from services.learner.lineage import Lineage
from services.learner.update import Updater
from tests.learner.data import small_config
from tests.learner.toy import groups, play, warm_start

EPISODES = 96
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "ppo-flow": ({"family": "tiny-flow", "value_head": True}, {"algorithm": "ppo"}),
    "ppo-oft": ({"family": "tiny-oft", "value_head": True}, {"algorithm": "ppo", "learning_rate": 8e-4}),
    "rloo-flow": ({"family": "tiny-flow"}, {"algorithm": "rloo"}),
    "fpo": ({"family": "tiny-flow", "flow_method": "fpo"}, {"algorithm": "grpo"}),
}


def success(policy: Any, first_seed: int) -> float:
    members = play(policy, range(first_seed, first_seed + 128), (9, 9), "held-out")
    return float(np.mean([member.success_once for member in members]))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("case", CASES)
def test_sampled_success_rises(case: str) -> None:
    policy_settings, settings = CASES[case]
    policy = warm_start(**policy_settings)
    size = 1 if settings["algorithm"] == "ppo" else 8
    given = {"learning_rate": 3e-4, "epochs": 2, "minibatches": 4, "micro_rows": 512} | settings
    config = small_config(group_size=size, groups_per_update=EPISODES // size, updates=12, **given)
    updater = Updater(policy, config)
    rules = EpisodeRules(bootstraps=not config.groups)
    before = success(policy, 0)
    assert before < 0.4
    rates: list[float] = []
    for update in range(config.updates):
        made = groups(policy, EPISODES // size, size, 1000 * (update + 1), (1, update), rules)
        batch = build_batch(made, update, Lineage(), config.normalisation)
        assert batch is not None, rates
        metrics = updater.run(updater.judge(batch), update)
        assert metrics["ratio_gap"] < 1e-4
        rates.append(success(policy, 0))
        if min(rates[-2:]) > before + 0.35 and len(rates) > 1:
            return  # solved ones leave groups without a signal
    assert min(rates[-2:]) > before + 0.35, rates
