"""Wan Animate 2's transformer: keys of the driving clip are computed once a job, and no tokens are packed or masked.

Tokens of the result attend to each other, and those of each latent frame also to the same frame of the driving clip.
The first is attention over all of a team's tokens. The second is local: every rank has the driving clip's keys whole.
Both are merged by their log-sum-exps. So that every rank has tokens of all frames alike, they are ordered by place
first, then by frame.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from diffusers.models.transformers.transformer_wan_animate_2 import WanAnimate2Attention
from torch import Tensor, nn
from torch.nn import functional

from engines.core.attention import Kernel
from engines.core.model import ModelInputs, device_of, dtype_of
from engines.core.tensors import is_exporting
from engines.parallel.copies import is_weightless
from engines.parallel.local_attention import local_kernel
from engines.parallel.strategies import merge
from pipelines.models.wan.attention import rotated_queries_and_keys
from pipelines.models.wan_animate2.call import (
    CONDITION,
    DRIVING,
    DRIVING_PICTURE,
    DRIVING_TEXT,
    LATENTS,
    NEGATIVE,
    PICTURE,
    SKIPPED_BLOCK,
    TEXT,
    TIMESTEP,
)

KEYS_VALUES = "driving_keys_values"
"""An input beside the module's own: (blocks, keys and values, B, F, P, H, D), keys rotated. F and P are the driving
clip's latent frames and the places of each."""
COS, SIN, FRAMES = "rotary_cos", "rotary_sin", "token_frames"
"""Rotation of the result's tokens, (1, L, 1, D) each, and their frames, (L,)."""
CACHED, EXTRACT = "cached", "extract"
"""Diffusers' names of the passes over the result and over the driving clip."""


class PatchGrid(NamedTuple):
    """Patches of latents."""

    frames: int
    rows: int
    columns: int

    @property
    def places(self) -> int:
        return self.rows * self.columns


class AnimateProcessor:
    """Self-attention of either pass: the result's tokens by ``kernel``, the driving clip's by ``local``."""

    def __init__(self, kernel: Kernel, local: Kernel) -> None:
        self.kernel, self.local = kernel, local

    def __call__(
        self,
        attn: WanAnimate2Attention,
        hidden_states: Tensor,
        rotary_emb: tuple[Tensor, Tensor],
        grid_sizes: Tensor | None,
        kv_cache: Tensor,
        kv_cache_mode: str,
        **unused: Any,
    ) -> Tensor:
        """Attend. ``kv_cache`` is ``driving_2BFPHD``, which the pass over the driving clip fills.

        ``grid_sizes`` are the frames of the tokens.
        """
        q_BLHD, k_BLHD = rotated_queries_and_keys(attn, hidden_states, rotary_emb)
        v_BLHD = torch.unflatten(attn.to_v(hidden_states), 2, (attn.heads, -1))
        if kv_cache_mode == EXTRACT:
            kv_cache.copy_(torch.stack((k_BLHD, v_BLHD)).view_as(kv_cache))
            out_BLHD, _ = self.local(q_BLHD, k_BLHD, v_BLHD)
        else:
            assert grid_sizes is not None
            own = self.kernel(q_BLHD, k_BLHD, v_BLHD)
            driven = _attend_driving(self.local, q_BLHD, kv_cache, grid_sizes)
            out_BLHD = merge(*own, *driven, masked=True)[0].to(q_BLHD.dtype)
        out_BLC: Tensor = attn.to_out[1](attn.to_out[0](out_BLHD.flatten(2)))
        return out_BLC


