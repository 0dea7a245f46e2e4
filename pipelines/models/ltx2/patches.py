"""Patches of diffusers' blocks and attention of LTX-2."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from diffusers.models.transformers.transformer_ltx2 import (
    LTX2AdaLayerNormSingle,
    LTX2AudioVideoAttnProcessor,
    LTX2PerturbedAttnProcessor,
)
from diffusers.modular_pipelines.ltx2.before_denoise import LTX2TextInputStep
from diffusers.modular_pipelines.ltx2.denoise import LTX2ConditionLoopBeforeDenoiser, LTX2Image2VideoLoopBeforeDenoiser
from diffusers.modular_pipelines.ltx2.modular_blocks_ltx2 import LTX2AutoDecoderStep
from diffusers.modular_pipelines.ltx2.modular_blocks_ltx25 import LTX25AutoDecoderStep
from torch import Tensor, nn

from engines.fast.records import RotaryTables
from pipelines.blocks import attention
from pipelines.blocks.tree import replace_blocks
from pipelines.models.device_timestep import TimestepOnDevice
from pipelines.models.ltx.patches import CosSin, neighbours
from pipelines.models.ltx2.text import LTX2OpenTextStep, read_keys
from pipelines.models.two_timesteps import TwoTimesteps, replace_class


class LTX2PictureLoopBeforeDenoiser(TimestepOnDevice, LTX2Image2VideoLoopBeforeDenoiser):  # type: ignore[misc]
    """Makes a timestep a token of a clip that begins with a picture."""


class LTX2KeyframeLoopBeforeDenoiser(TimestepOnDevice, LTX2ConditionLoopBeforeDenoiser):  # type: ignore[misc]
    """Makes a timestep a token of a clip with frames that are given."""


def patch_blocks(blocks: Any) -> None:
    replace_blocks(blocks, LTX2Image2VideoLoopBeforeDenoiser, LTX2PictureLoopBeforeDenoiser)
    replace_blocks(blocks, LTX2ConditionLoopBeforeDenoiser, LTX2KeyframeLoopBeforeDenoiser)
    replace_blocks(blocks, LTX2TextInputStep, LTX2OpenTextStep)


def decode_by_vae(blocks: Any, _path: Path) -> None:
    """Decode LTX-2.5 with the auto-encoder, as diffusers suggests, in place of its diffusion decoder.

    The diffusion decoder needs NATTEN's kernels at real sizes, and draws noise while it decodes.
    """
    for name, block in blocks.sub_blocks.items():
        if type(block) is LTX25AutoDecoderStep:
            blocks.sub_blocks[name] = LTX2AutoDecoderStep()


class LTX2FusedProcessor(LTX2AudioVideoAttnProcessor):  # type: ignore[misc]
    """Normalises and rotates queries and keys in one pass over them, where that is possible."""

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        query_rotary_emb: CosSin | None = None,
        key_rotary_emb: CosSin | None = None,
    ) -> Tensor:
        """Attend. The names are those of diffusers."""
        processor, attn, *tables = _rotated(
            self, attn, hidden_states, encoder_hidden_states, query_rotary_emb, key_rotary_emb
        )
        out_BLC: Tensor = LTX2AudioVideoAttnProcessor.__call__(
            processor, attn, hidden_states, encoder_hidden_states, attention_mask, *tables
        )
        return out_BLC


class WholePerturbation(LTX2PerturbedAttnProcessor):  # type: ignore[misc]
    """Leaves out the attention of a whole batch, which the presence of a mask says. Else it is ``LTX2FusedProcessor``.

    Diffusers reads that from the mask's values, which a compiled block cannot. Its pipelines give no mask of their own:
    the transformer makes one of zeros for the pass of guidance that leaves attention out.
    """

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        query_rotary_emb: CosSin | None = None,
        key_rotary_emb: CosSin | None = None,
        perturbation_mask: Tensor | None = None,
        all_perturbed: Any = None,
    ) -> Tensor:
        """Attend. The names are those that ``LTX2Attention`` looks for."""
        processor, tables = self, [query_rotary_emb, key_rotary_emb]
        if perturbation_mask is None:
            processor, attn, *tables = _rotated(
                self, attn, hidden_states, encoder_hidden_states, query_rotary_emb, key_rotary_emb
            )
        out_BLC: Tensor = LTX2PerturbedAttnProcessor.__call__(
            processor,
            attn,
            hidden_states,
            encoder_hidden_states,
            attention_mask,
            *tables,
            all_perturbed=perturbation_mask is not None,
        )
        return out_BLC


def _rotated(
    processor: Any,
    attn: Any,
    x_BLC: Tensor,
    context_BMC: Tensor | None,
    q_tables: CosSin | None,
    k_tables: CosSin | None,
) -> tuple[Any, Any, CosSin | None, CosSin | None]:
    """Return what to attend by: ``processor`` and ``attn`` with its tables, or, after the fused pass, stand-ins."""
    if q_tables is None or not attention.can_rotate(attn, x_BLC):
        return processor, attn, q_tables, k_tables
    if context_BMC is None or k_tables is None:
        assert (context_BMC is None) == (k_tables is None)
        return *attention.rotate_and_send(processor, attn, x_BLC, _tables(attn, q_tables)), None, None
    q_BLHD = attention.rotated(attn.to_q, attn.norm_q, x_BLC, _tables(attn, q_tables), attn.head_dim)
    k_BMHD = attention.rotated(attn.to_k, attn.norm_k, context_BMC, _tables(attn, k_tables), attn.head_dim)
    return processor, attention.PrecomputedAttention(attn, q=q_BLHD.flatten(2), k=k_BMHD.flatten(2)), None, None


def _tables(attn: Any, tables: CosSin) -> RotaryTables:
    """Return the operation's tables from those by head, ``(B, H, L, P)`` each, or from those of LTX-Video."""
    if attn.rope_type != "split":
        return neighbours(attn, tables)
    cos_BLHP, sin_BLHP = (x_BHLP.transpose(1, 2) for x_BHLP in tables)
    return RotaryTables(cos_BLHP, sin_BLHP, interleaved=False)


class LTX2TwoTimesteps(TwoTimesteps, LTX2AdaLayerNormSingle):  # type: ignore[misc]
    """Modulation of a clip with given frames."""


def replace_processors(module: nn.Module) -> None:
    replace_class(module, "time_embed", LTX2TwoTimesteps)
    read_keys(module)
    ours = {LTX2AudioVideoAttnProcessor: LTX2FusedProcessor, LTX2PerturbedAttnProcessor: WholePerturbation}
    attention.replace_processors(module, ours)
