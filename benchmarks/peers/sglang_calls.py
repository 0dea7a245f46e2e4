"""Calls of SGLang's transformers as its pipelines make them, by its own functions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from benchmarks.peers.calls import Call


def call_of(transformer: Any, batch: Any = None, *, autocast: bool = False, **arguments: Any) -> Call:
    """Return the call of one step. ``batch`` is its request; ``autocast`` is how its pipeline calls some models."""
    from sglang.multimodal_gen.runtime.managers.forward_context import set_forward_context

    parameter = next(transformer.parameters())
    casts = autocast and parameter.dtype != torch.float32

    def call() -> Any:
        with (
            set_forward_context(current_timestep=0, attn_metadata=None, forward_batch=batch),
            torch.autocast(parameter.device.type, parameter.dtype, enabled=casts),
        ):
            return transformer(**arguments)

    return call


def call_in_parts(transformer: Any, tokens_BSD: Tensor, **arguments: Any) -> Call:
    """Return a call that divides the picture's tokens among the ranks and gathers their predictions.

    ``arguments`` of these tokens are already divided. The transformer divides tokens of text itself.
    """
    from sglang.multimodal_gen.runtime.distributed.sp_shard_utils import gather_seq, shard_seq

    mine, plan = shard_seq(tokens_BSD)
    call = call_of(transformer, hidden_states=mine, **arguments)
    return lambda: gather_seq(call(), plan.orig_len)


def rotary_in_parts(transformer: Any, text_ids: Tensor, picture_ids: Tensor) -> tuple[Tensor, ...]:
    """Return cosines and sines of all text and of this rank's part of the picture, from FLUX's ids (tokens, axes)."""
    from sglang.multimodal_gen.configs.pipeline_configs.base import shard_rotary_emb_for_sp

    text, picture = (transformer.rotary_emb(ids.flatten(0, -2)) for ids in (text_ids, picture_ids))
    mine = map(shard_rotary_emb_for_sp, picture)
    return tuple(torch.cat(pair, dim=0) for pair in zip(text, mine, strict=True))
