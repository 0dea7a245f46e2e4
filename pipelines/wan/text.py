"""Prompt to conditioning: one vector a token, from UMT5."""

from __future__ import annotations

import html
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ftfy
import torch
from torch import Tensor

from pipelines.directory import load_from_transformers, load_text_model, read_config
from pipelines.pictures import NO_PICTURES, InputPictures
from pipelines.prompts import tokenize, warn_if_cut
from pipelines.request import MediaRequest

MAX_TOKENS = 512


@dataclass(frozen=True, kw_only=True, slots=True)
class WanConditioning:
    """``prompt_BTC`` and, with guidance only, ``negative_BTC``; positions after the prompt's end are zero."""

    prompt_BTC: Tensor
    negative_BTC: Tensor | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class WanTextEncoder:
    """The encoder with its tokenizer. ``max_tokens`` is the fixed length of the sequence."""

    tokenizer: Any
    encoder: Any
    max_tokens: int

    def encode(self, request: MediaRequest, pictures: InputPictures = NO_PICTURES) -> WanConditioning:
        """``request.true_cfg_scale`` above 1 asks for the negative prompt (which may be empty) too."""
        assert pictures == NO_PICTURES, "its defaults take words alone"
        negative_BTC = self.encode_prompt(request.negative_prompt) if request.true_cfg_scale > 1 else None
        return WanConditioning(prompt_BTC=self.encode_prompt(request.prompt), negative_BTC=negative_BTC)

    @torch.no_grad()
    def encode_prompt(self, prompt: str) -> Tensor:
        """Embeddings (1, ``max_tokens``, channels)."""
        warn_if_cut(self.tokenizer, clean(prompt), self.max_tokens)
        ids_BT, mask_BT = tokenize(self.tokenizer, clean(prompt), self.max_tokens)
        mask_BT = mask_BT.to(self.encoder.device)
        states_BTC = self.encoder(ids_BT.to(self.encoder.device), mask_BT).last_hidden_state.to(self.encoder.dtype)
        embeds_BTC: Tensor = states_BTC.masked_fill(mask_BT[..., None] == 0, 0)
        return embeds_BTC.cpu()


def clean(prompt: str) -> str:
    """Broken Unicode mended, HTML entities decoded, runs of white space made one space: as in training."""
    text = html.unescape(html.unescape(ftfy.fix_text(prompt)))
    return re.sub(r"\s+", " ", text).strip()


def blank_conditioning(path: Path, request: MediaRequest) -> WanConditioning:
    """Zeros in the shapes of ``WanTextEncoder.encode``, by the configuration alone."""
    longest = read_config(path, "tokenizer").get("model_max_length", MAX_TOKENS)
    prompt_BTC = torch.zeros(1, min(MAX_TOKENS, int(longest)), read_config(path, "transformer")["text_dim"])
    return WanConditioning(prompt_BTC=prompt_BTC, negative_BTC=prompt_BTC if request.true_cfg_scale > 1 else None)


def load_text_encoder(path: Path, device: torch.device, dtype: torch.dtype) -> WanTextEncoder:
    tokenizer = load_from_transformers(path, "tokenizer")
    return WanTextEncoder(
        tokenizer=tokenizer,
        encoder=load_text_model(path, "text_encoder", device, dtype),
        max_tokens=min(MAX_TOKENS, tokenizer.model_max_length),
    )
