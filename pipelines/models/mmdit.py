"""Hand-ordered steps of transformers with a text and an image stream, on the module's own parameters.

Each equals its module's ``forward`` but for order and grouping. Modulation vectors, rotary tables and the embedded
text do not depend on the latents and are hoisted out of the steps.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from engines.core.model import KEPT, LATENTS, Arguments, FastModel, ModelInputs, StepTensors, Writers
from engines.fast.blocks import Blocks, release_weights, writers_of
from engines.fast.blocks_step import BlocksStep
from engines.fast.interface import StepParts
from pipelines.models.block_weights import BlockVectors

TEXT, IMAGE = "text", "image"
"""The streams of the shard plans, in the order of their rows."""
PROMPT = "encoder_hidden_states"


class MMDiTWeights(ABC):
    """A transformer arranged for ``FastMMDiT``; the module keeps working. Implements ``FastWeights``."""

    shares_vectors = False
    """True if all blocks of a kind have the same modulation."""
    window: int | None = None
    """Prompts may be padded to a multiple of this many tokens; None if all have one length."""
    latents_stream = IMAGE
    step_inputs: tuple[str, ...] = ()

    def __init__(self, module: Any, blocks: Blocks) -> None:
        self.module, self.blocks = module, blocks

    def lengths(self, arguments: Arguments) -> Mapping[str, int] | None:
        return None

    def filled_lengths(self, arguments: Arguments) -> Mapping[str, int] | None:
        if self.window is None:
            return None
        num_text, num_image = (arguments[name].shape[1] for name in (PROMPT, LATENTS))
        return {TEXT: num_text + -num_text % self.window, IMAGE: num_image}

    def tokens(self, latents: Tensor) -> Tensor:
        return latents

    def prediction(self, tokens_BSD: Tensor, latents: Tensor) -> Tensor:
        return tokens_BSD

    def text(self, text_BTD: Tensor) -> Tensor:
        """Return the embedded prompt, (B, T, C)."""
        text_BTC: Tensor = self.module.context_embedder(text_BTD)
        return text_BTC

    def image(self, latents_SBD: Tensor) -> Tensor:
        """Return the embedded latents, (S, B, C)."""
        image_SBC: Tensor = self.module.x_embedder(latents_SBD)
        return image_SBC

    @abstractmethod
    def rotations(self, arguments: Arguments) -> tuple[Tensor, ...]:
        """Return cosines and sines of each stream's tokens, text first: each (2, tokens, D / 2), float32."""

    @abstractmethod
    def embedded_times(self, inputs: ModelInputs, timesteps_SB: Tensor) -> Tensor:
        """Return ``temb_SBC``: each timestep, embedded with other modulating inputs as in the module's ``forward``."""

    @abstractmethod
    def vectors(self, temb_XC: Tensor) -> Tensor:
        """Return ``modulation_VXC`` in the order of ``BlockVectors``.

        X is any number of rows: all steps of a schedule at once read the weights only once.
        """

    def writers(self) -> Writers:
        return writers_of((*self.blocks.duals, *self.blocks.singles))

    def release(self, unless: Collection[nn.Parameter]) -> None:
        release_weights(self.module, (*self.blocks.duals, *self.blocks.singles), unless)

    def model(self, parts: StepParts) -> FastModel:
        return FastMMDiT(self, parts)

    def scheduled(self, inputs: ModelInputs, timesteps_SB: Tensor) -> dict[str, Tensor]:
        temb_SBC = self.embedded_times(inputs, timesteps_SB)
        num_steps, batch, _ = temb_SBC.shape
        vectors_VXC = self.vectors(temb_SBC.flatten(0, 1))
        vectors_VSBC = vectors_VXC.view(vectors_VXC.shape[0], num_steps, batch, -1)
        return {"modulation_VBC": vectors_VSBC.transpose(0, 1).contiguous()}


class FastMMDiT:
    """One step over this rank's tokens. Implements ``FastModel``."""

    def __init__(self, weights: MMDiTWeights, parts: StepParts) -> None:
        self._weights, self._parts = weights, parts

    def hoisted(self, arguments: Arguments) -> dict[str, Tensor]:
        cut = self._parts.cut
        mask = {}
        if self._parts.filled is not None:
            mask = {KEPT: _token_mask(arguments, self._parts.filled)}
            arguments = {**arguments, PROMPT: _pad_prompt(arguments[PROMPT], self._parts.filled[TEXT])}
        text_BTC = self._weights.text(cut(arguments[PROMPT], 1, TEXT))
        text_2TP, image_2SP = self._weights.rotations(arguments)
        cos_LP, sin_LP = torch.cat((cut(text_2TP, 1, TEXT), cut(image_2SP, 1, IMAGE)), dim=1)
        return {
            "text_TBC": text_BTC.transpose(0, 1).contiguous(),
            "cos_LP": cos_LP.contiguous(),
            "sin_LP": sin_LP.contiguous(),
            **mask,
        }

    def step(self, latents: Tensor, hoisted: StepTensors) -> Tensor:
        """Return ``velocity_BSD`` of this rank's image tokens from ``latents_BSD``."""
        text_TBC = hoisted["text_TBC"]
        image_SBC = self._weights.image(latents.transpose(0, 1))
        x_RC = torch.cat((text_TBC, image_SBC)).flatten(0, 1)
        velocity_RD: Tensor = self._weights.module.proj_out(self._blocks_step(hoisted).run(x_RC))
        return velocity_RD.view(-1, text_TBC.shape[1], velocity_RD.shape[-1]).transpose(0, 1).contiguous()

    def _blocks_step(self, hoisted: StepTensors) -> BlocksStep:
        blocks, (num_text, batch, _) = self._weights.blocks, hoisted["text_TBC"].shape
        modulation = BlockVectors(
            vectors_VBC=hoisted["modulation_VBC"],
            num_duals=len(blocks.duals),
            num_singles=len(blocks.singles),
            shared=self._weights.shares_vectors,
            first_rows=num_text * batch,
        )
        return BlocksStep(
            blocks=blocks,
            parts=self._parts,
            modulation=modulation,
            cos_LP=hoisted["cos_LP"],
            sin_LP=hoisted["sin_LP"],
            batch=batch,
        )


def _pad_prompt(text_BTD: Tensor, num_tokens: int) -> Tensor:
    """Return the prompt with zeros after it, which nothing attends to."""
    return functional.pad(text_BTD, (0, 0, 0, num_tokens - text_BTD.shape[1]))


def _token_mask(arguments: Arguments, lengths: Mapping[str, int]) -> Tensor:
    """Return a mask of the tokens of all streams, text first: False for padding."""
    text_BTD = arguments[PROMPT]
    places_N = torch.arange(sum(lengths.values()), device=text_BTD.device)
    mask_N: Tensor = (places_N < text_BTD.shape[1]) | (places_N >= lengths[TEXT])
    return mask_N


def pair_rotation(tables: tuple[Tensor, Tensor]) -> Tensor:
    """Return (2, tokens, D / 2) from diffusers' cosines and sines, (tokens, D) each with every value twice."""
    return torch.stack([table_LD[:, ::2].float() for table_LD in tables])
