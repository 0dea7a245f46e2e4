"""Decoders of pictures that are known layer by layer, so that they can be compiled whole, or walked through in rows."""

from __future__ import annotations

from typing import Any

from diffusers.models.attention_processor import Attention, AttnProcessor2_0
from diffusers.models.autoencoders.vae import Decoder
from diffusers.models.resnet import ResnetBlock2D
from diffusers.models.unets.unet_2d_blocks import UNetMidBlock2D, UpDecoderBlock2D
from diffusers.models.upsampling import Upsample2D
from torch import nn


def check_decoder(vae: Any, key: str) -> None:
    """ValueError, which names the ``key`` that asked for it, if the decoder of ``vae`` is none that is known here."""
    if not is_known(getattr(vae, "decoder", None)):
        raise ValueError(
            f"decoder.{key} is for auto-encoders of pictures with group norms, such as AutoencoderKL, and this model's "
            f"is {type(vae).__name__}: leave it out, and decoder.compile and decoder.memory_gib alike"
        )


def is_known(decoder: Any) -> bool:
    """Returns whether all after the middle of ``decoder`` is known here."""
    blocks = list(decoder.up_blocks) if type(decoder) is Decoder else []
    resnets = [resnet for block in blocks for resnet in getattr(block, "resnets", ())]
    samplers = [sampler for block in blocks for sampler in getattr(block, "upsamplers", None) or ()]
    return (
        bool(blocks)
        and all(type(block) is UpDecoderBlock2D for block in blocks)
        and all(map(_is_known_resnet, resnets))
        and all(map(_is_known_sampler, samplers))
        and isinstance(decoder.conv_norm_out, nn.GroupNorm)
    )


def is_known_middle(middle: Any) -> bool:
    """Returns whether the middle block of a decoder is known here as well."""
    return (
        type(middle) is UNetMidBlock2D
        and all(map(_is_known_resnet, middle.resnets))
        and all(attention is None or _is_known_attention(attention) for attention in middle.attentions)
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


def _is_known_attention(attention: Any) -> bool:
    """Of each pixel to all others, once, with what it came from added."""
    if type(attention) is not Attention or type(attention.processor) is not AttnProcessor2_0:
        return False
    others = (attention.spatial_norm, attention.norm_q, attention.norm_k, attention.norm_cross)
    is_plain = all(other is None for other in others) and not attention.is_causal
    return is_plain and attention.residual_connection and isinstance(attention.group_norm, nn.GroupNorm)