def _attend_driving(kernel: Kernel, q_BLHD: Tensor, driving_2BFPHD: Tensor, frames_L: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``out_BLHD`` and ``lse_BHL`` of attention to the same frame of the driving clip.

    Frame 0 of the result, the picture's, has none. Tokens that begin amid the frames of a place, or end there, are
    filled up to whole places.
    """
    num_frames, length = driving_2BFPHD.shape[2] + 1, q_BLHD.shape[1]
    is_whole = length % num_frames == 0  # then the chunk of each rank begins with frame 0
    if not is_whole:
        places = torch.arange((length // num_frames + 2) * num_frames, device=q_BLHD.device)
        q_BLHD = q_BLHD.index_select(1, (places - frames_L[0]).clamp(0, length - 1))
    q_BPFHD = torch.unflatten(q_BLHD, 1, (-1, num_frames))[:, :, 1:]
    batch, num_places, _, heads, dim = q_BPFHD.shape
    q_NPHD = q_BPFHD.transpose(1, 2).reshape(-1, num_places, heads, dim)
    out_NPHD, lse_NHP = kernel(q_NPHD, *driving_2BFPHD.flatten(1, 2).unbind(0))
    out_BPFHD = torch.unflatten(out_NPHD, 0, (batch, -1)).transpose(1, 2)
    lse_BHPF = torch.unflatten(lse_NHP, 0, (batch, -1)).permute(0, 2, 3, 1)
    out_BLHD = functional.pad(out_BPFHD, (0, 0, 0, 0, 1, 0)).flatten(1, 2)
    lse_BHL = functional.pad(lse_BHPF, (1, 0), value=-math.inf).flatten(2)
    if not is_whole:
        tokens = torch.arange(length, device=q_BLHD.device) + frames_L[0]
        out_BLHD, lse_BHL = out_BLHD.index_select(1, tokens), lse_BHL.index_select(2, tokens)
    return out_BLHD, lse_BHL


def set_kernel(module: nn.Module, kernel: Kernel) -> None:
    """Make self-attention inside ``module`` call ``kernel``; then call ``module`` through ``forward``."""
    processor: Any = AnimateProcessor(kernel, local_kernel(device_of(module), dtype_of(module)))
    for attention in module.modules():
        if isinstance(attention, WanAnimate2Attention) and not attention.is_cross_attention:
            attention.set_processor(processor)


def forward(module: Any, call: Mapping[str, Any]) -> Tensor:
    """Return ``velocity_BCFHW``, the picture's frame included."""
    made = {name: call[name] for name in (KEYS_VALUES, COS, SIN, FRAMES) if name in call}
    made = made or hoisted(module, call)
    x_BCFHW = module.patch_embedding(torch.cat((call[LATENTS], call[CONDITION]), dim=1))
    sizes = PatchGrid(*x_BCFHW.shape[2:])
    temb_BC, modulation_B6C = _times(module, call[TIMESTEP])
    shared = {
        "temb": modulation_B6C,
        "encoder_hidden_states": _text(module, call[TEXT]),
        "encoder_hidden_states_image": _picture(module, call.get(PICTURE)),
        "rotary_emb": (made[COS], made[SIN]),
        "grid_sizes": made[FRAMES],
        "kv_cache_mode": CACHED,
    }
    x_BLC = x_BCFHW.permute(0, 3, 4, 2, 1).flatten(1, 3)
    for number, (block, driving_2BFPHD) in enumerate(zip(module.blocks, made[KEYS_VALUES], strict=True)):
        if not (call[NEGATIVE] and number == SKIPPED_BLOCK):
            x_BLC = block(x_BLC, kv_cache=driving_2BFPHD, **shared)
    patches_BLC = module.head(x_BLC, temb_BC)
    return _from_patches(patches_BLC, sizes, module.config.patch_size).float()


def hoisted(module: Any, inputs: ModelInputs) -> dict[str, Tensor]:
    """Return the driving clip's keys and values. The module must be whole.

    Beside them the rotation of the result's tokens, and their frames. A latent frame takes 820 kB a place in the
    published model in bfloat16.
    """
    if inputs[DRIVING].is_meta or is_weightless(module):  # costs once a job are not counted
        return _blank(module, inputs)
    if is_exporting():
        raise ValueError(
            "this model passes over the driving clip before its first step, which no TensorRT engine does: use "
            "engine: torch"
        )
    x_BCFHW = module.patch_embedding(inputs[DRIVING])
    sizes = PatchGrid(*x_BCFHW.shape[2:])
    rotation = _driving_rotation(module, sizes)
    _, modulation_B6C = _times(module, torch.ones(len(x_BCFHW), device=x_BCFHW.device))
    shared = {
        "temb": modulation_B6C,
        "encoder_hidden_states": _text(module, inputs[DRIVING_TEXT]),
        "encoder_hidden_states_image": _picture(module, inputs.get(DRIVING_PICTURE)),
        "rotary_emb": rotation,
        "grid_sizes": None,
        "kv_cache_mode": EXTRACT,
    }
    x_BLC = x_BCFHW.flatten(2).mT
    keys_values = _empty_keys_values(module, x_BCFHW, sizes)
    for block, driving_2BFPHD in zip(module.blocks, keys_values, strict=True):
        x_BLC = block(x_BLC, kv_cache=driving_2BFPHD, **shared)
    return {KEYS_VALUES: keys_values, **_own_tables(module, sizes._replace(frames=sizes.frames + 1), x_BLC.device)}


def _times(module: Any, timestep_B: Tensor) -> tuple[Tensor, Tensor]:
    """Return the embedding of the timestep, and the modulation of blocks, ``(B, 6, C)``."""
    dtype = next(module.time_embedding.parameters()).dtype
    temb_BC: Tensor = module.time_embedding(module.timesteps_proj(timestep_B).to(dtype))
    return temb_BC, module.time_projection(temb_BC).unflatten(1, (6, module.config.dim))


def _text(module: Any, text_BTC: Tensor) -> Tensor:
    """Return the embedded prompt, filled up to the length that the transformer attends to."""
    padded_BTC = functional.pad(text_BTC, (0, 0, 0, module.config.text_len - text_BTC.shape[1]))
    embedded_BTC: Tensor = module.text_embedding(padded_BTC)
    return embedded_BTC


def _picture(module: Any, picture_BTC: Tensor | None) -> Tensor | None:
    return module.img_emb(picture_BTC) if module.config.use_img_emb else None


def _from_patches(patches_BLC: Tensor, sizes: PatchGrid, patch_size: tuple[int, int, int]) -> Tensor:
    frames, rows, columns = patch_size
    x: Tensor = torch.unflatten(patches_BLC, 1, (sizes.rows, sizes.columns, sizes.frames))
    x = torch.unflatten(x, -1, (frames, rows, columns, -1))
    x = x.permute(0, 7, 3, 4, 1, 5, 2, 6)  # batch, channels, then frames, rows and columns, each with its patch's
    return x.flatten(6, 7).flatten(4, 5).flatten(2, 3)


def _driving_rotation(module: Any, sizes: PatchGrid) -> tuple[Tensor, Tensor]:
    """Return the rotation of the driving clip's tokens, beside those of the result: -1 puts them after its grid."""
    config = module.config
    given = (config.refer_offset_t, config.refer_offset_h, config.refer_offset_w)
    offsets = tuple(size if offset < 0 else offset for offset, size in zip(given, sizes, strict=True))
    angles_FHWD = _angles(module, sizes, offsets, config.refer_stride)
    return _cos_sin(angles_FHWD.flatten(0, 2), device_of(module))


def _own_tables(module: Any, sizes: PatchGrid, device: torch.device) -> dict[str, Tensor]:
    angles_FHWD = _angles(module, sizes, (0, 0, 0), 1)
    cos, sin = _cos_sin(angles_FHWD.permute(1, 2, 0, 3).flatten(0, 2), device)
    return {COS: cos, SIN: sin, FRAMES: torch.arange(sizes.frames).repeat(sizes.places).to(device)}


def _angles(module: Any, sizes: PatchGrid, offsets: tuple[int, ...], stride: int) -> Tensor:
    """Return the angles of rotation (Su et al. 2021, arXiv:2104.09864), by axis, in float64 on the CPU."""
    head_dim = module.config.dim // module.config.num_heads
    side = 2 * (head_dim // 6)
    parts = []
    for axis, (size, offset, dim) in enumerate(zip(sizes, offsets, (head_dim - 2 * side, side, side), strict=True)):
        places = torch.arange(size, dtype=torch.float64) * (stride if axis == 0 else 1) + offset
        rates = 1.0 / torch.pow(10000.0, torch.arange(0, dim, 2, dtype=torch.float64) / dim)
        shape = [1, 1, 1, -1]
        shape[axis] = size
        parts.append(torch.outer(places, rates).view(shape).expand(*sizes, -1))
    return torch.cat(parts, dim=-1)


def _cos_sin(angles_LD: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return ``cos_1L1D`` and ``sin_1L1D`` in float32, every value twice."""
    doubled_1L1D = angles_LD.repeat_interleave(2, dim=-1)[None, :, None]
    return doubled_1L1D.cos().float().to(device), doubled_1L1D.sin().float().to(device)


def _empty_keys_values(module: Any, like: Tensor, sizes: PatchGrid) -> Tensor:
    attn = module.blocks[0].self_attn
    shape = (sizes.frames, sizes.places, attn.heads, attn.to_q.out_features // attn.heads)
    return like.new_empty(len(module.blocks), 2, like.shape[0], *shape)


def _blank(module: Any, inputs: ModelInputs) -> dict[str, Tensor]:
    x, (_, rows, columns) = inputs[DRIVING], module.config.patch_size
    sizes = PatchGrid(x.shape[2], x.shape[3] // rows, x.shape[4] // columns)
    length, dim = (sizes.frames + 1) * sizes.places, module.config.dim // module.config.num_heads
    table = x.new_empty(1, length, 1, dim, dtype=torch.float32)
    frames = x.new_empty(length, dtype=torch.int64)
    return {KEYS_VALUES: _empty_keys_values(module, x, sizes), COS: table, SIN: table.clone(), FRAMES: frames}
