"""Auto-encoders that decode on several devices of one process: each a band of the rows."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from diffusers.models.autoencoders.vae import DecoderOutput
from torch import Tensor

from pipelines.vae.bands import margins, scales
from pipelines.vae.chunks import decode_bands, decode_chunks, decodes_in_chunks
from pipelines.vae.known import is_known, is_known_middle
from pipelines.vae.strips import decode_in_bands, divide

MIN_ALIKE_DB = 20.0
"""Of noise decoded in bands against noise decoded whole. Published auto-encoders with random weights leave 31 and more
in bfloat16; where rows are missing at the edge of a band it is under 16, with a band's own statistics under 0."""
NUM_CHECKED_ROWS = 8


@torch.no_grad()
def spread(
    vae: Any,
    others: Sequence[torch.device],
    limit_bytes: int | None = None,
    is_ready: Callable[[Tensor], bool] = lambda _: False,
) -> tuple[Any, ...]:
    """Returns the decoder of ``vae`` and a copy on each of the ``others``, with which it decodes from now on what has
    rows enough; ``limit_bytes`` is what pictures may take on each device beside the weights, and those that one device
    ``is_ready`` for stay there.

    Known noise is decoded first, whole and in bands. ValueError if these are unlike, or the auto-encoder is none that
    can be divided.
    """
    check_divisible(vae)
    whole: Any = vae.decoder
    if _goes_frame_by_frame(vae):
        decoders = (whole, *_copies(whole, others))
        _check_chunks(vae, decoders)
        vae.__dict__["decode"] = _decode_together(vae, decoders)
        return decoders
    decoders = (whole, *_copies(whole, others))
    noise_BCHW = _noise(vae, vae.config.latent_channels, NUM_CHECKED_ROWS * len(decoders), 8)
    _check(whole(noise_BCHW), decode_in_bands(decoders, noise_BCHW))
    divide(decoders, limit_bytes, is_ready)
    return decoders


def check_divisible(vae: Any) -> None:
    """Raise ValueError if the decoder of ``vae`` is none that several devices can share. Values are not read."""
    whole: Any = getattr(vae, "decoder", None)
    if not (_goes_frame_by_frame(vae) or (is_known(whole) and is_known_middle(whole.mid_block))):
        raise ValueError(
            "decoder.num_devices is for auto-encoders of pictures with group norms, such as AutoencoderKL, and for "
            f"those that decode frame by frame, and this model's is {type(vae).__name__}: leave the key out"
        )


def _goes_frame_by_frame(vae: Any) -> bool:
    return hasattr(vae, "decoder") and decodes_in_chunks(vae) and scales(vae.decoder)


def _copies(decoder: Any, devices: Sequence[torch.device]) -> list[Any]:
    return [copy.deepcopy(decoder).to(device) for device in devices]


def _decode_together(vae: Any, decoders: Sequence[Any]) -> Any:
    def decode(latents_BCFHW: Tensor, return_dict: bool = True) -> DecoderOutput:
        """A ``DecoderOutput``, which can be indexed as the tuple that callers without ``return_dict`` expect."""
        return DecoderOutput(sample=torch.cat(list(decode_chunks(vae, latents_BCFHW, decoders)), 2))

    return decode


def _check_chunks(vae: Any, decoders: Sequence[Any]) -> None:
    """Of two latent frames, with bands that end before the rows around others do."""
    num_rows = len(decoders) * (margins(vae.decoder)[0] + 1)
    noise_BCFHW = _noise(vae, vae.config.z_dim, 2, num_rows, 4)
    whole, bands = (torch.cat(list(decode_bands(vae, noise_BCFHW, some)), 2) for some in (decoders[:1], decoders))
    _check(whole, bands)


def _noise(vae: Any, *shape: int) -> Tensor:
    """Stronger from row to row, and brighter or darker: bands differ in their statistics."""
    generator, num_rows = torch.Generator().manual_seed(0), shape[-2]
    noise = torch.randn(1, *shape, generator=generator) * torch.linspace(0.1, 1, num_rows)[:, None]
    brightness = torch.randn(1, shape[0], *[1] * (len(shape) - 1), generator=generator)
    return (noise + brightness * torch.linspace(-2, 2, num_rows)[:, None]).to(vae.device, vae.dtype)


def _check(whole: Tensor, bands: Tensor) -> None:
    error = (bands.float() - whole.float()).square().mean().clamp(min=1e-20)
    alike_db = float(10 * torch.log10(whole.float().var() / error))
    if not alike_db >= MIN_ALIKE_DB:
        raise ValueError(
            f"what several devices decode is {alike_db:.0f} dB from what one does, and {MIN_ALIKE_DB:.0f} are needed: "
            "leave decoder.num_devices out (or see whether these GPUs copy to each other as they should)"
        )
