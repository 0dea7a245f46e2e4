"""Patches for HunyuanVideo 1.5: a clip's first picture, and an auto-encoder that decodes frame by frame.

Diffusers decodes a clip whole, which at 480p and five seconds takes more memory than a GPU has. The decoder is causal:
a latent frame depends only on itself and earlier ones. Convolutions cache their last input frames, attention its keys
and values. The interface is ``feat_cache``, as in diffusers' other causal auto-encoders.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from diffusers.models.autoencoders.autoencoder_kl_hunyuanvideo15 import (
    HunyuanVideo15AttnBlock,
    HunyuanVideo15CausalConv3d,
    HunyuanVideo15Upsample,
)
from diffusers.modular_pipelines.hunyuan_video1_5.before_denoise import HunyuanVideo15PrepareLatentsStep
from diffusers.modular_pipelines.modular_pipeline import PipelineState
from diffusers.modular_pipelines.modular_pipeline_utils import InputParam
from torch import Tensor, nn
from torch.nn import functional as F

from pipelines.blocks.tree import replace_blocks
from pipelines.vae.chunks import decode_chunks

PICTURE = "image_embeds"


class KeepPictureStep(HunyuanVideo15PrepareLatentsStep):  # type: ignore[misc]  # diffusers has no types
    """Replaces a block that overwrites the encoded picture with zeros."""

    @property
    def inputs(self) -> list[InputParam]:
        return [*super().inputs, InputParam(PICTURE)]

    def __call__(self, components: Any, state: PipelineState) -> tuple[Any, PipelineState]:
        embeds = state.get(PICTURE)
        super().__call__(components, state)
        if embeds is not None:
            state.set(PICTURE, embeds)
        return components, state


def patch_blocks(blocks: Any) -> None:
    replace_blocks(blocks, HunyuanVideo15PrepareLatentsStep, KeepPictureStep)


FrameCache = dict[nn.Module, Any]
"""Values of earlier frames of one clip, by module."""


def frame_by_frame(vae: Any) -> None:
    """Make ``vae`` decode one latent frame after the other: the same values up to rounding."""
    vae.decoder.__dict__["forward"] = _next_frame(vae.decoder)
    decode_tiles = vae._decode

    def decode(latents_BCFHW: Tensor) -> Tensor:
        return decode_tiles(latents_BCFHW) if vae.use_tiling else torch.cat(list(decode_chunks(vae, latents_BCFHW)), 2)

    vae.__dict__["_decode"] = decode


def _next_frame(decoder: Any) -> Callable[..., Tensor]:
    whole: Callable[..., Tensor] = decoder.forward

    def forward(hidden_BCFHW: Tensor, feat_cache: list[Any] | None = None, feat_idx: list[int] | None = None) -> Tensor:
        if feat_cache is None:
            return whole(hidden_BCFHW)
        is_first = feat_cache[0] is None
        cache: FrameCache = {} if is_first else feat_cache[0]
        feat_cache[0] = cache  # which a clip of one frame does not keep
        with _with_earlier_frames(decoder, cache, is_first):
            return whole(hidden_BCFHW)

    return forward


@contextmanager
def _with_earlier_frames(decoder: nn.Module, cache: FrameCache, is_first: bool) -> Iterator[None]:
    """Let modules also see earlier frames, inside this context."""
    forwards = {module: forward for module in decoder.modules() if (forward := _forward(module, cache, is_first))}
    for module, forward in forwards.items():
        module.__dict__["forward"] = forward
    try:
        yield
    finally:
        for module in forwards:
            del module.__dict__["forward"]


def _forward(module: nn.Module, cache: FrameCache, is_first: bool) -> Callable[[Tensor], Tensor] | None:
    """Return the forward of a module that sees earlier frames; None if it needs none."""
    match module:
        case HunyuanVideo15CausalConv3d():
            return partial(_convolve, cache, module)
        case HunyuanVideo15AttnBlock():
            return partial(_attend, cache, module)
        case HunyuanVideo15Upsample() if module.add_temporal_upsample and not is_first:
            return partial(_upsample_later, module)
    return None


def _convolve(cache: FrameCache, module: Any, hidden_BCFHW: Tensor) -> Tensor:
    """Convolve with cached frames; the first frame is padded with its copies, as in diffusers."""
    *around, num_before, _ = module.time_causal_padding
    padded_BCFHW, inner_BCFHW = _new_padded(hidden_BCFHW, around, num_before)
    inner_BCFHW[:, :, :num_before] = cache.get(module, hidden_BCFHW[:, :, :1])
    inner_BCFHW[:, :, num_before:] = hidden_BCFHW
    _repeat_edges(padded_BCFHW, around)
    cache[module] = inner_BCFHW[:, :, hidden_BCFHW.shape[2] :].clone()
    output: Tensor = module.conv(padded_BCFHW)
    return output


def _new_padded(hidden_BCFHW: Tensor, around: list[int], num_before: int) -> tuple[Tensor, Tensor]:
    """Return an empty tensor with ``num_before`` frames and ``around`` pixels of padding, and its part without pixels.

    ``around``: left, right, top, bottom. PyTorch's padding would copy all values twice.
    """
    left, right, top, bottom = around
    batch, channels, frames, height, width = hidden_BCFHW.shape
    padded_BCFHW = hidden_BCFHW.new_empty(
        batch, channels, num_before + frames, top + height + bottom, left + width + right
    )
    return padded_BCFHW, padded_BCFHW[:, :, :, top : top + height, left : left + width]


def _repeat_edges(padded_BCFHW: Tensor, around: list[int]) -> None:
    left, right, top, bottom = around
    height, width = padded_BCFHW.shape[3] - bottom, padded_BCFHW.shape[4] - right
    padded_BCFHW[..., :left] = padded_BCFHW[..., left : left + 1]
    padded_BCFHW[..., width:] = padded_BCFHW[..., width - 1 : width]
    padded_BCFHW[..., :top, :] = padded_BCFHW[..., top : top + 1, :]
    padded_BCFHW[..., height:, :] = padded_BCFHW[..., height - 1 : height, :]


def _attend(cache: FrameCache, module: Any, hidden_BCFHW: Tensor) -> Tensor:
    """Attend from one frame to itself and earlier ones, as the whole clip's mask allows."""
    normed_BCFHW = module.norm(hidden_BCFHW)
    query, key, value = (_tokens(linear(normed_BCFHW)) for linear in (module.to_q, module.to_k, module.to_v))
    if module in cache:
        key, value = (torch.cat([before, now], -2) for before, now in zip(cache[module], (key, value), strict=True))
    cache[module] = (key, value)
    attended_B1TC = F.scaled_dot_product_attention(query, key, value)
    attended_BCFHW = attended_B1TC.squeeze(1).transpose(1, 2).reshape(hidden_BCFHW.shape)
    output: Tensor = module.proj_out(attended_BCFHW) + hidden_BCFHW
    return output


def _tokens(hidden_BCFHW: Tensor) -> Tensor:
    """Return (batch, 1, frames * height * width, channels)."""
    return hidden_BCFHW.flatten(2).transpose(1, 2).unsqueeze(1).contiguous()


def _upsample_later(module: Any, hidden_BCFHW: Tensor) -> Tensor:
    """Double the frames; only a clip's first frame stays single."""
    main_BCFHW: Tensor = module._dcae_upsample_rearrange(module.conv(hidden_BCFHW), 2, 2, 2)
    aside_BCFHW: Tensor = module._dcae_upsample_rearrange(hidden_BCFHW, 2, 2, 2)
    return main_BCFHW + aside_BCFHW.repeat_interleave(module.repeats, 1)
