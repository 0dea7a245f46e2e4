"""Z-Image's prompts at lengths that many share: tokens that fill them up are attended to, but all alike."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # who only counts tokens does without torch
    from torch import Tensor, nn

PADDED_TO = 32
"""``SEQ_MULTI_OF`` of diffusers' class."""


def padded_length(num_tokens: int) -> int:
    """Returns the next multiple of ``PADDED_TO``."""
    return num_tokens + -num_tokens % PADDED_TO


def filled(text_TD: Tensor) -> Tensor:
    """Returns the tokens with zeros up to ``padded_length``: no encoder gives a token of zeros."""
    from torch.nn import functional

    return functional.pad(text_TD, (0, 0, 0, -text_TD.shape[0] % PADDED_TO))


def filling(text_TD: Tensor) -> Tensor:
    """Says of each token whether it was filled in, ``filling_T``."""
    return ~text_TD.any(dim=-1)


@contextmanager
def filling_replaced(module: Any) -> Iterator[None]:
    """Makes the module take its own filling, as where it fills a text up itself, in the forwards of this context."""

    def replace(_embedder: nn.Module, args: tuple[Tensor], embedded_TC: Tensor) -> Tensor:
        replaced_TC: Tensor = module.cap_pad_token.where(filling(args[0])[:, None], embedded_TC)
        return replaced_TC

    hook = module.cap_embedder.register_forward_hook(replace)
    try:
        yield
    finally:
        hook.remove()
