"""Peers on the same weights: diffusers' context parallelism, xDiT's attention, SGLang Diffusion and vLLM-Omni."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.denoise_step.cases import REDUCE_OVERHEAD
from benchmarks.models.making import without_init
from benchmarks.peers.sglang import Compiled, sglang_step
from benchmarks.peers.vllm_omni import vllm_omni_step
from engines.core.model import Precision
from pipelines.models.flux.attention import set_kernel

SGLANG_COMPILED: dict[str, Compiled] = {
    "sglang": "",
    "sglang-graphs": "graphs",
    "sglang-compiled": "whole",
    "sglang-blocks": "blocks",
}


def peer_step(
    module: Any, inputs: dict[str, Tensor], maker: str, precision: Precision = "native"
) -> Callable[[], Tensor]:
    """Return one step of the peer ``maker``, which runs in inference mode."""
    step: Callable[[], Tensor] = torch.inference_mode()(_peer_step(module, inputs, maker, precision))
    return step


def _peer_step(module: Any, inputs: dict[str, Tensor], maker: str, precision: Precision) -> Callable[[], Tensor]:
    begin_alone()
    if maker.startswith("sglang"):
        return sglang_step(module, inputs, compiled=SGLANG_COMPILED[maker], precision=precision)
    if maker.startswith("vllm-omni"):
        how = {"compiled": "eager" not in maker, "tensor": maker.endswith("tensor")}
        return vllm_omni_step(module, inputs, **how, precision=precision)
    if precision != "native":
        raise ValueError(f"{maker} runs in the precision of its weights, not in {precision}")
    if maker == "xdit":
        return xdit_step(module, inputs)
    if maker == REDUCE_OVERHEAD:
        return reduced_step(module, inputs)
    return diffusers_step(module, inputs, maker)


def begin_alone() -> None:
    """Do for one rank what a launcher does for several: peers ask for device and groups."""
    os.environ.setdefault("LOCAL_RANK", "0")
    if not dist.is_initialized():
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=0, world_size=1)


def diffusers_step(module: Any, inputs: dict[str, Tensor], maker: str) -> Callable[[], Tensor]:
    """Return a step of "diffusers-ulysses" or "diffusers-ring". A second maker needs its own process: hooks stay."""
    from diffusers import ContextParallelConfig

    if module._parallel_config is None:
        degree = {maker.removeprefix("diffusers-") + "_degree": dist.get_world_size()}
        module.set_attention_backend("_native_cudnn" if torch.cuda.is_available() else "native")
        module.enable_parallelism(config=ContextParallelConfig(**degree))
        torch._dynamo.reset()
        module.compile_repeated_blocks(dynamic=False, fullgraph=False)
    return lambda: module(**inputs, return_dict=False)[0]


def reduced_step(module: Any, inputs: dict[str, Tensor]) -> Callable[[], Tensor]:
    """Return a step of diffusers' module on one GPU, compiled whole with PyTorch's own CUDA graphs."""
    if dist.get_world_size() > 1:
        raise ValueError(f"{REDUCE_OVERHEAD} is timed on one GPU, not on {dist.get_world_size()}")
    module.set_attention_backend("_native_cudnn" if torch.cuda.is_available() else "native")
    return reduced(lambda: module(**inputs, return_dict=False)[0])


def reduced(step: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """Compile ``step`` with ``mode="reduce-overhead"``. Its answer is valid until the next step."""
    compiled = torch.compile(step, mode="reduce-overhead", fullgraph=True, dynamic=False)

    def run() -> Tensor:
        torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
        answer: Tensor = compiled()
        return answer

    return run


def xdit_step(module: Any, inputs: dict[str, Tensor]) -> Callable[[], Tensor]:
    """Return a step with xDiT's unified sequence parallel attention (xfuser, yunchang), Ulysses, blocks compiled.

    Only its attention and groups are imported: its package pulls in every pipeline and their optional needs.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    _prepare_for_xdit(module)
    dims = {"hidden_states": 1, "encoder_hidden_states": 1, "img_ids": 0, "txt_ids": 0}
    mine = {name: x.chunk(world, dims[name])[rank] if name in dims else x for name, x in inputs.items()}

    def step() -> Tensor:
        part_BSD = module(**mine, return_dict=False)[0].contiguous()
        parts = [torch.empty_like(part_BSD) for _ in range(world)]
        dist.all_gather(parts, part_BSD)
        return torch.cat(parts, dim=1)

    return step


@cache
def _prepare_for_xdit(module: Any) -> None:
    attend = _xdit_attention(dist.get_world_size())

    def kernel(q_BLHD: Tensor, k_BLHD: Tensor, v_BLHD: Tensor, /, **options: Any) -> tuple[Tensor, Tensor]:
        assert all(option is None for option in options.values()), "xDiT attends to every token"
        out_BHLD = attend(*(x.transpose(1, 2) for x in (q_BLHD, k_BLHD, v_BLHD)))
        return out_BHLD.transpose(1, 2), q_BLHD.new_empty(0)

    set_kernel(module, kernel)
    torch._dynamo.reset()
    module.compile_repeated_blocks(dynamic=False, fullgraph=False)


def _xdit_attention(world: int) -> Callable[..., Tensor]:
    without_init("xfuser", "xfuser.model_executor", "xfuser.model_executor.layers")
    usp: Any = importlib.import_module("xfuser.model_executor.layers.usp")
    state = importlib.import_module("xfuser.core.distributed.parallel_state")
    backends = importlib.import_module("xfuser.core.distributed.attention_backend").AttentionBackendType
    state.init_distributed_environment(rank=dist.get_rank(), world_size=world)
    state.initialize_model_parallel(sequence_parallel_degree=world, ulysses_degree=world, ring_degree=1)
    options = SimpleNamespace(use_spargeattn_head_balance=False)
    settings = SimpleNamespace(attention_backend=backends.CUDNN, fp8_comms=None, runtime_config=options)
    usp.get_runtime_state = lambda: settings
    return partial(usp.USP, combine_qkv_a2a=True)
