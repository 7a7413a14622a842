"""The tiny VLA backbone: image patches, instruction bytes and state become tokens; pre-norm transformer blocks.

Written for one CPU thread: few tokens (instruction bytes enter in groups), fused qkv, fused attention, and the last
block computes only the tokens that somebody reads.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from services.policies.base import Inputs
from services.policies.config import PolicyConfig

BYTES_PER_TOKEN = 16
_BYTE_WIDTH = 16
_STEM_WIDTH = 32


def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Bidirectional attention of [B, H, T, d] over [B, H, S, d]; returns [B, T, H * d]."""
    return F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)


def split_heads(features: Tensor, parts: int, heads: int) -> tuple[Tensor, ...]:
    """[B, T, parts * H * d] into `parts` tensors [B, H, T, d]."""
    batch, tokens, width = features.shape
    return features.view(batch, tokens, parts, heads, width // (parts * heads)).permute(2, 0, 3, 1, 4).unbind(0)


class Layer(nn.Module):
    """A layer that can save memory. recompute: its activations are computed again in the backward pass."""

    recompute = False


def run_layer(layer: Layer, *arguments: Any, part: Callable[..., Any] | None = None) -> Any:
    """Call a layer, or a part of it, keeping only its arguments for the backward pass if it is to recompute."""
    function = part or layer
    if layer.recompute and torch.is_grad_enabled():
        return checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=False)
    return function(*arguments)


class Block(Layer):
    """Pre-norm transformer block over [B, T, W]."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.width, self.heads = width, heads
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp_in = nn.Linear(width, 4 * width)
        self.mlp_out = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The tokens after this block, and the keys and values [B, H, T, d] that they attended to."""
        query, key, value = split_heads(self.qkv(self.attention_norm(x)), 3, self.heads)
        return self._finish(x, query, key, value), key, value

    def last_tokens(self, x: Tensor, count: int) -> Tensor:
        """Only the last `count` tokens after this block: they attend to all, the others are not computed."""
        normed = self.attention_norm(x)
        tail = normed[:, -count:]
        weight, bias = self.qkv.weight[: self.width], self.qkv.bias[: self.width]
        (query,) = split_heads(F.linear(tail, weight, bias), 1, self.heads)
        key, value = self.keys_values(normed)
        return self._finish(x[:, -count:], query, key, value)

    def context(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Only the keys and values [B, H, T, d] of this block, for readers outside the backbone."""
        return self.keys_values(self.attention_norm(x))

    def keys_values(self, normed: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [B, H, T, d] of normed tokens."""
        width = self.width
        key, value = split_heads(F.linear(normed, self.qkv.weight[width:], self.qkv.bias[width:]), 2, self.heads)
        return key, value

    def _finish(self, x: Tensor, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        x = x + self.attention_out(attend(query, key, value))
        hidden: Tensor = self.mlp_out(F.silu(self.mlp_in(self.mlp_norm(x))))
        return x + hidden


class Embedding(nn.Module):
    """Inputs to tokens [B, P, W]: instruction groups, then the state, then the patches of each camera."""

    def __init__(self, config: PolicyConfig) -> None:
        super().__init__()
        width = config.shape.width
        self.state_dim, self.cameras = config.state_dim, config.cameras
        self.groups = -(-config.instruction_bytes // BYTES_PER_TOKEN)
        self.bytes = nn.Embedding(256, _BYTE_WIDTH)
        self.instruction = nn.Linear(BYTES_PER_TOKEN * _BYTE_WIDTH, width)
        if config.state_dim:
            self.state = nn.Sequential(nn.Linear(config.state_dim, 2 * width), nn.SiLU(), nn.Linear(2 * width, width))
        if config.cameras:
            # Two convolutions in place of one 8x8 projection: early convolutions learn faster from few images.
            half = config.patch // 2
            self.stem = nn.Sequential(
                nn.Conv2d(3, _STEM_WIDTH, half, half), nn.SiLU(), nn.Conv2d(_STEM_WIDTH, width, 3, 2, 1)
            )
        patches = (config.image_size // config.patch) ** 2 * len(config.cameras)
        self.tokens = self.groups + bool(config.state_dim) + patches
        self.position = nn.Parameter(0.02 * torch.randn(self.tokens, width))

    def forward(self, inputs: Inputs) -> Tensor:
        """All tokens [B, P, W] with their positions."""
        dtype = self.position.dtype
        spelled = self.bytes(inputs["instruction"].int())  # (B, L, byte width)
        tokens = [self.instruction(spelled.view(len(spelled), self.groups, -1))]
        if self.state_dim:
            tokens.append(self.state(inputs["state"].to(dtype)).unsqueeze(1))
        for camera in self.cameras:
            image = scale_image(inputs[f"rgb/{camera}"]).to(dtype)
            tokens.append(self.stem(image.permute(0, 3, 1, 2)).flatten(2).transpose(1, 2))
        return torch.cat(tokens, dim=1) + self.position


def scale_image(image: Tensor) -> Tensor:
    """uint8 pixels 0..255 to float32 exactly spanning [-1, 1]."""
    return image.float() / 127.5 - 1.0


class Backbone(nn.Module):
    """Embedding and blocks."""

    def __init__(self, config: PolicyConfig) -> None:
        super().__init__()
        size = config.shape
        self.embedding = Embedding(config)
        self.blocks = nn.ModuleList(Block(size.width, size.heads) for _ in range(size.depth))

    @property
    def layers(self) -> list[Block]:
        """The blocks, first to last."""
        return [block for block in self.blocks if isinstance(block, Block)]
