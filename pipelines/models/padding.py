"""Prompts without most of their padding: pipelines pad them to one length, which every step would compute."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

PROMPTS = ("", "negative_")
"""Beginnings of the names of a request's encoded prompts."""


def shorten_prompts(values: Mapping[str, Any], lengths: Mapping[tuple[str, str], int]) -> dict[str, Any]:
    """Return encoded ``values`` with prompts of given lengths, if all own tokens of all prompts fit.

    ``lengths`` are by the names of tokens, (B, T, ...), and of their mask, (B, T), nonzero for the prompt's own tokens.
    Padding comes last: attention may not depend on the order of tokens. So steps have one of two shapes. Masks are read
    on the host, once a job.
    """
    found = {
        (prompt + tokens, prompt + mask): length
        for (tokens, mask), length in lengths.items()
        for prompt in PROMPTS
        if values.get(prompt + tokens) is not None
    }
    shortened = dict(values)
    if all(_fits(values[mask], length) for (_, mask), length in found.items()):
        for (tokens, mask), length in found.items():
            shortened[tokens], shortened[mask] = _own_first(values[tokens], values[mask], length)
    return shortened


def _fits(mask_BT: Tensor, length: int) -> bool:
    return mask_BT.device.type != "meta" and bool((mask_BT != 0).sum(1).max() <= length)


def _own_first(x_BTC: Tensor, mask_BT: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Return ``length`` tokens, own ones first, and their mask."""
    order_BT = (mask_BT != 0).int().argsort(dim=1, descending=True, stable=True)[:, :length]
    places = order_BT.reshape(*order_BT.shape, *[1] * (x_BTC.ndim - 2))
    return x_BTC.take_along_dim(places, 1), mask_BT.take_along_dim(order_BT, 1)
