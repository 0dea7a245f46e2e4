"""The decoder of clips that goes latent frame by latent frame (Wan's and its copies), in channels-last memory, fused.

Norm and SiLU are one pass over memory, which also writes the input of the next convolution. That is the frames behind
two earlier ones, or for pairs of frames the inputs of four products each (``engines.fast.frames``). Biases
are added by the pass that reads a convolution's output. A clip's first frame has only zeros before it, which nothing
reads. Frames are convolved before they are enlarged.

Modules take and return (B, C, F, H, W) in channels-last memory, like the modules that they replace, so bands of rows
(``chunks``) are cut as before. Inside, the channels are the last dim.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from engines.fast.frames import (
    add_residual,
    enlarged_weights,
    interleave,
    merge_frames,
    pixel_norm,
    split_frames,
    split_weights,
)
from engines.fast.records import FrameProducts
from pipelines.vae.frame_conv import (
    CHANNEL_MULTIPLE,
    FLOAT16_SCALE,
    ClipConv,
    are_layers,
    channels_first,
    channels_last,
    convolve_frames,
    in_channels_last,
    is_layer,
    scale_layers,
    without_weights,
)
from pipelines.vae.fused_stream import FrameStream, is_supported_stream_decoder
from pipelines.vae.fused_whole import fuse_whole_decoder, is_supported_whole_decoder
from pipelines.vae.layers import is_supported_decoder

DECODER, RESNET, ATTENTION = "Decoder3d", "ResidualBlock", "AttentionBlock"
RESAMPLER, DUPLICATION = "Resample", "DupUp3D"
FURTHER = ("MidBlock", "UpBlock", "CausalConv3d", "RMS_norm", "Upsample")
LAYERS = (DECODER, RESNET, ATTENTION, RESAMPLER, DUPLICATION, *FURTHER)
"""Ends of the names of all classes of the library in a supported decoder; each family has copies of them."""
NUM_EARLIER = 2
"""Earlier frames that a convolution in time reads."""
NOT_YET = "Rep"
"""Entry of diffusers' cache after a clip's first frame, which the convolution in time leaves out."""


def check_preparable(vae: Any) -> None:
    """Raise ValueError if ``decoder.compile`` does not support the decoder of ``vae``."""
    decoder, name = getattr(vae, "decoder", None), type(vae).__name__
    if not (is_supported_decoder(decoder) or is_supported_clip_decoder(decoder)):
        raise ValueError(
            "decoder.compile is for auto-encoders of pictures with group norms, such as AutoencoderKL, and for those "
            f"of clips with RMS norms, whose decoders read neither noise nor time, and this model's is {name}: "
            "leave it out"
        )


def _is_of_other_kind(decoder: Any) -> bool:
    """Return whether ``decoder`` is supported and not like Wan's: it takes all frames, or has blocks of its own."""
    return is_supported_whole_decoder(decoder) or is_supported_stream_decoder(decoder)


def is_supported_clip_decoder(decoder: Any) -> bool:
    """Return whether ``fuse_clip_decoder`` takes ``decoder``."""
    return _is_of_other_kind(decoder) or _is_supported(decoder)


def _is_supported(decoder: Any) -> bool:
    """Return whether ``decoder`` goes latent frame by latent frame, as the library has it."""
    if not is_layer(decoder, DECODER) or not are_layers(decoder, LAYERS):
        return False
    resnets = [part for part in decoder.modules() if is_layer(part, RESNET)]
    return isinstance(decoder.nonlinearity, nn.SiLU) and all(map(_is_supported_resnet, resnets))


def _is_supported_resnet(block: Any) -> bool:
    is_causal = isinstance(block.conv1, nn.Conv3d) and isinstance(block.conv2, nn.Conv3d)
    return is_causal and isinstance(block.nonlinearity, nn.SiLU) and not block.dropout.p


def is_fused_clip_decoder(decoder: Any) -> bool:
    """Return whether ``decoder`` comes from ``fuse_clip_decoder``."""
    last = getattr(decoder, "conv_out", None)
    return isinstance(decoder, FrameStream) or isinstance(last, CausalConv | ClipConv)


def fused_dtype(decoder: Any) -> torch.dtype:
    """Return the dtype in which a fused ``decoder`` computes on CUDA: float16, but for some in bfloat16."""
    own: torch.dtype = next(decoder.parameters()).dtype
    return torch.float16 if own is torch.float32 or _is_of_other_kind(decoder) else own


