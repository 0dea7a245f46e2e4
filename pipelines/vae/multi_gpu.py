"""Decoding on several devices of one process: each computes a band of the rows."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from diffusers.models.autoencoders.vae import DecoderOutput
from torch import Tensor

from pipelines.vae.chunks import decode_bands, decode_chunks, decodes_in_chunks, margins, uses_upsample
from pipelines.vae.layers import is_supported_decoder, is_supported_mid_block
from pipelines.vae.strips import STRIP_BYTES, UNLIMITED_BYTES, decode_in_bands, peak_bytes

MIN_BAND_ROWS = 64
"""Rows of a picture's latents: half of 1024 pixels. With fewer rows a device waits as long as it computes."""
MIN_SIMILARITY_DB = 20.0
"""Least signal-to-noise ratio of noise decoded in bands. Published auto-encoders with random weights reach 31 and more
in bfloat16. Without the rows at a band's edge it is under 16, with a band's own statistics under 0."""
NUM_CHECK_ROWS = 8


@torch.no_grad()
def distribute_decoder(
    vae: Any,
    others: Sequence[torch.device],
    limit_bytes: int | None = None,
    is_ready: Callable[[Tensor], bool] = lambda _: False,
) -> tuple[Any, ...]:
    """Have ``vae`` decode on its own device and the ``others`` together what has enough rows. Return all decoders.

    ``limit_bytes`` and ``is_ready`` as in ``distribute_pictures``. Known noise is decoded first, whole and in bands.
    ValueError if the two differ, or the auto-encoder cannot be divided.
    """
    check_divisible(vae)
    whole: Any = vae.decoder
    decoders = (whole, *(copy.deepcopy(whole).to(device) for device in others))
    if _goes_frame_by_frame(vae):
        _check_chunks(vae, decoders)
        vae.__dict__["decode"] = _decode_clips(vae, decoders)
        return decoders
    noise_BCHW = _noise(vae, vae.config.latent_channels, NUM_CHECK_ROWS * len(decoders), 8)
    _check(whole(noise_BCHW), decode_in_bands(decoders, noise_BCHW))
    distribute_pictures(decoders, limit_bytes, is_ready)
    return decoders


def check_divisible(vae: Any) -> None:
    """Raise ValueError if several devices cannot share the decoder of ``vae``. No values are read."""
    whole: Any = getattr(vae, "decoder", None)
    if not (_goes_frame_by_frame(vae) or (is_supported_decoder(whole) and is_supported_mid_block(whole.mid_block))):
        raise ValueError(
            "decoder.num_devices is for auto-encoders of pictures with group norms, such as AutoencoderKL, and for "
            f"those that decode frame by frame, and this model's is {type(vae).__name__}: leave the key out"
        )


def distribute_pictures(decoders: Sequence[Any], limit_bytes: int | None, is_ready: Callable[[Tensor], bool]) -> None:
    """Have the first of ``decoders`` decode pictures with enough rows together with its copies on other devices.

    A band that would take more than ``limit_bytes`` is decoded in strips. Latents for which the first is compiled
    (``is_ready``) stay there if they fit that limit, or half of the device without one. One compiled decoder is as fast
    as two plain ones.
    """
    first, whole = decoders[0], decoders[0].forward
    device_bytes = UNLIMITED_BYTES if limit_bytes is None else limit_bytes
    lone_bytes = half_memory_bytes(next(first.parameters()).device) if limit_bytes is None else limit_bytes

    def forward(sample: Tensor, latent_embeds: Tensor | None = None) -> Tensor:
        assert latent_embeds is None, "a decoder with group norms takes none"
        num_bands = min(len(decoders), sample.shape[2] // MIN_BAND_ROWS)
        if num_bands < 2 or (is_ready(sample) and peak_bytes(first, sample) <= lone_bytes):
            pixels: Tensor = whole(sample)
            return pixels
        fits = peak_bytes(first, sample) <= num_bands * device_bytes
        return decode_in_bands(decoders[:num_bands], sample, UNLIMITED_BYTES if fits else STRIP_BYTES)

    first.__dict__["forward"] = forward


def half_memory_bytes(device: torch.device) -> int:
    """Return half of a GPU's memory; no limit for a CPU."""
    is_gpu = device.type == "cuda"
    return int(torch.cuda.get_device_properties(device).total_memory) // 2 if is_gpu else UNLIMITED_BYTES


def _goes_frame_by_frame(vae: Any) -> bool:
    return hasattr(vae, "decoder") and decodes_in_chunks(vae) and uses_upsample(vae.decoder)


def _decode_clips(vae: Any, decoders: Sequence[Any]) -> Any:
    def decode(latents_BCFHW: Tensor, return_dict: bool = True) -> DecoderOutput:
        """Return a ``DecoderOutput``, which can also be indexed like the tuple of ``return_dict=False``."""
        return DecoderOutput(sample=torch.cat(list(decode_chunks(vae, latents_BCFHW, decoders)), 2))

    return decode


def _check_chunks(vae: Any, decoders: Sequence[Any]) -> None:
    """Check two latent frames, with bands just wider than the margins."""
    num_rows = len(decoders) * (margins(vae.decoder)[0] + 1)
    noise_BCFHW = _noise(vae, vae.config.z_dim, 2, num_rows, 4)
    whole, bands = (torch.cat(list(decode_bands(vae, noise_BCFHW, some)), 2) for some in (decoders[:1], decoders))
    _check(whole, bands)


def _noise(vae: Any, *shape: int) -> Tensor:
    """Return noise whose strength and brightness change from row to row: bands differ in their statistics."""
    generator, num_rows = torch.Generator().manual_seed(0), shape[-2]
    noise = torch.randn(1, *shape, generator=generator) * torch.linspace(0.1, 1, num_rows)[:, None]
    brightness = torch.randn(1, shape[0], *[1] * (len(shape) - 1), generator=generator)
    return (noise + brightness * torch.linspace(-2, 2, num_rows)[:, None]).to(vae.device, vae.dtype)


def _check(whole: Tensor, bands: Tensor) -> None:
    error = (bands.float() - whole.float()).square().mean().clamp(min=1e-20)
    similarity_db = float(10 * torch.log10(whole.float().var() / error))
    if not similarity_db >= MIN_SIMILARITY_DB:
        raise ValueError(
            f"the pixels of several devices and of one agree to {similarity_db:.0f} dB only, and "
            f"{MIN_SIMILARITY_DB:.0f} are needed: leave decoder.num_devices out, or check copies between these GPUs"
        )
