"""Z-Image's transformer as a hand-ordered step, equal to ``ZImageTransformer2DModel.forward`` with one picture.

The text's refiner depends on no step and is run once a job. Tokens of the picture come first, as in the module.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from engines.core.model import Arguments, Precision, StepTensors, Writers
from engines.fast.blocks import NUM_VECTORS, PrePostNormBlock, PrePostNormStep, release_weights, writers_of
from engines.fast.interface import HeadExchange, StepParts
from engines.fast.kernels import Modulation, norm_modulate
from pipelines.models.block_weights import gemm, norms, stacked
from pipelines.models.z_image.text import pad_prompt, padded_length, padding_mask

IMAGE, TEXT = "image", "text"
"""The streams, in the order of their rows."""
PICTURE, PROMPT = "x.0", "cap_feats.0"
PATCH, FRAME_PATCH = 2, 1


class ZImageWeights:
    """A ``ZImageTransformer2DModel`` that sees no pictures through SigLIP. Implements ``FastWeights``."""

    latents_stream = IMAGE
    step_inputs: tuple[str, ...] = ()

    @torch.no_grad()
    def __init__(self, transformer: Any, precision: Precision) -> None:
        self.module = transformer
        self.precision = precision
        self.refiners = tuple(_block(layer, precision) for layer in self.module.noise_refiner)
        self.layers = tuple(_block(layer, precision) for layer in self.module.layers)

    @property
    def embedder(self) -> nn.Module:
        embedder: nn.Module = self.module.all_x_embedder[f"{PATCH}-{FRAME_PATCH}"]
        return embedder

    @property
    def final(self) -> Any:
        return self.module.all_final_layer[f"{PATCH}-{FRAME_PATCH}"]

    def lengths(self, arguments: Arguments) -> Mapping[str, int]:
        _, frames, height, width = arguments[PICTURE].shape
        num_image = (frames // FRAME_PATCH) * (height // PATCH) * (width // PATCH)
        return {IMAGE: padded_length(num_image), TEXT: padded_length(arguments[PROMPT].shape[0])}

    def filled_lengths(self, arguments: Arguments) -> None:
        """Return None: ``ModelSpec.pad_conditioning`` has padded prompts, as the module would."""

    def tokens(self, latents: Tensor) -> Tensor:
        patches_SE, *_ = self.module._patchify_image(latents, PATCH, FRAME_PATCH)
        return pad_prompt(patches_SE)[None]

    def prediction(self, tokens_BSD: Tensor, latents: Tensor) -> Tensor:
        size = tuple(latents.shape[1:])
        (picture,) = self.module.unpatchify(list(tokens_BSD), [size], PATCH, FRAME_PATCH)
        prediction: Tensor = picture
        return prediction

    def scheduled(self, inputs: StepTensors, timesteps_SB: Tensor) -> dict[str, Tensor]:
        """Return the blocks' vectors, multiplied by their norms' weights, and the last norm's scale."""
        module, dtype = self.module, inputs[PICTURE].dtype
        time_SE = module.t_embedder(timesteps_SB.flatten() * module.t_scale).to(dtype)
        blocks = (*module.noise_refiner, *module.layers)
        vectors_VSC = torch.cat([_vectors(block, time_SE) for block in blocks])
        scale_SC = self.final.adaLN_modulation(time_SE)
        return {"vectors_VBC": vectors_VSC.transpose(0, 1)[:, :, None].contiguous(), "scale_BC": scale_SC[:, None]}

    def writers(self) -> Writers:
        return writers_of((*self.refiners, *self.layers))

    def release(self, unless: Collection[nn.Parameter]) -> None:
        release_weights(self.module, (*self.refiners, *self.layers), unless)

    def model(self, parts: StepParts) -> FastZImage:
        return FastZImage(self, parts)


