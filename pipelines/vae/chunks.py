"""Clips that causal auto-encoders decode in chunks, one latent frame after the other, also in bands of rows.

The decoder's cache holds the values of earlier frames that the next ones need. With several devices, each computes the
whole first half of the decoder, whose attention sees the whole picture: a few percent of the work. Then each device has
its band and the rows around it that later convolutions reach, fewer after each layer. The rows of a band equal those of
a whole decode, up to rounding, and devices exchange nothing.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, TypeVar, cast

import torch
from diffusers.models.autoencoders.vae import DecoderOutput
from torch import Tensor, nn

T = TypeVar("T")

CACHE, FIRST = "feat_cache", "first_chunk"
SHORTCUT = "avg_shortcut"
"""Part of some blocks that enlarges the block's input, which is added to its output."""
MIN_BAND_PIXELS = 120
"""Rows of pixels: four bands of 480, each 35 to 41 % of the work. Thinner bands mostly compute margins."""


def decodes_in_chunks(vae: Any) -> bool:
    """Return whether ``vae`` decodes one latent frame after the other, without tiling."""
    return CACHE in _arguments(vae) and not vae.use_tiling


class UnreadCache(list[Any]):
    """The cache of a clip's only latent frame: what a next frame would read is not kept.

    It would be the input of nearly every convolution, more than half of a decode's memory.
    """

    def __setitem__(self, index: Any, value: Any) -> None:
        """Do nothing."""


def skip_unread_cache(vae: Any) -> None:
    """Have ``vae``, which ``decodes_in_chunks``, decode a single latent frame without a cache, with the same values."""
    whole = vae.decode

    def decode(latents_BCFHW: Tensor, return_dict: bool = True) -> Any:
        """Return what ``vae.decode`` returns, or a ``DecoderOutput``, which can be indexed like its tuple."""
        is_sliced = len(latents_BCFHW) == 1 or vae.use_slicing
        if latents_BCFHW.shape[2] > 1 or vae.use_tiling or not is_sliced:
            return whole(latents_BCFHW, return_dict=return_dict)
        frames = [frame_BCFHW for one in torch.split(latents_BCFHW, 1) for frame_BCFHW in decode_chunks(vae, one)]
        return DecoderOutput(sample=torch.cat(frames))

    vae.__dict__["decode"] = decode


def decode_chunks(vae: Any, latents_BCFHW: Tensor, decoders: Sequence[Any] = ()) -> Iterator[Tensor]:
    """Yield the frames of each latent frame: together the exact values of ``vae.decode`` of the whole.

    ``decoders`` are the decoder of ``vae`` and copies of it on other devices. Each decodes a band, as far as there are
    enough rows. The values are the same up to rounding, on the latents' device.
    """
    count = 1
    if len(decoders) > 1:
        count = min(len(decoders), num_bands(latents_BCFHW.shape[-2] * _pixels_per_latent(vae)))
    return decode_bands(vae, latents_BCFHW, decoders[:count] if count > 1 else (vae.decoder,))


