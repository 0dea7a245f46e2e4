"""Patches of diffusers' blocks and attention of LTX-2."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from diffusers.models.transformers.transformer_ltx2 import LTX2Attention, LTX2PerturbedAttnProcessor
from diffusers.modular_pipelines.ltx2.before_denoise import LTX2TextInputStep
from diffusers.modular_pipelines.ltx2.denoise import LTX2ConditionLoopBeforeDenoiser, LTX2Image2VideoLoopBeforeDenoiser
from diffusers.modular_pipelines.ltx2.modular_blocks_ltx2 import LTX2AutoDecoderStep
from diffusers.modular_pipelines.ltx2.modular_blocks_ltx25 import LTX25AutoDecoderStep
from torch import Tensor, nn

from pipelines.blocks.tree import replace_blocks
from pipelines.models.device_timestep import TimestepOnDevice
from pipelines.models.ltx2.text import LTX2OpenTextStep


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

    That one needs NATTEN's kernels at real sizes, and draws noise while it decodes.
    """
    for name, block in blocks.sub_blocks.items():
        if type(block) is LTX25AutoDecoderStep:
            blocks.sub_blocks[name] = LTX2AutoDecoderStep()


class WholePerturbation(LTX2PerturbedAttnProcessor):  # type: ignore[misc]
    """Leaves out the attention of a whole batch, which the presence of a mask says.

    Diffusers reads that from the mask's values, which a compiled block cannot. Its pipelines give no mask of their own:
    the transformer makes one of zeros for the pass of guidance that leaves attention out.
    """

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        query_rotary_emb: tuple[Tensor, Tensor] | None = None,
        key_rotary_emb: tuple[Tensor, Tensor] | None = None,
        perturbation_mask: Tensor | None = None,
        all_perturbed: Any = None,
    ) -> Tensor:
        """Attend. The names are those that ``LTX2Attention`` looks for."""
        out_BLC: Tensor = super().__call__(
            attn,
            hidden_states,
            encoder_hidden_states,
            attention_mask,
            query_rotary_emb,
            key_rotary_emb,
            all_perturbed=perturbation_mask is not None,
        )
        return out_BLC


def perturb_whole(module: nn.Module) -> None:
    """Replace the processors of attention that passes of guidance leave out."""
    for part in module.modules():
        if isinstance(part, LTX2Attention) and type(part.processor) is LTX2PerturbedAttnProcessor:
            part.set_processor(WholePerturbation())