class FastZImage:
    """One step over this rank's tokens. Implements ``FastModel``."""

    def __init__(self, weights: ZImageWeights, parts: StepParts) -> None:
        self._weights, self._parts = weights, parts
        self._image_exchange = parts.exchange_within(IMAGE)

    def hoisted(self, arguments: Arguments) -> dict[str, Tensor]:
        """Return this rank's tokens of the refined text, rotary tables, and the picture's padding mask."""
        module, cut = self._weights.module, self._parts.cut
        _, (text_TD,), _, image_ids, text_ids, (image_pads_S,), (text_pads_T,) = module.patchify_and_embed(
            [arguments[PICTURE]], [arguments[PROMPT]], PATCH, FRAME_PATCH
        )
        embedded_TC, device = module.cap_embedder(text_TD), text_TD.device
        text_BTC, turns_BTP, mask, *_ = module._prepare_sequence(
            [embedded_TC], text_ids, [text_pads_T | padding_mask(text_TD)], module.cap_pad_token, None, device
        )
        for layer in module.context_refiner:
            text_BTC = layer(text_BTC, mask, turns_BTP)
        turns_SP, turns_TP = module.rope_embedder(image_ids[0]), turns_BTP[0]
        turns_LP = torch.cat((cut(turns_SP, 0, IMAGE), cut(turns_TP, 0, TEXT)))
        return {
            "text_RC": cut(text_BTC[0], 0, TEXT),
            "cos_LP": turns_LP.real.float().contiguous(),
            "sin_LP": turns_LP.imag.float().contiguous(),
            "pads_S1": cut(image_pads_S[:, None], 0, IMAGE),
        }

    def step(self, latents: Tensor, hoisted: StepTensors) -> Tensor:
        """Return ``velocity_BSD`` of this rank's image tokens from ``latents_BSD``; B is 1."""
        weights, module, text_RC = self._weights, self._weights.module, hoisted["text_RC"]
        image_RC = torch.where(hoisted["pads_S1"], module.x_pad_token, weights.embedder(latents[0]))
        num_image, num_vectors = image_RC.shape[0], NUM_VECTORS * len(weights.refiners)
        tables = hoisted["cos_LP"], hoisted["sin_LP"]
        vectors_VBC = hoisted["vectors_VBC"]
        refined_RC = self._run(
            weights.refiners, self._image_exchange, image_RC, vectors_VBC[:num_vectors],
            (tables[0][:num_image], tables[1][:num_image]),
        )  # fmt: skip
        x_RC = torch.cat((refined_RC, text_RC))
        self._run(weights.layers, self._parts.exchange, x_RC, vectors_VBC[num_vectors:], tables)
        scale_1BC = hoisted["scale_BC"][None]
        last = Modulation(shift_SBC=torch.zeros_like(scale_1BC), scale_SBC=scale_1BC, first_rows=0)
        velocity_RD: Tensor = weights.final.linear(norm_modulate(x_RC[:num_image], last))
        return velocity_RD[None]

    def _run(
        self,
        blocks: tuple[PrePostNormBlock, ...],
        exchange: HeadExchange,
        x_RC: Tensor,
        vectors_VBC: Tensor,
        tables: tuple[Tensor, Tensor],
    ) -> Tensor:
        cos_LP, sin_LP = tables
        return PrePostNormStep(
            blocks=blocks,
            exchange=exchange,
            vectors_VBC=vectors_VBC,
            cos_LP=cos_LP,
            sin_LP=sin_LP,
            batch=1,
            eps=self._weights.module.config.norm_eps,
            precision=self._weights.precision,
        ).run(x_RC)


def _block(layer: Any, precision: Precision) -> PrePostNormBlock:
    attention, mlp = layer.attention, layer.feed_forward
    return PrePostNormBlock(
        qkv=stacked((attention.to_q, attention.to_k, attention.to_v), precision),
        out=gemm(attention.to_out[0], precision),
        up=stacked((mlp.w1, mlp.w3), precision, "swiglu"),
        down=gemm(mlp.w2, precision),
        head_norms_S2D=norms(attention.norm_q, attention.norm_k)[None],
    )


def _vectors(block: Any, time_SE: Tensor) -> Tensor:
    """Return ``vectors_4SC``: factors of the norms around attention, then around the MLP."""
    scale_SC, gate_SC, mlp_scale_SC, mlp_gate_SC = block.adaLN_modulation(time_SE).chunk(4, dim=1)
    return torch.stack((
        block.attention_norm1.weight * (1 + scale_SC),
        block.attention_norm2.weight * gate_SC.tanh(),
        block.ffn_norm1.weight * (1 + mlp_scale_SC),
        block.ffn_norm2.weight * mlp_gate_SC.tanh(),
    ))  # fmt: skip
