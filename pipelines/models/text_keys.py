"""Keys and values of a text, made once a job and given to blocks in its place."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from pipelines.blocks.attention import PrecomputedAttention
from pipelines.models.spec import first_output

TEXT, KEYS_VALUES = "encoder_hidden_states", "text_keys_values"
"""The text's name in modules and blocks, and that of an input beside a module's own: keys and values by block."""

Call = tuple[tuple[Any, ...], dict[str, Any]]


def keys_and_values(attn: Any, text_BTC: Tensor) -> tuple[Tensor, Tensor]:
    return attn.norm_k(attn.to_k(text_BTC)), attn.to_v(text_BTC)


def stacked_keys_values(
    attentions: Sequence[nn.Module],
    text_BTC: Tensor,
    make: Callable[[Any, Tensor], tuple[Tensor, Tensor]] = keys_and_values,
) -> Tensor:
    """Return ``keys_values_N2BTC`` of N attentions that have as many channels as the first. ``make`` returns one's."""
    keys_values_N2BTC: Tensor | None = None
    for number, attention in enumerate(attentions):
        made = make(attention, text_BTC)
        if keys_values_N2BTC is None:
            keys_values_N2BTC = made[0].new_empty(len(attentions), 2, *made[0].shape)
        for target_BTC, x_BTC in zip(keys_values_N2BTC[number], made, strict=True):
            target_BTC.copy_(x_BTC)
    assert keys_values_N2BTC is not None, "no block attends to the text"
    return keys_values_N2BTC


def with_keys(attn: Any, text: Tensor) -> tuple[Any, Tensor]:
    """Return ``attn`` and its text; of stacked keys and values a stand-in that returns these, and the values."""
    if text.ndim != 4:
        return attn, text
    k_BTC, v_BTC = text.unbind(0)
    return PrecomputedAttention(attn, k=k_BTC, v=v_BTC), v_BTC


def forward_with_keys(module: nn.Module, readers: Sequence[nn.Module], call: Mapping[str, Any]) -> Tensor:
    """Return the first output of ``module``. Its ``readers`` get the text's keys and values if ``call`` has them."""
    own = {name: x for name, x in call.items() if name != KEYS_VALUES}
    with replace_text(readers, call.get(KEYS_VALUES)):
        return first_output(module, own)


@contextmanager
def replace_text(
    blocks: Sequence[nn.Module], keys_values: Tensor | None, *, place: int = 1, name: str = TEXT
) -> Iterator[None]:
    """Give each block its keys and values in place of the text, inside this context. None keeps the text.

    The text is the block's argument at ``place``, or the one with ``name``. Hooks that cut tokens run afterwards.
    """
    with ExitStack() as stack:
        if keys_values is not None:
            for block, x in zip(blocks, keys_values, strict=True):
                hook = block.register_forward_pre_hook(_text_hook(x, place, name), prepend=True, with_kwargs=True)
                stack.callback(hook.remove)
        yield


def _text_hook(x: Tensor, place: int, name: str) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], Call]:
    def hook(_block: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]) -> Call:
        if name in keywords:
            return args, {**keywords, name: x}
        return (*args[:place], x, *args[place + 1 :]), keywords

    return hook
