"""Impossible settings are refused by name."""

import pytest

from services.common.errors import ConfigError
from services.rollout.worker.config import RolloutConfig


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sessions_per_sim": 0}, "sessions_per_sim = 0; expected 1 or more"),
        ({"threads": 0}, "threads = 0"),
        ({"max_batch": -1}, "max_batch = -1"),
        ({"batch_wait": 2.0}, "batch_wait = 2.0; expected 0 to 1 second"),
        ({"pending_appends": 0}, "pending_appends = 0"),
        ({"sims": ()}, "sims is empty"),
        ({"sims": ("unix:/s", "sim")}, "sims = 'sim'; expected unix:/path or host:port"),
        ({"sims": ("dns:sim",)}, "sims = 'dns:sim'"),
        ({"store": "store"}, "store = 'store'"),
        ({"weights": "weights:x"}, "weights = 'weights:x'"),
        ({"device": "tpu"}, "device = 'tpu'; expected cpu, cuda or cuda:N"),
        ({"device": "cuda:x"}, "device = 'cuda:x'"),
        ({"device": "cpu:0"}, "device = 'cpu:0'"),
        ({"log_level": "loud"}, "log_level = 'loud'"),
    ],
)
def test_an_impossible_setting_is_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RolloutConfig(**settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("device", ["cpu", "cuda", "cuda:1"])
def test_possible_settings_are_taken(device: str) -> None:
    config = RolloutConfig(device=device, sims=("dns:sim:1", "unix:/s", "[::1]:2"))
    assert config.device == device
