"""Publishes the policy in a folder in place of a learner, so that workers can be evaluated. Imports torch."""

import json
from pathlib import Path

from services.common import bundle
from services.common.bundle import Version
from services.common.weights_client import WeightPublisher
from services.policies.checkpoint import load_checkpoint
from services.policies.raw import to_arrays


def publish_policy(folder: Path, address: str, model: str, version: Version) -> None:
    """Make the policy readable as `version`; returns when it is sealed."""
    policy = load_checkpoint(folder)
    arrays, dtypes = to_arrays(policy.trainable_state())
    metadata = {"policy": json.dumps(policy.spec.config)}
    manifest, buffer = bundle.bundle(model, version, arrays, dtypes, metadata)
    publisher = WeightPublisher(address, model)
    try:
        publisher.fence(version.epoch)
        publisher.publish(manifest, buffer)
    finally:
        publisher.close()
