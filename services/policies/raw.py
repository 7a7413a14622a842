"""Torch tensors as the raw arrays of a weight bundle, and back. numpy lacks bfloat16: its bytes travel as uint16."""

from collections.abc import Mapping

import torch
from torch import Tensor

from services.common.bundle import DTYPES
from services.common.errors import InvalidInput
from services.common.spec import Array

_CARRIERS = {torch.bfloat16: torch.uint16, torch.float8_e4m3fn: torch.uint8, torch.float8_e5m2: torch.uint8}


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a torch dtype in a manifest, such as "bfloat16"."""
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise InvalidInput(f"dtype {name} cannot be published; expected one of {', '.join(DTYPES)}")
    return name


def to_arrays(state: Mapping[str, Tensor]) -> tuple[dict[str, Array], dict[str, str]]:
    """CPU tensors as raw arrays that share their memory, and their torch dtype names."""
    arrays, dtypes = {}, {}
    for name, tensor in state.items():
        dtypes[name] = dtype_name(tensor.dtype)
        carrier = _CARRIERS.get(tensor.dtype)
        plain = tensor.detach().contiguous()
        arrays[name] = (plain.view(carrier) if carrier else plain).cpu().numpy()
    return arrays, dtypes