@torch.no_grad()
def fuse_clip_decoder(decoder: Any, dtype: torch.dtype) -> Any:
    """Return a supported ``decoder`` changed in place, or another one with its weights. They have ``dtype``.

    It takes latents of any dtype and returns pixels in the dtype that it had.
    """
    if is_supported_stream_decoder(decoder):
        return FrameStream(decoder, dtype)
    (fuse_whole_decoder if is_supported_whole_decoder(decoder) else _fuse)(decoder, dtype)
    return decoder


def _fuse(decoder: Any, dtype: torch.dtype) -> None:
    own_dtype, in_pairs = next(decoder.parameters()).dtype, _in_pairs(decoder)
    if dtype is torch.float16:
        _scale_sum(decoder, FLOAT16_SCALE)
    decoder.to(dtype)
    for name, part in list(decoder.named_modules()):
        if is_layer(part, RESNET):
            decoder.set_submodule(name, (PairedResnet if part in in_pairs else CausalResnet)(part))
        elif is_layer(part, ATTENTION):
            decoder.set_submodule(name, FusedAttention(part))
        elif is_layer(part, RESAMPLER):
            decoder.set_submodule(name, FusedUpsampler(part))
        elif is_layer(part, DUPLICATION):
            decoder.set_submodule(name, Duplication(part))
    decoder.norm_out, decoder.nonlinearity = FusedNorm(decoder.norm_out), nn.Identity()
    decoder.conv_in = CausalConv(decoder.conv_in, dtype)
    decoder.conv_out = CausalConv(decoder.conv_out, own_dtype)


def _scale_sum(decoder: Any, factor: float) -> None:
    """Scale the sum that runs through all residual blocks: what is added to it, and biases of what it goes through."""
    added, passed = [decoder.conv_in], list[Any]()
    for part in decoder.modules():
        if is_layer(part, RESNET):
            added.append(part.conv2)
            passed += [] if isinstance(part.conv_shortcut, nn.Identity) else [part.conv_shortcut]
        elif is_layer(part, ATTENTION):
            added.append(part.proj)
        elif is_layer(part, RESAMPLER):
            passed += [part.resample[1], *([part.time_conv] if hasattr(part, "time_conv") else [])]
    scale_layers(added, passed, factor)


def _in_pairs(decoder: Any) -> frozenset[nn.Module]:
    """Return the parts whose frames, but for a clip's first, are an even number: those after an upsampling in time."""
    found, are_even = list[nn.Module](), False
    for block in decoder.up_blocks:
        found += block.modules() if are_even else ()
        are_even = are_even or any(hasattr(part, "time_conv") for part in block.modules())
    return frozenset(found)


def _weight_of(norm: Any) -> Tensor:
    """Return the weights of an RMS norm without bias."""
    weight_C: Tensor = norm.gamma.flatten()
    return weight_C


