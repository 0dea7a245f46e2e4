"""Decoding a picture strip by strip, in a fraction of the memory, and estimates of a decode's memory.

Tiles that are decoded one by one and blended have group norms of their own, and seams show. Here each layer goes strip
by strip, or band by band on several devices, and the pixels stay the same. Memory holds a layer's input and its output,
not what lies between its norm, its activation and its convolution.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from engines.core.field_error import FieldError
from pipelines.vae.layers import (
    Bands,
    apply_attention,
    apply_resnet,
    check_decoder,
    convolve,
    identity,
    is_supported_decoder,
    normalizers,
    upsample,
)

STRIP_BYTES = 2**26
"""Size in float32 of a strip while it is normalized, before its convolution."""
UNLIMITED_BYTES = 2**62
PEAK_ACTIVATIONS = 5
"""Memory of a whole decode, in largest activations, with the convolutions' workspace. Measured on an H200: 9.5 GiB for
2048 x 2048 pixels in bfloat16, whose largest activation is 2 GiB."""
LEAST_ACTIVATIONS = 2
"""The least memory of a whole decode, in largest activations: a layer's input and its output."""


def limit_memory(vae: Any, limit_bytes: int) -> None:
    """Have ``vae`` decode in strips what would take more than ``limit_bytes`` beside its weights.

    ValueError if its decoder is not supported.
    """
    check_decoder(vae, "memory_gib")
    decoder, whole = vae.decoder, vae.decoder.forward

    def forward(sample: Tensor, latent_embeds: Tensor | None = None) -> Tensor:
        assert latent_embeds is None, "a decoder with group norms takes none"
        if peak_bytes(decoder, sample) > limit_bytes:
            return decode_in_strips(decoder, sample)
        pixels: Tensor = whole(sample)
        return pixels

    decoder.__dict__["forward"] = forward


def release_cached_memory(device: torch.device, limit_bytes: int) -> None:
    """Release the allocator's unused memory of a GPU if it is more than half of ``limit_bytes``.

    Below that it stays, so that a size that is decoded again and again finds its memory.
    """
    if device.type != "cuda":
        return
    if torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device) > limit_bytes // 2:
        torch.cuda.empty_cache()


def check_fits(vae: Any, width: int, height: int, available_bytes: int) -> None:
    """Raise FieldError, with the memory needed, for a picture that exceeds ``available_bytes``."""
    needed = least_bytes(vae, width, height)
    if needed > available_bytes:
        raise FieldError(
            f"to decode {width}x{height} pixels takes {needed / 2**30:.1f} GiB at least, and the decoder's GPU has "
            f"{available_bytes / 2**30:.1f} GiB: ask for a smaller size, or set decoder.memory_gib, which decodes "
            "large pictures in strips",
            "size",
        )


def least_bytes(vae: Any, width: int, height: int) -> int:
    """Return the least memory of a decode: the weights and the activations of the largest layer.

    Unsupported decoders, such as those of clips, count by their weights alone.
    """
    weight_bytes = sum(int(weight.nbytes) for weight in vae.parameters())
    if not is_supported_decoder(getattr(vae, "decoder", None)):
        return weight_bytes
    scale = 2 ** sum(bool(block.upsamplers) for block in vae.decoder.up_blocks)
    latents_BCHW = torch.empty(1, 1, height // scale, width // scale, dtype=vae.dtype, device="meta")
    return int(weight_bytes + LEAST_ACTIVATIONS * largest_activation_bytes(vae.decoder, latents_BCHW))


def peak_bytes(decoder: Any, latents_BCHW: Tensor) -> int:
    """Estimate the memory that a whole decode takes beside the weights."""
    return PEAK_ACTIVATIONS * largest_activation_bytes(decoder, latents_BCHW)


def largest_activation_bytes(decoder: Any, latents_BCHW: Tensor) -> int:
    """Return the size of the largest activation of a whole decode."""
    batch, _, height, width = latents_BCHW.shape
    largest, scale = 0, 1
    for block in decoder.up_blocks:
        if block.upsamplers:
            scale *= 2
        channels = max(block.resnets[-1].out_channels, 0 if block.upsamplers else block.resnets[0].in_channels)
        largest = max(largest, channels * scale * scale)
    return int(largest * batch * height * width * latents_BCHW.element_size())


def decode_in_strips(decoder: Any, latents_BCHW: Tensor, strip_bytes: int = STRIP_BYTES) -> Tensor:
    """Return ``decoder(latents_BCHW)`` up to rounding, for a decoder that passes ``check_decoder``."""
    middle_BCHW = decoder.mid_block(decoder.conv_in(latents_BCHW))
    (pixels_BCHW,) = _after_middle([decoder], [middle_BCHW], strip_bytes)
    return pixels_BCHW


def decode_in_bands(decoders: Sequence[Any], latents_BCHW: Tensor, strip_bytes: int = UNLIMITED_BYTES) -> Tensor:
    """Return the pixels of ``latents_BCHW``, on its device, up to rounding.

    ``decoders`` are copies on several devices. Each computes a band of rows in strips of ``strip_bytes``. The middle
    block has to pass ``is_supported_mid_block``.
    """
    bands: Bands = [
        rows.to(decoder.conv_in.weight.device)
        for decoder, rows in zip(decoders, latents_BCHW.tensor_split(len(decoders), dim=2), strict=True)
    ]
    bands = convolve([one.conv_in for one in decoders], bands, [identity] * len(bands), strip_bytes)
    first, *others = zip(*(one.mid_block.resnets for one in decoders), strict=True)
    bands = apply_resnet(first, bands, strip_bytes)
    for attentions, resnets in zip(
        zip(*(one.mid_block.attentions for one in decoders), strict=True), others, strict=True
    ):
        if attentions[0] is not None:
            bands = apply_attention(attentions, bands, strip_bytes)
        bands = apply_resnet(resnets, bands, strip_bytes)
    return torch.cat([rows.to(latents_BCHW.device) for rows in _after_middle(decoders, bands, strip_bytes)], 2)


def _after_middle(decoders: Sequence[Any], bands: Bands, strip_bytes: int) -> list[Tensor]:
    for blocks in zip(*(one.up_blocks for one in decoders), strict=True):
        for resnets in zip(*(block.resnets for block in blocks), strict=True):
            bands = apply_resnet(resnets, bands, strip_bytes)
        for samplers in zip(*(block.upsamplers or () for block in blocks), strict=True):
            bands = convolve([one.conv for one in samplers], bands, [upsample] * len(bands), strip_bytes, scale=2)
    norms = normalizers([one.conv_norm_out for one in decoders], decoders[0].conv_act, bands, strip_bytes)
    return convolve([one.conv_out for one in decoders], bands, norms, strip_bytes)
