"""Z-Image's prompts, padded to shared lengths: padding is attended to, but all of it is alike."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # counting tokens needs no torch
    from torch import Tensor, nn

PADDED_TO = 32
"""``SEQ_MULTI_OF`` of diffusers' class."""


def padded_length(num_tokens: int) -> int:
    """Return the next multiple of ``PADDED_TO``."""
    return num_tokens + -num_tokens % PADDED_TO


def pad_prompt(text_TD: Tensor) -> Tensor:
    """Return the tokens with zeros up to ``padded_length``: no encoder returns a token of zeros."""
    from torch.nn import functional

    return functional.pad(text_TD, (0, 0, 0, -text_TD.shape[0] % PADDED_TO))


def padding_mask(text_TD: Tensor) -> Tensor:
    """Return which tokens are padding, ``padding_T``."""
    return ~text_TD.any(dim=-1)


@contextmanager
def replace_padding(module: Any) -> Iterator[None]:
    """Let the module replace zeros by its own padding tokens, inside this context."""

    def replace(_embedder: nn.Module, args: tuple[Tensor], embedded_TC: Tensor) -> Tensor:
        replaced_TC: Tensor = module.cap_pad_token.where(padding_mask(args[0])[:, None], embedded_TC)
        return replaced_TC

    hook = module.cap_embedder.register_forward_hook(replace)
    try:
        yield
    finally:
        hook.remove()
