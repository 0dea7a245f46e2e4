"""FLUX.3's transformer as a hand-ordered step, equal to ``Flux3Transformer2DModel.forward``.

Each stream runs through its own blocks, then all through the joint ones. Nothing has a bias, attention and the gated
MLP (SwiGLU) of a block are parallel, and all blocks of a kind share the modulation of each stream. Text and reference
pictures have no noise: their time is 0.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from engines.core.model import LATENTS, Arguments, ModelInputs, Precision, StepTensors
from engines.fast.blocks import Blocks, SingleBlock
from engines.fast.blocks_step import SinglesStep
from engines.fast.interface import SideStream, StepParts
from engines.fast.kernels import Modulation
from pipelines.models.block_weights import LAST_VECTORS, SINGLE_VECTORS, gemm, norms, stacked, vectors_of
from pipelines.models.flux3.spec import IMAGE, INPUTS, SEEN, TEXT
from pipelines.models.mmdit import PROMPT, MMDiTWeights, pair_rotation

MODES = {TEXT: "txt", IMAGE: "image", SEEN: "image_cond"}
"""The streams in the order of their rows, by the name of their layers."""
TARGET, PICTURES = "target_timestep", "image_cond_hidden_states"
WHOLE_TEXT = "whole text"
"""Key of text that each rank has whole; its share of longer ones has the name of their stream."""
MAX_WHOLE_TEXT = 512
"""Up to this many tokens of text run through their own blocks whole on each rank, beside the picture's. Their GEMMs
mostly read weights, so a share of the rows would save less than its exchanges take."""


class Flux3Weights(MMDiTWeights):
    """A ``Flux3Transformer2DModel``, whose query, key and value weights become views of stacked ones."""

    step_inputs = (TARGET,)

    @torch.no_grad()
    def __init__(self, transformer: Any, precision: Precision) -> None:
        lists = {MODES[TEXT]: transformer.txt_mode_blocks, **transformer.mode_blocks}
        self.apart = {stream: _singles(lists[mode], precision) for stream, mode in MODES.items()}
        self.joint = _singles(transformer.single_transformer_blocks, precision)
        singles = (*(block for blocks in self.apart.values() for block in blocks), *self.joint)
        super().__init__(transformer, Blocks(duals=(), singles=singles, precision=precision))

    def image(self, latents_SBD: Tensor) -> Tensor:
        image_SBC: Tensor = self.module.x_embedders["image"](latents_SBD)
        return image_SBC

    def rotations(self, arguments: Arguments) -> tuple[Tensor, ...]:
        ids = (arguments[name] for _, (name, _) in (INPUTS[stream] for stream in MODES) if name in arguments)
        return tuple(pair_rotation(self.module.pos_embed(each)) for each in ids)

    def embedded_times(self, inputs: ModelInputs, timesteps_SB: Tensor) -> Tensor:
        """Return the image's embedded time and that of the other streams side by side: (S, B, 2 C)."""
        module, latents = self.module, inputs[LATENTS]
        times_SB = timesteps_SB.to(latents.dtype).expand(-1, latents.shape[0])
        image_SBC, zero_SBC = (_embedded(module, "", x_SB) for x_SB in (times_SB, torch.zeros_like(times_SB)))
        if TARGET in inputs:  # each step leads to the time of the next one, the last step to 0
            following_SB = torch.cat((times_SB[1:], torch.zeros_like(times_SB[:1])))
            targets_SB = inputs[TARGET][None] if len(times_SB) == 1 else following_SB
            target_SBC = _embedded(module, "target_", targets_SB.to(latents.dtype).expand(times_SB.shape))
            image_SBC, zero_SBC = image_SBC + target_SBC, zero_SBC + target_SBC
        return torch.cat((image_SBC, zero_SBC), dim=-1)

    def vectors(self, temb_XC: Tensor) -> Tensor:
        """Return shift, scale and gate of own and of joint blocks, each for all streams; then the last norm's."""
        image_XC, zero_XC = functional.silu(temb_XC).chunk(2, dim=-1)
        active = {TEXT: zero_XC, IMAGE: image_XC, SEEN: zero_XC}
        parts = [
            torch.stack([vectors_of(heads[mode].linear, active[stream]) for stream, mode in MODES.items()], dim=1)
            for heads in (self.module.early_stream_modulations, self.module.single_stream_modulations)
        ]
        return torch.cat((*(part.flatten(0, 1) for part in parts), vectors_of(self.module.norm_out.linear, image_XC)))

    def model(self, parts: StepParts) -> FastFlux3:
        return FastFlux3(self, parts)


