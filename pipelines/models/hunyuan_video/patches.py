"""The picture that a clip begins with as diffusers' blocks should pass it on.

HunyuanVideo 1.5's auto-encoder frame by frame: diffusers decodes a clip whole, which at 480p and five seconds takes
more memory than a GPU has.

Its decoder is causal: a latent frame looks at those before alone. Convolutions keep their last frames of input, and
attention keys and values. The interface is that of diffusers' other causal auto-encoders, ``feat_cache``.
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

SEEN = "image_embeds"


class LatentsBesidePicture(HunyuanVideo15PrepareLatentsStep):  # type: ignore[misc]  # diffusers has no types
    """Takes the place of a block that puts zeros where an encoder has put what it sees in the picture."""

    @property
    def inputs(self) -> list[InputParam]:
        return [*super().inputs, InputParam(SEEN)]

    def __call__(self, components: Any, state: PipelineState) -> tuple[Any, PipelineState]:
        seen = state.get(SEEN)
        super().__call__(components, state)
        if seen is not None:
            state.set(SEEN, seen)
        return components, state


def patch_blocks(blocks: Any) -> None:
    replace_blocks(blocks, HunyuanVideo15PrepareLatentsStep, LatentsBesidePicture)


Kept = dict[nn.Module, Any]
"""What modules keep of the frames before, of one clip."""


def frame_by_frame(vae: Any) -> None:
    """From now on ``vae`` decodes one latent frame after the other: the same values up to rounding."""
    vae.decoder.__dict__["forward"] = _next_frame(vae.decoder)
    in_tiles = vae._decode

    def decode(latents_BCFHW: Tensor) -> Tensor:
        return in_tiles(latents_BCFHW) if vae.use_tiling else torch.cat(list(decode_chunks(vae, latents_BCFHW)), 2)

    vae.__dict__["_decode"] = decode


def _next_frame(decoder: Any) -> Callable[..., Tensor]:
    whole: Callable[..., Tensor] = decoder.forward

    def forward(hidden_BCFHW: Tensor, feat_cache: list[Any] | None = None, feat_idx: list[int] | None = None) -> Tensor:
        if feat_cache is None:
            return whole(hidden_BCFHW)
        is_first = feat_cache[0] is None
        feat_cache[0] = {} if is_first else feat_cache[0]
        with _keeping(decoder, feat_cache[0], is_first):
            return whole(hidden_BCFHW)

    return forward


@contextmanager
def _keeping(decoder: nn.Module, kept: Kept, is_first: bool) -> Iterator[None]:
    """Within it the modules see the frames before as well."""
    changed = {module: forward for module in decoder.modules() if (forward := _forward(module, kept, is_first))}
    for module, forward in changed.items():
        module.__dict__["forward"] = forward
    try:
        yield
    finally:
        for module in changed:
            del module.__dict__["forward"]


def _forward(module: nn.Module, kept: Kept, is_first: bool) -> Callable[[Tensor], Tensor] | None:
    """None for modules that look at each frame alone."""
    match module:
        case HunyuanVideo15CausalConv3d():
            return partial(_convolve, kept, module)
        case HunyuanVideo15AttnBlock():
            return partial(_attend, kept, module)
        case HunyuanVideo15Upsample() if module.add_temporal_upsample and not is_first:
            return partial(_upsample_later, module)
    return None


def _convolve(kept: Kept, module: Any, hidden_BCFHW: Tensor) -> Tensor:
    """In front of the first frame stands the same one, again and again, as diffusers pads it."""
    *around, num_before, _ = module.time_causal_padding
    padded_BCFHW, inner_BCFHW = _framed(hidden_BCFHW, around, num_before)
    inner_BCFHW[:, :, :num_before] = kept.get(module, hidden_BCFHW[:, :, :1])
    inner_BCFHW[:, :, num_before:] = hidden_BCFHW
    _repeat_edges(padded_BCFHW, around)
    kept[module] = inner_BCFHW[:, :, hidden_BCFHW.shape[2] :].clone()
    output: Tensor = module.conv(padded_BCFHW)
    return output


def _framed(hidden_BCFHW: Tensor, around: list[int], num_before: int) -> tuple[Tensor, Tensor]:
    """Returns an empty tensor for ``hidden_BCFHW``, ``num_before`` frames before it and ``around`` of pixels (left,
    right, top, bottom), and its part without these pixels. Written once: padding by PyTorch would copy all twice."""
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


def _attend(kept: Kept, module: Any, hidden_BCFHW: Tensor) -> Tensor:
    """Of one frame to itself and those before: what the mask of the whole clip allows it."""
    normed_BCFHW = module.norm(hidden_BCFHW)
    query, key, value = (_tokens(linear(normed_BCFHW)) for linear in (module.to_q, module.to_k, module.to_v))
    if module in kept:
        key, value = (torch.cat([before, now], -2) for before, now in zip(kept[module], (key, value), strict=True))
    kept[module] = (key, value)
    attended_B1TC = F.scaled_dot_product_attention(query, key, value)
    attended_BCFHW = attended_B1TC.squeeze(1).transpose(1, 2).reshape(hidden_BCFHW.shape)
    output: Tensor = module.proj_out(attended_BCFHW) + hidden_BCFHW
    return output


def _tokens(hidden_BCFHW: Tensor) -> Tensor:
    """Shape (batch, 1, frames * height * width, channels)."""
    return hidden_BCFHW.flatten(2).transpose(1, 2).unsqueeze(1).contiguous()


def _upsample_later(module: Any, hidden_BCFHW: Tensor) -> Tensor:
    """Where frames are doubled: a clip's first one alone stays one."""
    main_BCFHW: Tensor = module._dcae_upsample_rearrange(module.conv(hidden_BCFHW), 2, 2, 2)
    aside_BCFHW: Tensor = module._dcae_upsample_rearrange(hidden_BCFHW, 2, 2, 2)
    return main_BCFHW + aside_BCFHW.repeat_interleave(module.repeats, 1)
