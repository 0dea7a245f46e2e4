"""An auto-encoder's decoder in strips of rows: large pictures in a fraction of the memory, and with the same pixels.

Tiles that are decoded one by one and blended see statistics of their own: their group norms differ, and seams show.
Here it is each layer that goes strip by strip. A group norm's statistics are those of all rows; a convolution gets one
row more on both sides. What is held are a layer's input and its result, not what lies between its norm, its activation
and its convolution.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from diffusers.models.autoencoders.vae import Decoder
from diffusers.models.resnet import ResnetBlock2D
from diffusers.models.unets.unet_2d_blocks import UpDecoderBlock2D
from diffusers.models.upsampling import Upsample2D
from torch import Tensor, nn
from torch.nn import functional as F

STRIP_BYTES = 2**26
"""Of what lies between a strip and its convolution; float32 while it is normalized."""

NUM_HELD = 5
"""A whole decode takes about so many times its largest activation, with what convolutions work in. Measured on an H200:
9.5 GiB for 2048 x 2048 pixels in bfloat16, whose largest activation is 2 GiB."""

Prepare = Callable[[Tensor], Tensor]


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


def give_back(device: torch.device, limit_bytes: int) -> None:
    """Gives memory of a GPU back to others that the allocator holds for nobody, where it is more than half the limit:
    a size that is decoded again and again finds its own where it left it."""
    if device.type != "cuda":
        return
    if torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device) > limit_bytes // 2:
        torch.cuda.empty_cache()


def check_decoder(vae: Any, key: str) -> None:
    """ValueError, which names the ``key`` that asked for it, if the decoder of ``vae`` is none that is known here."""
    decoder: Any = getattr(vae, "decoder", None)
    blocks = list(decoder.up_blocks) if type(decoder) is Decoder else []
    resnets = [resnet for block in blocks for resnet in getattr(block, "resnets", ())]
    samplers = [sampler for block in blocks for sampler in getattr(block, "upsamplers", None) or ()]
    is_known = (
        bool(blocks)
        and all(type(block) is UpDecoderBlock2D for block in blocks)
        and all(map(_is_known_resnet, resnets))
        and all(map(_is_known_sampler, samplers))
        and isinstance(decoder.conv_norm_out, nn.GroupNorm)
    )
    if not is_known:
        raise ValueError(
            f"decoder.{key} is for auto-encoders of pictures with group norms, such as AutoencoderKL, and this model's "
            f"is {type(vae).__name__}: leave the key out"
        )


def _is_known_resnet(resnet: Any) -> bool:
    plain = type(resnet) is ResnetBlock2D and resnet.time_emb_proj is None
    if not plain or resnet.upsample is not None or resnet.downsample is not None:
        return False
    return resnet.time_embedding_norm != "scale_shift" and all(
        isinstance(norm, nn.GroupNorm) for norm in (resnet.norm1, resnet.norm2)
    )


def _is_known_sampler(sampler: Any) -> bool:
    plain = type(sampler) is Upsample2D and sampler.norm is None and sampler.interpolate and sampler.use_conv
    return plain and not sampler.use_conv_transpose and sampler.name == "conv"


def whole_bytes(decoder: Any, latents_BCHW: Tensor) -> int:
    """What a decode that is not in rows takes of memory, about."""
    batch, _, height, width = latents_BCHW.shape
    largest, scale = 0, 1
    for block in decoder.up_blocks:
        if block.upsamplers:
            scale *= 2
        channels = max(block.resnets[-1].out_channels, 0 if block.upsamplers else block.resnets[0].in_channels)
        largest = max(largest, channels * scale * scale)
    return NUM_HELD * largest * batch * height * width * latents_BCHW.element_size()


def decode_in_rows(decoder: Any, latents_BCHW: Tensor, strip_bytes: int = STRIP_BYTES) -> Tensor:
    """What ``decoder(latents_BCHW)`` returns, for a decoder that passes ``check_decoder``, up to rounding."""
    x_BCHW = decoder.mid_block(decoder.conv_in(latents_BCHW))
    for block in decoder.up_blocks:
        for resnet in block.resnets:
            x_BCHW = _resnet(resnet, x_BCHW, strip_bytes)
        for sampler in block.upsamplers or ():
            x_BCHW = _by_rows(x_BCHW, sampler.conv, _doubled, strip_bytes, scale=2)
    prepare = _normalized(decoder.conv_norm_out, decoder.conv_act, x_BCHW)
    return _by_rows(x_BCHW, decoder.conv_out, prepare, strip_bytes)


def _resnet(resnet: Any, x_BCHW: Tensor, strip_bytes: int) -> Tensor:
    act = resnet.nonlinearity
    inner = _by_rows(x_BCHW, resnet.conv1, _normalized(resnet.norm1, act, x_BCHW), strip_bytes)
    out = _by_rows(inner, resnet.conv2, _normalized(resnet.norm2, act, inner), strip_bytes)
    del inner
    for top, bottom in _strips(x_BCHW, strip_bytes):
        rows = x_BCHW[:, :, top:bottom]
        shortcut = rows if resnet.conv_shortcut is None else resnet.conv_shortcut(rows)
        out[:, :, top:bottom].add_(shortcut).div_(resnet.output_scale_factor)
    return out


def _strips(x_BCHW: Tensor, strip_bytes: int) -> Iterator[tuple[int, int]]:
    """First and last row, the last excluded, of each strip."""
    batch, channels, height, width = x_BCHW.shape
    num_rows = max(1, strip_bytes // (batch * channels * width * torch.float32.itemsize))
    for top in range(0, height, num_rows):
        yield top, min(top + num_rows, height)


def _by_rows(x_BCHW: Tensor, conv: nn.Conv2d, prepare: Prepare, strip_bytes: int, scale: int = 1) -> Tensor:
    """``conv(prepare(x))``. The convolution pads as much as it reaches; ``prepare`` takes each row by itself, and makes
    ``scale`` of it."""
    batch, _, height, width = x_BCHW.shape
    assert conv.stride == (1, 1), conv.stride
    assert not isinstance(conv.padding, str), conv.padding
    reach, sideways = conv.padding
    out = x_BCHW.new_empty(batch, conv.out_channels, scale * height, scale * width)
    for top, bottom in _strips(x_BCHW, strip_bytes // scale**2):
        first, last = max(0, top - reach), min(height, bottom + reach)
        rows = prepare(x_BCHW[:, :, first:last])
        above, below = scale * (top - first), scale * (last - bottom)
        cut = rows[:, :, max(0, above - reach) : rows.shape[2] - max(0, below - reach)]
        padded = F.pad(cut, (0, 0, reach - min(reach, above), reach - min(reach, below)))
        strip = F.conv2d(padded, conv.weight, conv.bias, padding=(0, sideways))
        out[:, :, scale * top : scale * bottom] = strip
    return out


def _doubled(rows_BCHW: Tensor) -> Tensor:
    return F.interpolate(rows_BCHW, scale_factor=2.0, mode="nearest")


def _normalized(norm: Any, act: Callable[[Tensor], Tensor], x_BCHW: Tensor) -> Prepare:
    """``act(norm(rows))`` of any rows of ``x``, by the statistics of them all; in float32, as the whole norm does."""
    num_groups = norm.num_groups
    groups = x_BCHW.chunk(num_groups, dim=1)
    moments = [torch.var_mean(group.float(), dim=(1, 2, 3), correction=0) for group in groups]
    variance_BG, mean_BG = (torch.stack(each, 1) for each in zip(*moments, strict=True))
    scale_BG = torch.rsqrt(variance_BG + norm.eps)
    per_group = norm.num_channels // num_groups
    scale_BC = scale_BG.repeat_interleave(per_group, 1) * norm.weight.float()
    shift_BC = norm.bias.float() - mean_BG.repeat_interleave(per_group, 1) * scale_BC

    def prepare(rows_BCHW: Tensor) -> Tensor:
        normal = torch.addcmul(shift_BC[..., None, None], rows_BCHW.float(), scale_BC[..., None, None])
        return act(normal.to(rows_BCHW.dtype))

    return prepare
