"""Versions and manifests to protobuf messages and back. What comes from the wire is checked here, completely."""

import json

from dvla.v1 import common_pb2, weights_pb2

from services.common.bundle import Layout, Manifest, Version, WeightTensor, check
from services.common.errors import InvalidInput

TIED = "tied"
"""Metadata key under which the names of tied tensors travel, as a JSON object."""


def version_to_proto(version: Version | None) -> common_pb2.Version | None:
    """A version as a message; None stays None, which leaves the field unset."""
    return None if version is None else common_pb2.Version(epoch=version.epoch, update=version.update)


def version_from_proto(message: common_pb2.Version) -> Version | None:
    """A version from a message; the all-zero one (an unset field) is None, since epochs start at 1."""
    return Version(message.epoch, message.update) if message.epoch or message.update else None


def manifest_to_proto(manifest: Manifest) -> weights_pb2.Manifest:
    """A manifest as a message."""
    layout = manifest.layout
    tied = {TIED: json.dumps(dict(layout.tied))} if layout.tied else {}
    return weights_pb2.Manifest(
        model=manifest.model,
        version=version_to_proto(manifest.version),
        tensors=[
            weights_pb2.WeightTensor(
                name=t.name, dtype=t.dtype, shape=t.shape, offset=t.offset, length=t.length, xxh3=xxh3
            )
            for t, xxh3 in zip(layout.tensors, manifest.hashes, strict=True)
        ],
        length=layout.length,
        layout=layout.digest,
        metadata={**manifest.metadata, **tied},
    )


def manifest_from_proto(message: weights_pb2.Manifest) -> Manifest:
    """A checked manifest from a message; raises InvalidInput naming what is wrong."""
    version = version_from_proto(message.version)
    if version is None or version.epoch < 1:
        raise InvalidInput(f"manifest has version {version}; expected an epoch of 1 or more")
    metadata = dict(message.metadata)
    tied = _tied(metadata.pop(TIED, "{}"))
    tensors = tuple(WeightTensor(t.name, t.dtype, tuple(t.shape), t.offset, t.length) for t in message.tensors)
    manifest = Manifest(
        model=message.model,
        version=version,
        layout=Layout(tensors, message.length, tied),
        hashes=tuple(t.xxh3 for t in message.tensors),
        metadata=metadata,
    )
    check(manifest)
    if message.layout != manifest.layout.digest:
        raise InvalidInput(
            f"manifest has layout hash {message.layout:016x}; its tensors give {manifest.layout.digest:016x}"
        )
    return manifest


def _tied(text: str) -> dict[str, str]:
    try:
        tied = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"metadata {TIED!r} is not JSON: {error}") from error
    if not isinstance(tied, dict) or not all(isinstance(target, str) for target in tied.values()):
        raise InvalidInput(f"metadata {TIED!r} is not an object of names")
    return tied
