"""xDiT's unified sequence parallel attention (xfuser, yunchang) in diffusers' FLUX.1: Ulysses, blocks compiled.

Only its attention and groups are imported: its package pulls in every pipeline and their optional needs.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.models.making import without_init
from pipelines.models.flux.attention import set_kernel

MODELS = {"FluxTransformer2DModel": "Flux"}
DIMS = {"hidden_states": 1, "encoder_hidden_states": 1, "img_ids": 0, "txt_ids": 0}
"""Dims of tokens by input."""


@contextmanager
def opened(module: Any, own_calls: Sequence[Mapping[str, Any]]) -> Iterator[Callable[[], Tensor]]:
    """Yield a step. The module's attention is xDiT's from now on."""
    rank, world = dist.get_rank(), dist.get_world_size()
    parts = [
        {name: x.chunk(world, DIMS[name])[rank] if name in DIMS else x for name, x in own.items()} for own in own_calls
    ]
    set_kernel(module, _kernel(_attention(world)))
    torch._dynamo.reset()
    module.compile_repeated_blocks(dynamic=False, fullgraph=False)

    def predicted(mine: Mapping[str, Any]) -> Tensor:
        part_BSD = module(**mine, return_dict=False)[0].contiguous()
        every = [torch.empty_like(part_BSD) for _ in range(world)]
        dist.all_gather(every, part_BSD)
        return torch.cat(every, dim=1).flatten()

    try:
        yield lambda: torch.cat(list(map(predicted, parts)))
    finally:
        for part in module.modules():
            part._compiled_call_impl = None


def _kernel(attend: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, Tensor]]:
    def kernel(q_BLHD: Tensor, k_BLHD: Tensor, v_BLHD: Tensor, /, **options: Any) -> tuple[Tensor, Tensor]:
        assert all(option is None for option in options.values()), "xDiT attends to every token"
        out_BHLD = attend(*(x.transpose(1, 2) for x in (q_BLHD, k_BLHD, v_BLHD)))
        return out_BHLD.transpose(1, 2), q_BLHD.new_empty(0)

    return kernel


@cache
def _attention(world: int) -> Callable[..., Tensor]:
    without_init("xfuser", "xfuser.model_executor", "xfuser.model_executor.layers")
    with suppress(ImportError, OSError):  # its first choice, by the name that it imports
        sys.modules.setdefault("flash_attn_interface", importlib.import_module("fa3_fwd_interface"))
    usp: Any = importlib.import_module("xfuser.model_executor.layers.usp")
    state = importlib.import_module("xfuser.core.distributed.parallel_state")
    attention = importlib.import_module("xfuser.core.distributed.attention_backend")
    backends = attention.AttentionBackendType
    backend = backends.FLASH_3 if attention.env_info["has_flash_attn_3"] else backends.CUDNN
    state.init_distributed_environment(rank=dist.get_rank(), world_size=world)
    state.initialize_model_parallel(sequence_parallel_degree=world, ulysses_degree=world, ring_degree=1)
    options = SimpleNamespace(use_spargeattn_head_balance=False)
    settings = SimpleNamespace(attention_backend=backend, fp8_comms=None, runtime_config=options)
    usp.get_runtime_state = lambda: settings
    return partial(usp.USP, combine_qkv_a2a=True)
