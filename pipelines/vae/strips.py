"""An auto-encoder's decoder in rows: large pictures in a fraction of the memory, or on several devices, and with the
same pixels.

Tiles that are decoded one by one and blended see statistics of their own: their group norms differ, and seams show.
Here it is each layer that goes strip by strip, or band by band on several devices. Of strips what is held are a layer's
input and its result, not what lies between its norm, its activation and its convolution.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from pipelines.vae.known import check_decoder
from pipelines.vae.layers import Bands, attended, convolved, doubled, normalized, resnet, same

STRIP_BYTES = 2**26
"""Of what lies between a strip and its convolution; float32 while it is normalized."""
UNLIMITED_BYTES = 2**62

NUM_HELD = 5
"""A whole decode takes about so many times its largest activation, with what convolutions work in. Measured on an H200:
9.5 GiB for 2048 x 2048 pixels in bfloat16, whose largest activation is 2 GiB."""

MIN_BAND_ROWS = 64
"""Of latents: half of a picture of 1024 pixels. A device that has fewer waits for the others as long as it computes."""


def limit_memory(vae: Any, limit_bytes: int) -> None:
    """Has ``vae`` decode in rows what would take more than ``limit_bytes`` beside its weights. ValueError if that
    cannot be."""
    check_decoder(vae, "memory_gib")
    decoder, whole = vae.decoder, vae.decoder.forward

    def forward(sample: Tensor, latent_embeds: Tensor | None = None) -> Tensor:
        assert latent_embeds is None, "a decoder with group norms takes none"
        if whole_bytes(decoder, sample) > limit_bytes:
            return decode_in_rows(decoder, sample)
        pixels: Tensor = whole(sample)
        return pixels

    decoder.__dict__["forward"] = forward


def divide(decoders: Sequence[Any], limit_bytes: int | None, is_ready: Callable[[Tensor], bool]) -> None:
    """Has the first of ``decoders`` decode together with the others, its copies on other devices, what has rows enough;
    each in strips if its band would take more than ``limit_bytes``. Latents of which ``is_ready`` says that the first
    is compiled for them stay with it, if they fit: that takes as long as two that are not.
    """
    first, whole = decoders[0], decoders[0].forward
    alone_bytes = UNLIMITED_BYTES if limit_bytes is None else limit_bytes

    def forward(sample: Tensor, latent_embeds: Tensor | None = None) -> Tensor:
        assert latent_embeds is None, "a decoder with group norms takes none"
        num_bands = min(len(decoders), sample.shape[2] // MIN_BAND_ROWS)
        if num_bands < 2 or (is_ready(sample) and whole_bytes(first, sample) <= alone_bytes):
            pixels: Tensor = whole(sample)
            return pixels
        fits = whole_bytes(first, sample) <= num_bands * alone_bytes
        return decode_in_bands(decoders[:num_bands], sample, UNLIMITED_BYTES if fits else STRIP_BYTES)

    first.__dict__["forward"] = forward


def give_back(device: torch.device, limit_bytes: int) -> None:
    """Gives memory of a GPU back to others that the allocator holds for nobody, where it is more than half the limit:
    a size that is decoded again and again finds its own where it left it."""
    if device.type != "cuda":
        return
    if torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device) > limit_bytes // 2:
        torch.cuda.empty_cache()


def whole_bytes(decoder: Any, latents_BCHW: Tensor) -> int:
    """What a decode that is not in rows takes of memory, about."""
    return NUM_HELD * largest_bytes(decoder, latents_BCHW)


def largest_bytes(decoder: Any, latents_BCHW: Tensor) -> int:
    """The largest activation of a decode that is not in rows."""
    batch, _, height, width = latents_BCHW.shape
    largest, scale = 0, 1
    for block in decoder.up_blocks:
        if block.upsamplers:
            scale *= 2
        channels = max(block.resnets[-1].out_channels, 0 if block.upsamplers else block.resnets[0].in_channels)
        largest = max(largest, channels * scale * scale)
    return int(largest * batch * height * width * latents_BCHW.element_size())


def decode_in_rows(decoder: Any, latents_BCHW: Tensor, strip_bytes: int = STRIP_BYTES) -> Tensor:
    """What ``decoder(latents_BCHW)`` returns, for a decoder that passes ``check_decoder``, up to rounding."""
    middle_BCHW = decoder.mid_block(decoder.conv_in(latents_BCHW))
    (pixels_BCHW,) = _after_middle([decoder], [middle_BCHW], strip_bytes)
    return pixels_BCHW


def decode_in_bands(decoders: Sequence[Any], latents_BCHW: Tensor, strip_bytes: int = UNLIMITED_BYTES) -> Tensor:
    """What each of ``decoders`` would return, up to rounding: all alike, of which each computes as many rows on its own
    device, for decoders whose middle is known as well (``is_known_middle``). The pixels are where the latents were.
    """
    bands: Bands = [
        rows.to(decoder.conv_in.weight.device)
        for decoder, rows in zip(decoders, latents_BCHW.tensor_split(len(decoders), dim=2), strict=True)
    ]
    bands = convolved([one.conv_in for one in decoders], bands, [same] * len(bands), strip_bytes)
    first, *others = zip(*(one.mid_block.resnets for one in decoders), strict=True)
    bands = resnet(first, bands, strip_bytes)
    for attentions, resnets in zip(
        zip(*(one.mid_block.attentions for one in decoders), strict=True), others, strict=True
    ):
        if attentions[0] is not None:
            bands = attended(attentions, bands, strip_bytes)
        bands = resnet(resnets, bands, strip_bytes)
    return torch.cat([rows.to(latents_BCHW.device) for rows in _after_middle(decoders, bands, strip_bytes)], 2)


def _after_middle(decoders: Sequence[Any], bands: Bands, strip_bytes: int) -> list[Tensor]:
    for blocks in zip(*(one.up_blocks for one in decoders), strict=True):
        for resnets in zip(*(block.resnets for block in blocks), strict=True):
            bands = resnet(resnets, bands, strip_bytes)
        for samplers in zip(*(block.upsamplers or () for block in blocks), strict=True):
            bands = convolved([one.conv for one in samplers], bands, [doubled] * len(bands), strip_bytes, scale=2)
    norms = [one.conv_norm_out for one in decoders]
    prepares = normalized(norms, decoders[0].conv_act, bands, strip_bytes)
    return convolved([one.conv_out for one in decoders], bands, prepares, strip_bytes)