class FastFlux3:
    """One step over this rank's tokens. Implements ``FastModel``."""

    def __init__(self, weights: Flux3Weights, parts: StepParts) -> None:
        self._weights, self._parts = weights, parts
        self._within = {stream: replace(parts, exchange=parts.exchange_within(stream)) for stream in MODES}
        inline = SideStream(torch.device("cpu"), "inline")  # the context's stream has a side stream's work already
        self._aside = replace(parts, exchange=parts.alone, mlp_stream=inline)

    def hoisted(self, arguments: Arguments) -> dict[str, Tensor]:
        weights, cut, prompt_BTD = self._weights, self._parts.cut, arguments[PROMPT]
        turns = dict(zip(MODES, weights.rotations(arguments), strict=False))
        own_turns = {stream: cut(turns_2LP, 1, stream) for stream, turns_2LP in turns.items()}
        is_whole = prompt_BTD.shape[1] <= MAX_WHOLE_TEXT
        text_BTC = weights.text(prompt_BTD if is_whole else cut(prompt_BTD, 1, TEXT))
        hoisted = {
            WHOLE_TEXT if is_whole else TEXT: text_BTC.transpose(0, 1).contiguous(),
            "turns of text": (turns if is_whole else own_turns)[TEXT],
            "turns": torch.cat([*own_turns.values()], dim=1),
        }
        if PICTURES in arguments:
            seen_BLC = weights.module.x_embedders[MODES[SEEN]](cut(arguments[PICTURES], 1, SEEN))
            hoisted[SEEN] = seen_BLC.transpose(0, 1).contiguous()
        return hoisted

    def step(self, latents: Tensor, hoisted: StepTensors) -> Tensor:
        """Return ``velocity_BSD`` of this rank's image tokens from ``latents_BSD``."""
        vectors_VBC, turns_2LP = hoisted["modulation_VBC"], hoisted["turns"]
        own, joint = vectors_VBC[:-LAST_VECTORS].view(2, SINGLE_VECTORS, len(MODES), *vectors_VBC.shape[1:])
        text_TBC = self._text(hoisted, own)
        image_SBC = self._weights.image(latents.transpose(0, 1)).contiguous()
        num_text, num_image = text_TBC.shape[0], image_SBC.shape[0]
        after_text_2LP = turns_2LP[:, num_text:]
        streams = [text_TBC, self._apart(IMAGE, image_SBC, own, after_text_2LP[:, :num_image])]
        if SEEN in hoisted:
            streams.append(self._apart(SEEN, hoisted[SEEN].clone(), own, after_text_2LP[:, num_image:]))
        if WHOLE_TEXT in hoisted:
            self._parts.context_stream.wait()
        x_LBC = torch.cat(streams)
        normed_RC = self._joint(x_LBC, slice(num_text, num_text + num_image), joint, vectors_VBC, turns_2LP)
        velocity_RD: Tensor = self._weights.module.proj_out(normed_RC)
        return velocity_RD.view(num_image, -1, velocity_RD.shape[-1]).transpose(0, 1).contiguous()

    def _text(self, hoisted: StepTensors, vectors_3NBC: Tensor) -> Tensor:
        """Return this rank's tokens of text after its own blocks: ``text_TBC``, to be read after the context stream."""
        turns_2TP = hoisted["turns of text"]
        if WHOLE_TEXT not in hoisted:
            return self._apart(TEXT, hoisted[TEXT].clone(), vectors_3NBC, turns_2TP)
        with self._parts.context_stream.run():
            text_TBC = self._apart(TEXT, hoisted[WHOLE_TEXT].clone(), vectors_3NBC, turns_2TP, self._aside)
            return self._parts.cut(text_TBC, 0, TEXT)

    def _apart(
        self, stream: str, x_LBC: Tensor, vectors_3NBC: Tensor, turns_2LP: Tensor, parts: StepParts | None = None
    ) -> Tensor:
        """Run the blocks of a stream on ``x_LBC`` in place, and return it; the norm after the last one is unused."""
        number = [*MODES].index(stream)
        shift_1BC, scale_1BC, gate_1BC = vectors_3NBC[:, number : number + 1]
        SinglesStep(
            blocks=self._weights.apart[stream],
            precision=self._weights.blocks.precision,
            parts=parts or self._within[stream],
            modulation=Modulation(shift_SBC=shift_1BC, scale_SBC=scale_1BC, first_rows=0),
            gate_SBC=gate_1BC,
            turns_2LP=turns_2LP,
            batch=x_LBC.shape[1],
        ).run(x_LBC.view(-1, x_LBC.shape[-1]))
        return x_LBC

    def _joint(
        self, x_LBC: Tensor, image: slice, vectors_3NBC: Tensor, vectors_VBC: Tensor, turns_2LP: Tensor
    ) -> Tensor:
        """Return the rows of the tokens ``image`` after the joint blocks and the last norm."""
        length, batch, _ = x_LBC.shape
        start, stop, end = image.start * batch, image.stop * batch, length * batch
        shift_NBC, scale_NBC, gate_NBC = vectors_3NBC
        scale_1BC, shift_1BC = vectors_VBC[-LAST_VECTORS:, None]
        last = Modulation(shift_SBC=shift_1BC, scale_SBC=scale_1BC, first_rows=0)
        number = [*MODES].index(IMAGE)
        return SinglesStep(
            blocks=self._weights.joint,
            precision=self._weights.blocks.precision,
            parts=self._parts,
            modulation=Modulation(shift_SBC=shift_NBC, scale_SBC=scale_NBC, first_rows=start, last_rows=end - stop),
            gate_SBC=gate_NBC,
            last=(gate_NBC[number : number + 1], last),
            needed=slice(start, stop),
            turns_2LP=turns_2LP,
            batch=batch,
        ).run(x_LBC.view(-1, x_LBC.shape[-1]))


def _embedded(module: Any, kind: str, times_SB: Tensor) -> Tensor:
    """Return the times as the module's embedder of this ``kind`` has them: (S, B, C)."""
    embedder = module.get_submodule(f"{kind}timestep_embedder")
    temb_XC: Tensor = embedder(module.time_proj(times_SB.flatten() * 1000).to(times_SB.dtype))
    return temb_XC.view(*times_SB.shape, -1)


def _singles(blocks: Iterable[Any], precision: Precision) -> tuple[SingleBlock, ...]:
    return tuple(_single(block.attn, block.ff, precision) for block in blocks)


def _single(attn: Any, mlp: Any, precision: Precision) -> SingleBlock:
    return SingleBlock(
        qkv=stacked((attn.to_q, attn.to_k, attn.to_v), precision),
        up=gemm(mlp.linear_in, precision, "swiglu"),
        out_mlp=gemm(mlp.linear_out, precision),
        out_attention=gemm(attn.to_out[0], precision),
        head_norms_S2D=norms(attn.norm_q, attn.norm_k)[None],
    )