class FusedNorm(nn.Module):
    """An RMS norm of the channels, and SiLU."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x_BCFHW: Tensor) -> Tensor:
        x_BFHWC = channels_last(x_BCFHW)
        out_BFHWC = torch.empty_like(x_BFHWC)
        pixel_norm(x_BFHWC, _weight_of(self.norm), out_BFHWC, silu=True)
        return channels_first(out_BFHWC)


def _to_channels_last(conv: Any) -> Any:
    """Return ``conv`` with its weights in channels-last memory."""
    conv.weight.data = in_channels_last(conv.weight.data)
    return conv


def _convolve(conv: Any, frames_BFHWC: Tensor, bias_C: Tensor | None = None) -> Tensor:
    """Return the frames after the first two, convolved with those before them, plus ``bias``; zeros around the rows."""
    padding = (0, *(size // 2 for size in conv.kernel_size[1:]))
    return channels_last(functional.conv3d(channels_first(frames_BFHWC), conv.weight, bias_C, padding=padding))


def _convolve_first(conv: Any, frame_BFHWC: Tensor) -> Tensor:
    """Return a clip's first frame, which has only zeros before it."""
    padding = (0, *(size // 2 for size in conv.kernel_size[1:]))
    return channels_last(functional.conv3d(channels_first(frame_BFHWC), conv.weight[:, :, -1:], padding=padding))


def _with_earlier(earlier_BFHWC: Tensor | None, shape: torch.Size, like: Tensor) -> Tensor:
    """Return frames of ``shape`` after two earlier ones, zeros if there were none; the frames are not written yet."""
    batch, num_frames, *rest = shape
    frames_BFHWC = like.new_empty(batch, NUM_EARLIER + num_frames, *rest)
    num_zeros = NUM_EARLIER - (0 if earlier_BFHWC is None else earlier_BFHWC.shape[1])
    frames_BFHWC[:, :num_zeros].zero_()
    if earlier_BFHWC is not None:
        frames_BFHWC[:, num_zeros:NUM_EARLIER] = earlier_BFHWC
    return frames_BFHWC


class CausalConv(nn.Module):
    """A causal convolution with its bias, whose output has ``dtype``; called like diffusers' own.

    Convolutions to few channels compute some more, which are cut off.
    """

    def __init__(self, conv: Any, dtype: torch.dtype) -> None:
        super().__init__()
        self.num_channels, self.dtype = conv.out_channels, dtype
        missing = -conv.out_channels % CHANNEL_MULTIPLE
        conv.weight.data = functional.pad(conv.weight.data, (0,) * 8 + (0, missing))
        self.conv = _to_channels_last(conv)

    def forward(self, x_BCFHW: Tensor, cache_x: Tensor | None = None) -> Tensor:
        x_BFHWC = channels_last(x_BCFHW.to(self.conv.weight.dtype))
        if cache_x is None and x_BFHWC.shape[1] == 1:
            out_BFHWC = _convolve_first(self.conv, x_BFHWC)
        else:
            earlier_BFHWC = None if cache_x is None else channels_last(cache_x)
            frames_BFHWC = _with_earlier(earlier_BFHWC, x_BFHWC.shape, x_BFHWC)
            frames_BFHWC[:, NUM_EARLIER:] = x_BFHWC
            out_BFHWC = _convolve(self.conv, frames_BFHWC)
        out_BFHWC = out_BFHWC[..., : self.num_channels] + self.conv.bias
        return channels_first(out_BFHWC.to(self.dtype))


class NormedConv(nn.Module):
    """RMS norm, SiLU and a causal convolution, whose own bias is left to what follows."""

    def __init__(self, norm: Any, conv: Any) -> None:
        super().__init__()
        self.norm, self.conv = norm, _to_channels_last(conv)

    def forward(self, x_BFHWC: Tensor, bias_C: Tensor | None, feat_cache: Any, feat_idx: list[int]) -> Tensor:
        """Return the convolution of the norm of ``x + bias``; the cache gets the last two frames of what it read."""
        index = feat_idx[0]
        feat_idx[0] += 1
        earlier_BFHWC, weight_C = feat_cache[index], _weight_of(self.norm)
        if earlier_BFHWC is None and x_BFHWC.shape[1] == 1:
            first_BFHWC = torch.empty_like(x_BFHWC)
            pixel_norm(x_BFHWC, weight_C, first_BFHWC, bias_C=bias_C, silu=True)
            feat_cache[index] = first_BFHWC
            return _convolve_first(self.conv, first_BFHWC)
        frames_BFHWC = _with_earlier(earlier_BFHWC, x_BFHWC.shape, x_BFHWC)
        pixel_norm(x_BFHWC, weight_C, frames_BFHWC[:, NUM_EARLIER:], bias_C=bias_C, silu=True)
        feat_cache[index] = frames_BFHWC[:, -NUM_EARLIER:].clone()
        return _convolve(self.conv, frames_BFHWC)


class ClipResnet(nn.Module):
    """A residual block with the weights of ``block``, but for its two convolutions."""

    def __init__(self, block: Any) -> None:
        super().__init__()
        self.conv_shortcut = None if isinstance(block.conv_shortcut, nn.Identity) else block.conv_shortcut

    def _shortcut(self, x_BFHWC: Tensor) -> Tensor:
        return x_BFHWC if self.conv_shortcut is None else _pointwise(self.conv_shortcut, x_BFHWC)


class CausalResnet(ClipResnet):
    """A residual block for any number of frames."""

    def __init__(self, block: Any) -> None:
        super().__init__(block)
        self.conv1, self.conv2 = NormedConv(block.norm1, block.conv1), NormedConv(block.norm2, block.conv2)

    def forward(self, x_BCFHW: Tensor, feat_cache: Any, feat_idx: list[int]) -> Tensor:
        x_BFHWC = channels_last(x_BCFHW)
        inner_BFHWC = self.conv1(x_BFHWC, None, feat_cache, feat_idx)
        inner_BFHWC = self.conv2(inner_BFHWC, self.conv1.conv.bias, feat_cache, feat_idx)
        return channels_first(add_residual(inner_BFHWC, self.conv2.conv.bias, self._shortcut(x_BFHWC)))


class PairedConv(nn.Module):
    """RMS norm, SiLU and a causal convolution of pairs of frames, whose own bias is left to what follows."""

    def __init__(self, norm: Any, conv: Any) -> None:
        super().__init__()
        self.norm, self.bias = norm, conv.bias
        self.weight = nn.Parameter(in_channels_last(split_weights(conv.weight.data).flatten(0, 1)), requires_grad=False)
        self.conv = conv  # ``chunks`` reads its kernel's size, and diffusers counts it for its cache
        without_weights(conv)

    def first(self, x_BFHWC: Tensor, bias_C: Tensor | None, feat_cache: Any, index: int) -> Tensor:
        """Return the convolution of a clip's first frame, which has only zeros before it."""
        first_BFHWC = torch.empty_like(x_BFHWC)
        pixel_norm(x_BFHWC, _weight_of(self.norm), first_BFHWC, bias_C=bias_C, silu=True)
        feat_cache[index] = first_BFHWC
        return self._convolve(first_BFHWC[:, 0], 3)[:, None]

    def split(self, x: Tensor | FrameProducts, bias_C: Tensor | None, feat_cache: Any, index: int) -> Tensor:
        """Return the products' inputs for the norm of ``x + bias``, an even number of frames."""
        inputs_4NHWC, feat_cache[index] = split_frames(x, _weight_of(self.norm), feat_cache[index], bias_C=bias_C)
        return inputs_4NHWC

    def forward(self, inputs_4NHWC: Tensor) -> FrameProducts:
        """Return the products that make the convolution, from their inputs."""
        a, b, c, d = (self._convolve(input_NHWC, number) for number, input_NHWC in enumerate(inputs_4NHWC))
        return a, b, c, d

    def _convolve(self, x_NHWC: Tensor, number: int) -> Tensor:
        padding = tuple(size // 2 for size in self.conv.kernel_size[1:])
        return convolve_frames(x_NHWC, self.weight.chunk(4)[number], padding)


class PairedResnet(ClipResnet):
    """A residual block for an even number of frames after a clip's first one."""

    def __init__(self, block: Any) -> None:
        super().__init__(block)
        self.conv1, self.conv2 = PairedConv(block.norm1, block.conv1), PairedConv(block.norm2, block.conv2)

    def forward(self, x_BCFHW: Tensor, feat_cache: Any, feat_idx: list[int]) -> Tensor:
        x_BFHWC, index = channels_last(x_BCFHW), feat_idx[0]
        feat_idx[0] += 2
        if feat_cache[index] is None:
            inner_BFHWC = self.conv1.first(x_BFHWC, None, feat_cache, index)
            inner_BFHWC = self.conv2.first(inner_BFHWC, self.conv1.bias, feat_cache, index + 1)
            return channels_first(add_residual(inner_BFHWC, self.conv2.bias, self._shortcut(x_BFHWC)))
        products = self.conv1(self.conv1.split(x_BFHWC, None, feat_cache, index))
        inputs_4NHWC = self.conv2.split(products, self.conv1.bias, feat_cache, index + 1)
        del products  # four frames of two each, which the second convolution has no memory for
        products = self.conv2(inputs_4NHWC)
        del inputs_4NHWC
        return channels_first(merge_frames(products, self.conv2.bias, self._shortcut(x_BFHWC)))


def _pointwise(conv: Any, x_BFHWC: Tensor) -> Tensor:
    """Return a convolution of single pixels."""
    return functional.linear(x_BFHWC, conv.weight.flatten(1), conv.bias)


class FusedAttention(nn.Module):
    """Attention of all pixels of a frame, with one head and the weights of ``block``."""

    def __init__(self, block: Any) -> None:
        super().__init__()
        self.norm, self.to_qkv, self.proj = block.norm, block.to_qkv, block.proj

    def forward(self, x_BCFHW: Tensor) -> Tensor:
        x_BFHWC = channels_last(x_BCFHW)
        normed_BFHWC = torch.empty_like(x_BFHWC)
        pixel_norm(x_BFHWC, _weight_of(self.norm), normed_BFHWC, silu=False)
        rows_NLC = normed_BFHWC.flatten(0, 1).flatten(1, 2)
        qkv_NLE = functional.linear(rows_NLC, self.to_qkv.weight.flatten(1), self.to_qkv.bias)
        q, k, v = (one_NLC[:, None] for one_NLC in qkv_NLE.chunk(3, -1))
        mixed_NLC = functional.scaled_dot_product_attention(q, k, v)[:, 0]
        out_NLC = functional.linear(mixed_NLC, self.proj.weight.flatten(1))
        return channels_first(add_residual(out_NLC.view(x_BFHWC.shape), self.proj.bias, x_BFHWC))


class FusedUpsampler(nn.Module):
    """Twice the rows and columns, from the second latent frame on twice the frames, with the weights of ``block``."""

    def __init__(self, block: Any) -> None:
        super().__init__()
        conv: Any = block.resample[1]
        self.bias = conv.bias
        self.weight = nn.Parameter(in_channels_last(enlarged_weights(conv.weight.data)), requires_grad=False)
        self.resample = block.resample  # tells ``chunks`` the scale, and how far the convolution reaches
        without_weights(conv)
        self.time_conv = _to_channels_last(block.time_conv) if hasattr(block, "time_conv") else None

    def forward(self, x_BCFHW: Tensor, feat_cache: Any, feat_idx: list[int]) -> Tensor:
        x_BFHWC = channels_last(x_BCFHW)
        batch, _, height, width, channels = x_BFHWC.shape
        times = 1
        if self.time_conv is not None:
            index = feat_idx[0]
            feat_idx[0] += 1
            if feat_cache[index] is None:
                feat_cache[index] = NOT_YET
            else:
                x_BFHWC, times = self._convolve_in_time(x_BFHWC, feat_cache, index), 2
        frames_NHWC = x_BFHWC.view(batch, -1, height, width, times, channels)
        frames_NHWC = frames_NHWC.movedim(-2, 2).reshape(-1, height, width, channels)
        out_NHWC = interleave(convolve_frames(frames_NHWC, self.weight, (1, 1)), self.bias)
        return channels_first(out_NHWC.view(batch, -1, *out_NHWC.shape[1:]))

    def _convolve_in_time(self, x_BFHWC: Tensor, feat_cache: Any, index: int) -> Tensor:
        """Return both frames that each becomes, one after the other in the channels."""
        conv: Any = self.time_conv
        earlier = feat_cache[index]
        frames_BFHWC = _with_earlier(earlier if isinstance(earlier, Tensor) else None, x_BFHWC.shape, x_BFHWC)
        frames_BFHWC[:, NUM_EARLIER:] = x_BFHWC
        feat_cache[index] = frames_BFHWC[:, -NUM_EARLIER:].clone()
        return _convolve(conv, frames_BFHWC, conv.bias)


class Duplication(nn.Module):
    """Each pixel becomes a block of pixels and frames, whose values are channels, each of them several times."""

    def __init__(self, block: Any) -> None:
        super().__init__()
        self.factors, self.num_channels = (block.factor_t, block.factor_s, block.factor_s), block.out_channels
        alike = [math.prod(self.factors[place:]) <= block.repeats for place in range(len(self.factors))]
        self.different = [1 if are_alike else factor for factor, are_alike in zip(self.factors, alike, strict=True)]
        assert math.prod(self.different) * block.repeats == block.factor, (self.factors, block.repeats)

    def forward(self, x_BCFHW: Tensor, first_chunk: bool = False) -> Tensor:
        """Return the block's output, without the frames that a clip's first latent frame does not have."""
        x_BFHWC = channels_last(x_BCFHW)
        batch, frames, height, width = x_BFHWC.shape[:4]
        values = x_BFHWC.view(*x_BFHWC.shape[:4], self.num_channels, *self.different)
        pieces = values.expand(*values.shape[:-3], *self.factors).permute(0, 1, 5, 2, 6, 3, 7, 4)
        times, scale, _ = self.factors
        out_BFHWC = pieces.reshape(batch, frames * times, height * scale, width * scale, self.num_channels)
        return channels_first(out_BFHWC[:, times - 1 :] if first_chunk else out_BFHWC)
