"""Prompt to conditioning: T5 gives one vector a token, CLIP one for the whole prompt."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipelines.directory import load_from_transformers, load_text_model, read_config
from pipelines.pictures import NO_PICTURES, InputPictures
from pipelines.prompts import tokenize, warn_if_cut
from pipelines.request import MediaRequest

MAX_TOKENS = 512
MAX_TOKENS_SCHNELL = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class FluxPrompt:
    """One encoded prompt: ``tokens_BTC`` of the T5 encoder, ``pooled_BC`` of CLIP."""

    tokens_BTC: Tensor
    pooled_BC: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class FluxConditioning:
    """What the text encoders made of a request; ``negative`` is there with true guidance only."""

    prompt: FluxPrompt
    negative: FluxPrompt | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class FluxTextEncoder:
    """Both encoders with their tokenizers. ``max_tokens`` is the fixed length of the T5 sequence."""

    clip_tokenizer: Any
    clip: Any
    t5_tokenizer: Any
    t5: Any
    max_tokens: int

    def encode(self, request: MediaRequest, pictures: InputPictures = NO_PICTURES) -> FluxConditioning:
        """``request.true_cfg_scale`` above 1 asks for the negative prompt (which may be empty) too."""
        assert pictures == NO_PICTURES, "its defaults take words alone"
        negative = self.encode_prompt(request.negative_prompt) if request.true_cfg_scale > 1 else None
        return FluxConditioning(prompt=self.encode_prompt(request.prompt), negative=negative)

    @torch.no_grad()
    def encode_prompt(self, prompt: str) -> FluxPrompt:
        """Both encoders see the padding too: FLUX was trained so. CLIP cuts long prompts first, which is as usual."""
        warn_if_cut(self.t5_tokenizer, prompt, self.max_tokens)
        ids_BT, _ = tokenize(self.clip_tokenizer, prompt, self.clip_tokenizer.model_max_length)
        pooled_BC = self.clip(ids_BT.to(self.clip.device)).pooler_output
        ids_BT, _ = tokenize(self.t5_tokenizer, prompt, self.max_tokens)
        tokens_BTC = self.t5(ids_BT.to(self.t5.device))[0]
        return FluxPrompt(tokens_BTC=tokens_BTC.to(self.t5.dtype).cpu(), pooled_BC=pooled_BC.to(self.clip.dtype).cpu())


def max_tokens(path: Path, longest: float) -> int:
    """512 for guidance-distilled models (dev), 256 for the others (schnell), or the tokenizer's ``longest``."""
    distilled = read_config(path, "transformer")["guidance_embeds"]
    return min(MAX_TOKENS if distilled else MAX_TOKENS_SCHNELL, int(longest))


def blank_conditioning(path: Path, request: MediaRequest) -> FluxConditioning:
    """Zeros in the shapes of ``FluxTextEncoder.encode``, by the configuration alone."""
    sizes = read_config(path, "transformer")
    longest = read_config(path, "tokenizer_2").get("model_max_length", MAX_TOKENS)
    prompt = FluxPrompt(
        tokens_BTC=torch.zeros(1, max_tokens(path, longest), sizes["joint_attention_dim"]),
        pooled_BC=torch.zeros(1, sizes["pooled_projection_dim"]),
    )
    return FluxConditioning(prompt=prompt, negative=prompt if request.true_cfg_scale > 1 else None)


def load_text_encoder(path: Path, device: torch.device, dtype: torch.dtype) -> FluxTextEncoder:
    t5_tokenizer = load_from_transformers(path, "tokenizer_2")
    return FluxTextEncoder(
        clip_tokenizer=load_from_transformers(path, "tokenizer"),
        clip=load_text_model(path, "text_encoder", device, dtype),
        t5_tokenizer=t5_tokenizer,
        t5=load_text_model(path, "text_encoder_2", device, dtype),
        max_tokens=max_tokens(path, t5_tokenizer.model_max_length),
    )