def num_bands(height: int) -> int:
    """Return how many devices at most share a clip of ``height`` pixels."""
    return max(1, height // MIN_BAND_PIXELS)


def decode_bands(vae: Any, latents_BCFHW: Tensor, decoders: Sequence[Any]) -> Iterator[Tensor]:
    """Yield the same frames, with a band on each of ``decoders``, however thin.

    One thread starts a chunk on one device after the other: calls on GPUs return long before their work is done.
    """
    hidden_BCFHW, count = getattr(vae, "post_quant_conv", nn.Identity())(latents_BCFHW), len(decoders)
    bands = [
        _decode_band(vae, decoder, hidden_BCFHW.to(next(decoder.parameters()).device), Band(index=index, count=count))
        for index, decoder in enumerate(decoders)
    ]
    for rows in zip(*bands, strict=True):
        yield rows[0] if count == 1 else torch.cat([each.to(latents_BCFHW.device) for each in rows], -2)


def decode_segments(vae: Any, latents_BCFHW: Tensor, lengths: Sequence[int]) -> Tensor:
    """Return the pixels of segments of ``lengths`` latent frames, each decoded alone, without any overlap.

    The first frame of each segment but the first is the last one of the segment before it. A ``ChunkedVae`` returns the
    next chunk of them.
    """
    own = getattr(vae, "decode_segments", None)
    if own is not None:
        pixels_BCFHW: Tensor = own(latents_BCFHW, lengths)
        return pixels_BCFHW
    segments = (vae.decode(one, return_dict=False)[0] for one in torch.split(latents_BCFHW, list(lengths), dim=2))
    return torch.cat([pixels[:, :, 1:] if number else pixels for number, pixels in enumerate(segments)], dim=2)


def _segment_chunks(
    vae: Any, latents_BCFHW: Tensor, lengths: Sequence[int], decoders: Sequence[Any]
) -> Iterator[Tensor]:
    """Yield the chunks of ``decode_segments``; the first latent frame is one frame."""
    for number, one_BCFHW in enumerate(torch.split(latents_BCFHW, list(lengths), dim=2)):
        yield from islice(decode_chunks(vae, one_BCFHW, decoders), min(number, 1), None)


class ChunkedVae:
    """Replaces a pipeline's auto-encoder: each ``decode`` returns the next chunk of the first call's clip.

    ``num_left`` chunks are still to come. ``decoders`` as for ``decode_chunks``. With ``main``, a stream of the
    latents' device, each chunk is returned after the next is issued (``issue_ahead``).
    """

    def __init__(self, vae: Any, decoders: Sequence[Any] = (), main: Any = None) -> None:
        self._vae, self._decoders, self._main, self.num_left = vae, decoders, main, 0
        self._chunks: Iterator[Tensor] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._vae, name)

    def decode(self, latents_BCFHW: Tensor, return_dict: bool = True) -> DecoderOutput:
        """Return a ``DecoderOutput``, which can also be indexed like the tuple of ``return_dict=False``."""
        return DecoderOutput(sample=self.decode_segments(latents_BCFHW, [latents_BCFHW.shape[2]]))

    def decode_segments(self, latents_BCFHW: Tensor, lengths: Sequence[int]) -> Tensor:
        """Return the next chunk of what ``decode_segments`` returns."""
        if self._chunks is None:
            chunks = _segment_chunks(self._vae, latents_BCFHW, lengths, self._decoders)
            self._chunks = chunks if self._main is None else issue_ahead(chunks, latents_BCFHW, self._main)
            self.num_left = sum(lengths) - (len(lengths) - 1)
        self.num_left -= 1
        return next(self._chunks)


def issue_ahead(chunks: Iterator[Tensor], latents_BCFHW: Tensor, main: Any) -> Iterator[Tensor]:
    """Yield ``chunks``, computed from the latents on the stream ``main``, each after the next one is issued.

    The caller works on another stream, which waits for the yielded chunk only: devices have work while the host copies.
    """
    device = latents_BCFHW.device
    streams = torch.get_device_module(device)
    main.wait_stream(streams.current_stream(device))
    _record_use(latents_BCFHW, main)
    events = ((pixels_BCFHW, main.record_event()) for pixels_BCFHW in on_stream(chunks, device, main))
    issued = next(events, None)
    while issued is not None:
        (pixels_BCFHW, end), issued = issued, next(events, None)
        current = streams.current_stream(device)
        current.wait_event(end)
        _record_use(pixels_BCFHW, current)
        yield pixels_BCFHW


def on_stream(items: Iterator[T], device: torch.device, stream: Any) -> Iterator[T]:
    """Yield ``items``, each computed while ``stream`` of ``device`` is the current one."""
    nothing = object()
    while True:
        with torch.get_device_module(device).stream(stream):
            item = next(items, nothing)
        if item is nothing:
            return
        yield cast(T, item)


def _record_use(tensor: Tensor, stream: Any) -> None:
    """Keep the memory of ``tensor``, once it is freed, until ``stream`` has come so far."""
    if tensor.is_cuda:
        tensor.record_stream(stream)


@dataclass(frozen=True, kw_only=True, slots=True)
class Band:
    """A share of the rows of latents, for one of several devices."""

    index: int = 0
    """Its place, from the top."""
    count: int = 1
    """Number of bands that the rows are cut into."""

    def __post_init__(self) -> None:
        assert 0 <= self.index < self.count, self

    def rows(self, num_rows: int) -> tuple[int, int]:
        """Return the first row, and the first one after the band."""
        assert self.count <= num_rows, f"{self.count} bands of {num_rows} rows"
        return num_rows * self.index // self.count, num_rows * (self.index + 1) // self.count


