"""FLUX blocks as a hand-ordered sequence of matrix products, fused steps and exchanges, on the module's own parameters.

Equal to ``FluxTransformer2DModel.forward``; what differs is order and grouping. Both streams lie in one tensor, text
first, tokens before batch (rows ``R = tokens x batch``), so that a block needs no concatenation. Modulation vectors,
rotary tables and the embedded text do not depend on the latents and are computed ahead.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from engines.core.fast_model import Precision, StepTensors
from engines.core.model import ModelInputs
from engines.fast.interface import StepParts
from engines.fast.kernels import HeadNorms, Rows, collected_rows, residual_norm_modulate
from pipelines.flux.fast_apart import StreamsApart
from pipelines.flux.fast_weights import FluxWeights, SingleWeights
from pipelines.flux.modulation import FluxModulation


def fast_weights(transformer: nn.Module, precision: Precision) -> FluxWeights:
    """``transformer`` (a ``FluxTransformer2DModel``) arranged for ``FastFlux``; its parameters become views."""
    return FluxWeights(transformer, precision, make_model=FastFlux)


class FastFlux:
    """One step over my tokens. Implements ``engines.fast.interface.FastModel``."""

    def __init__(self, weights: FluxWeights, parts: StepParts) -> None:
        self._weights, self._parts = weights, parts
        self._quantize = weights.precision == "fp8"

    def ahead(self, inputs: ModelInputs) -> dict[str, Tensor]:
        module = self._weights.module
        cos_LD, sin_LD = module.pos_embed(torch.cat((inputs["txt_ids"], inputs["img_ids"])))
        text_BTC = module.context_embedder(inputs["encoder_hidden_states"])
        return {
            "text_TBC": text_BTC.transpose(0, 1).contiguous(),
            "cos_LP": cos_LD[:, ::2].float().contiguous(),
            "sin_LP": sin_LD[:, ::2].float().contiguous(),
        }

    def step(self, latents: Tensor, ahead: StepTensors) -> Tensor:
        """``velocity_BSD`` of my image tokens from ``latents_BSD``."""
        module, text_TBC = self._weights.module, ahead["text_TBC"]
        image_SBC = module.x_embedder(latents.transpose(0, 1))
        x_RC = torch.cat((text_TBC, image_SBC)).flatten(0, 1)
        num_text, batch = text_TBC.shape[0], text_TBC.shape[1]
        velocity_RD: Tensor = module.proj_out(self._blocks(x_RC, ahead, num_text * batch, batch))
        return velocity_RD.view(-1, batch, velocity_RD.shape[-1]).transpose(0, 1).contiguous()

    def _blocks(self, x_RC: Tensor, ahead: StepTensors, first_rows: int, batch: int) -> Tensor:
        """All blocks and the last norm; each residual is added in the pass that norms for what comes next.

        Returns the picture's rows. Those of the text are not needed after the last attention, and left out from there.
        """
        weights = self._weights
        modulation = FluxModulation(ahead["modulation_VBC"], len(weights.duals), len(weights.singles), first_rows)
        rope = (ahead["cos_LP"], ahead["sin_LP"])
        normed = StreamsApart(weights, self._parts, modulation, rope, batch).run(x_RC)
        for index, single in enumerate(weights.singles):
            norms = HeadNorms(weight_S2D=single.head_norms_S2D, cos_LP=rope[0], sin_LP=rope[1], first_rows=first_rows)
            is_last = index + 1 == len(weights.singles)
            needed = slice(first_rows if is_last else 0, None)
            updates = self._single(normed, single, norms, batch, needed)
            gate_SBC, following = modulation.single_end(index)
            following = following.of_stream(1, updates[0].shape[0]) if is_last else following
            quantize = self._quantize and not is_last
            normed = residual_norm_modulate(x_RC[needed], updates, gate_SBC, following, quantize=quantize)
        assert isinstance(normed, Tensor)
        return normed if weights.singles else normed[first_rows:]

    def _single(
        self, normed: Rows, single: SingleWeights, norms: HeadNorms, batch: int, needed: slice
    ) -> tuple[Tensor, ...]:
        """The MLP's first product runs while queries and keys travel, its second while the result comes back.

        Every row is attended to, but only those in ``needed`` go on.
        """
        exchange, lane = self._parts.exchange, self._parts.mlp_lane
        qkv, bias_E = single.qkv.without_bias() if exchange.adds_bias else (single.qkv, None)
        if bias_E is not None:
            norms = replace(norms, bias_3HD=bias_E.view(3, -1, norms.weight_S2D.shape[-1]))
        sent = exchange.send(self._by_head(qkv(normed), norms), batch, norms)
        with lane.aside():
            hidden = single.up.activated(normed[needed])
        attended = sent.attend()
        with lane.aside(after_main=False):
            update_RC = single.out_mlp(hidden)
        result = collected_rows(attended.collect(), self._weights.precision)
        lane.join()
        return single.out_attention.add(update_RC, result[needed])

    def _by_head(self, qkv_RE: Tensor, norms: HeadNorms) -> Tensor:
        return qkv_RE.view(qkv_RE.shape[0], 3, -1, norms.weight_S2D.shape[-1])
