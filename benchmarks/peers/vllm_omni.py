"""vLLM-Omni's transformers (vllm-omni and vllm 0.30.0) on the same weights, as its worker runs them."""

from __future__ import annotations

import importlib
import sys
from contextlib import ExitStack
from functools import cache
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.models.making import default_dtype, without_init
from engines.core.spec import ParallelSpec

ROOM = 2.0
"""Free memory that suffices, as a multiple of a module's weights."""
OPEN = ExitStack()
"""Contexts that stay open as long as the process."""


def loaded(transformer_class: Any, options: dict[str, Any], module: Any, od_config: Any) -> Any:
    """Return one of its transformers on the device of ``module``, with a copy of its weights.

    If the GPU has no room for both, the module is on the CPU from now on.
    """
    from vllm_omni.diffusion.config import set_current_diffusion_config

    device, quant_config = next(module.parameters()).device, od_config.quantization_config
    if not has_room(device, module):
        module.to("cpu")  # which takes longer than all else
    with default_dtype(module.dtype), set_current_diffusion_config(od_config), device:
        transformer = transformer_class(**options, quant_config=quant_config)
        names = {name for name, _ in transformer.named_parameters()}
        with torch.no_grad():
            found = transformer.load_weights(module.state_dict().items())
            if quant_config is not None:
                _quantize(transformer)
    assert names <= found, f"weights not loaded: {sorted(names - found)}"
    return transformer.eval().requires_grad_(False)


def has_room(device: torch.device, module: Any) -> bool:
    """Return whether ``device`` has room for a copy of ``module`` and for a step."""
    if device.type != "cuda":
        return True
    free_bytes, _ = torch.cuda.mem_get_info(device)
    return bool(free_bytes > ROOM * sum(parameter.nbytes for parameter in module.parameters()))


def compile_blocks(transformer: Any, od_config: Any) -> None:
    from vllm_omni.diffusion.compile import regionally_compile

    torch._dynamo.reset()
    regionally_compile(transformer, dynamic=od_config.diffusion_compile_dynamic)


def _quantization(precision: str) -> Any:
    """Return its configuration of "fp8". Its own function imports all methods, and language models with them."""
    if precision == "native":
        return None
    if precision != "fp8":
        raise ValueError(f"vLLM-Omni is timed in native precision and in fp8, not in {precision}")
    from vllm.model_executor.layers.quantization.fp8 import Fp8Config

    return Fp8Config()


def _quantize(transformer: Any) -> None:
    """Quantise the weights that were not quantised as they were loaded, as its loader does at the end."""
    from vllm.model_executor.model_loader.reload.layerwise import finalize_layerwise_processing

    finalize_layerwise_processing(transformer, model_config=None)
    for layer in transformer.modules():
        method = getattr(layer, "quant_method", None)
        if method is not None and not getattr(layer, "_already_called_process_weights_after_loading", False):
            method.process_weights_after_loading(layer)


def cut_sequence(transformer: Any, plan: dict[str, Any], layout: ParallelSpec) -> None:
    """Divide the transformer as its registry of models does."""
    from vllm_omni.diffusion.distributed.sp_plan import SequenceParallelConfig
    from vllm_omni.diffusion.hooks.sequence_parallel import apply_sequence_parallel

    config = SequenceParallelConfig(ulysses_degree=layout.ulysses, ring_degree=layout.ring)
    apply_sequence_parallel(transformer, config, plan)


def make_importable() -> None:
    """Prepare imports. Call it before the first of its modules is imported.

    Its ``__init__`` changes a language model's engine, those of models of clips import pipelines and a server's API.
    None of it is needed, nor is the FlashAttention of language models: picture models call fa3-fwd.
    """
    bare = ("wan2_2", "cosmos3", "ltx2", "minimax_h3", "hunyuan_video")
    without_init("vllm_omni", *(f"vllm_omni.diffusion.models.{name}" for name in bare), "vllm_omni.entrypoints.openai")
    library = "vllm.vllm_flash_attn._vllm_fa2_C"
    sys.modules.setdefault(library, ModuleType(library))


@cache
def begin(dtype: torch.dtype, precision: str, layout: ParallelSpec) -> Any:
    """Return its configuration, with groups and contexts as its worker makes them. The contexts stay open.

    Another configuration needs its own process.
    """
    allowed: bool = torch.backends.cuda.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]
    make_importable()
    if not torch.cuda.is_available():
        _serve_cpu()
    from vllm.config import set_current_vllm_config
    from vllm_omni.diffusion.data import DiffusionParallelConfig, OmniDiffusionConfig
    from vllm_omni.diffusion.distributed import parallel_state
    from vllm_omni.diffusion.forward_context import set_forward_context
    from vllm_omni.diffusion.vllm_config import create_diffusion_vllm_config
    from vllm_omni.platforms import current_omni_platform

    sizes = {
        "ulysses_degree": layout.ulysses,
        "ring_degree": layout.ring,
        "sequence_parallel_size": layout.context,
        "tensor_parallel_size": layout.tensor,
        "cfg_parallel_size": layout.guidance,
    }
    od_config = OmniDiffusionConfig(
        parallel_config=DiffusionParallelConfig(**sizes),
        num_gpus=dist.get_world_size(),
        dtype=dtype,
        quantization_config=_quantization(precision),
    )
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    vllm_config = create_diffusion_vllm_config(device, od_config)
    vllm_config.kernel_config.ir_op_priority = current_omni_platform.get_default_ir_op_priority(vllm_config)
    OPEN.enter_context(set_forward_context(vllm_config=vllm_config, omni_diffusion_config=od_config))
    OPEN.enter_context(set_current_vllm_config(vllm_config))
    parallel_state.init_distributed_environment(world_size=dist.get_world_size(), rank=dist.get_rank())
    parallel_state.initialize_model_parallel(**sizes)
    torch.backends.cuda.enable_cudnn_sdp(allowed)  # it forbids cuDNN's attention to the whole process
    return od_config


def _serve_cpu() -> None:
    """Use its unspecified platform with PyTorch's attention: it has none for a CPU."""
    from vllm_omni.platforms.interface import UnspecifiedOmniPlatform as Platform

    sdpa = "vllm_omni.diffusion.attention.backends.sdpa"
    Platform.get_diffusion_attn_backend_cls = classmethod(lambda cls, **_: f"{sdpa}.SDPABackend")
    Platform.dist_backend = "gloo"
    kernel = importlib.import_module(sdpa).SDPABackend.get_impl_cls()
    kernel.forward = kernel.forward_cuda  # PyTorch's, on any device