def margins(decoder: Any) -> tuple[int, ...]:
    """Return how many rows on either side of a band each layer after the middle needs."""
    *layers, last = _layers_after_middle(decoder)
    needed = [_reach(last)]
    for layer in reversed(layers):
        needed.append(-(-needed[-1] // _scale(layer)) + _reach(layer))
    return tuple(reversed(needed))


def uses_upsample(decoder: Any) -> bool:
    """Return whether ``nn.Upsample`` adds the rows in ``decoder``: only its factor can be read."""
    return any(isinstance(part, nn.Upsample) for part in decoder.modules())


def _decode_band(vae: Any, decoder: Any, hidden_BCFHW: Tensor, band: Band) -> Iterator[Tensor]:
    """Yield the pixels of a band, frame by frame, with a cache of the call."""
    has_next = hidden_BCFHW.shape[2] > 1
    cache: list[Any] = (list if has_next else UnreadCache)([None] * sum(1 for _ in decoder.modules()))
    takes_first = FIRST in _arguments(vae)
    crops = list(_crops(decoder, band, hidden_BCFHW.shape[-2])) if band.count > 1 else []
    for index in range(hidden_BCFHW.shape[2]):
        first = {FIRST: index == 0} if takes_first else {}
        latent_BCFHW = hidden_BCFHW[:, :, index : index + 1]
        with _cropped(crops):
            patches_BCFHW = decoder(latent_BCFHW, feat_cache=cache, feat_idx=[0], **first)
        yield _unpatch(patches_BCFHW, _patch_size(vae)).clamp(min=-1.0, max=1.0)


@contextmanager
def _cropped(crops: Iterable[tuple[nn.Module, slice]]) -> Iterator[None]:
    """Make each module of ``crops`` return only its rows, inside this context."""
    hooks = [module.register_forward_hook(partial(_crop, rows)) for module, rows in crops]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _crop(rows: slice, module: nn.Module, inputs: Any, output_BCFHW: Tensor) -> Tensor:
    return output_BCFHW[..., rows, :].clone()  # in the memory layout of the output


def _crops(decoder: Any, band: Band, num_rows: int) -> Iterator[tuple[nn.Module, slice]]:
    """Yield modules and the rows of their outputs that are used."""
    start, stop = band.rows(num_rows)
    needed, scale = iter(margins(decoder)), 1

    def rows() -> tuple[int, int]:
        margin = next(needed)
        return max(0, scale * start - margin), min(scale * num_rows, scale * stop + margin)

    low, high = rows()
    yield decoder.mid_block, slice(low, high)
    for block in decoder.up_blocks:
        block_first, block_scale = low, scale
        for layer in _layers(block):
            first, scale = low * _scale(layer), scale * _scale(layer)
            low, high = rows()
            yield layer, slice(low - first, high - first)
        if (shortcut := getattr(block, SHORTCUT, None)) is not None:
            first = block_first * (scale // block_scale)
            yield shortcut, slice(low - first, high - first)
    yield decoder.conv_out, slice(scale * start - low, scale * stop - low)


def _layers_after_middle(decoder: Any) -> list[nn.Module]:
    """Return the layers with convolutions, in order."""
    return [*(layer for block in decoder.up_blocks for layer in _layers(block)), decoder.conv_out]


def _layers(block: Any) -> list[nn.Module]:
    """Return the residual blocks of ``block``, and what enlarges their output."""
    upsampler = getattr(block, "upsampler", None)
    upsamplers = getattr(block, "upsamplers", None) or (() if upsampler is None else (upsampler,))
    return [*block.resnets, *upsamplers]


def _reach(module: nn.Module) -> int:
    """Return how many rows of its input on either side of a row the module reads, or a few more.

    Every convolution counts as if it ran after all others, and before the upsampling.
    """
    kernels = (part.kernel_size[-2] for part in module.modules() if isinstance(part, nn.Conv2d | nn.Conv3d))
    return sum(size // 2 for size in kernels)


def _scale(module: nn.Module) -> int:
    scales: list[Any] = [part.scale_factor for part in module.modules() if isinstance(part, nn.Upsample)]
    return math.prod(int(scale[0] if isinstance(scale, tuple) else scale) for scale in scales)


def _pixels_per_latent(vae: Any) -> int:
    """Return how many rows of pixels a row of latents becomes."""
    return math.prod(map(_scale, vae.decoder.up_blocks)) * _patch_size(vae)


def _patch_size(vae: Any) -> int:
    return int(vae.config.get("patch_size") or 1)


def _arguments(vae: Any) -> frozenset[str]:
    decoder = getattr(vae, "decoder", None)
    return frozenset() if decoder is None else frozenset(inspect.signature(decoder.forward).parameters)


def _unpatch(patches_BCFHW: Tensor, side: int) -> Tensor:
    """Return pixels from channels that hold squares of ``side`` pixels, columns before rows."""
    batch, channels, frames, height, width = patches_BCFHW.shape
    squares = patches_BCFHW.reshape(batch, channels // side**2, side, side, frames, height, width)
    return squares.permute(0, 1, 4, 5, 3, 6, 2).reshape(batch, -1, frames, height * side, width * side)
