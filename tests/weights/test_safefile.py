"""Stored versions are plain safetensors files, and a damaged one is noticed, whichever byte is wrong."""

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st

from services.common.bundle import DTYPES, Manifest, Version, bundle, verify
from services.common.errors import DvlaError, InvalidInput
from services.common.spec import Array
from services.weights import safefile


def example() -> tuple[Manifest, npt.NDArray[np.uint8]]:
    shared = np.arange(6, dtype=np.float32).reshape(2, 3)
    arrays: dict[str, Array] = {"a": shared, "tied": shared, "empty": np.zeros((0, 2), np.int64), "z": np.array(3.0)}
    arrays |= {dtype: np.full((2, 3), 1, DTYPES[dtype]) for dtype in DTYPES}
    return bundle("policy", Version(2, 31), arrays, {dtype: dtype for dtype in DTYPES}, {"policy": "{}"})


def written(folder: Path) -> tuple[Path, Manifest, npt.NDArray[np.uint8]]:
    manifest, buffer = example()
    path = folder / "2-31.safetensors"
    safefile.write(path, manifest, buffer)
    return path, manifest, buffer


def load(path: Path) -> bytes:
    manifest = safefile.read_manifest(path)
    buffer = np.zeros(manifest.length, np.uint8)
    safefile.copy_into(path, buffer)
    verify(manifest, buffer)
    return buffer.tobytes()


def test_what_was_written_is_read(tmp_path: Path) -> None:
    path, manifest, buffer = written(tmp_path)
    assert safefile.read_manifest(path) == manifest
    assert load(path) == buffer.tobytes()
    assert path.stat().st_mode & 0o777 == 0o600


def test_other_tools_can_read_it(tmp_path: Path) -> None:
    path, _, _ = written(tmp_path)
    with safetensors.safe_open(path, framework="np") as file:
        names = set(file.keys())
        plain = {name: file.get_tensor(name) for name in names if name not in ("bfloat16",) and "float8" not in name}
    assert names == {"a", "empty", "z", *DTYPES}
    assert np.array_equal(plain["a"], np.arange(6, dtype=np.float32).reshape(2, 3))
    assert plain["empty"].shape == (0, 2)
    assert all((plain[name] == 1).all() and plain[name].dtype == name for name in plain.keys() & DTYPES.keys())


def test_files_of_other_tools_are_not_taken_for_versions(tmp_path: Path) -> None:
    path = tmp_path / "1-0.safetensors"
    safetensors.numpy.save_file({"a": np.zeros(3)}, path)
    with pytest.raises(InvalidInput, match="not written by this program"):
        safefile.read_manifest(path)


@given(st.data())
def test_damage_anywhere_is_noticed(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    folder = tmp_path_factory.mktemp("damaged")
    path, _, buffer = written(folder)
    raw = bytearray(path.read_bytes())
    if data.draw(st.booleans()):
        del raw[data.draw(st.integers(0, len(raw) - 1)) :]
    else:
        raw[data.draw(st.integers(0, len(raw) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(raw)
    try:
        loaded = load(path)
    except DvlaError:
        return
    assert loaded == buffer.tobytes()  # the flip hit a part of the header that we do not read
