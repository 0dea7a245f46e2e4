"""SGLang Diffusion's transformers (sglang 0.5.23) on the same weights, as it serves them.

Its compiled kernels (sgl_kernel) are made for the PyTorch that it pins, 2.14. Elsewhere FlashAttention-3 comes from
fa3-fwd, whose library any PyTorch can load, and the product in float8 is PyTorch's; of the others FLUX.1 calls none.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from functools import cache
from types import ModuleType, SimpleNamespace
from typing import Any, Literal

import torch
from torch import Tensor

from benchmarks.models.making import default_dtype, without_init
from benchmarks.peers.sglang_graphs import GraphedTransformer, weak_reference
from engines.core.spec import ParallelSpec

Compiled = Literal["", "whole", "blocks", "graphs"]
ROTARY_IN_CUTE = "sglang.kernels.ops.diffusion.rope.rmsnorm_interleaved_rope_cutedsl"
LENGTHS = ("cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
FUSIONS = (
    "FUSED_LINEAR_GELU",
    "FUSED_LN_MODULATE",
    "LTX2_QKNORM_SPLIT_ROPE",
    "LTX2_RMS_NORM_MODULATE",
    "MINIMAX_H3_NORM_MODULATE",
    "QWEN_IMAGE_ADDED_QKV",
)
"""Fusions that its default quality, "lossless", mounts on these models: those that their modules mark."""
TRAINED_STEPS = 1000
"""Factor of timesteps and guidance, as its pipeline passes them."""


def loaded(
    transformer_class: Any,
    config: Any,
    module: Any,
    compiled: Compiled = "",
    precision: str = "native",
    weights: Mapping[str, Tensor] | None = None,
) -> Any:
    """Return one of its transformers with the parameters of ``module``. It copies those that it changes.

    ``compiled``: "whole" is its ``--enable-torch-compile``, "blocks" also its ``--regional-compile``, "graphs" its
    ``--enable-breakable-cuda-graph``, "" its default. ``precision`` "fp8" is its ``--quantization fp8``.
    ``weights`` are those parameters by the names of its checkpoints, where diffusers has others.
    """
    from sglang.kernels.ops import diffusion as fusions
    from sglang.multimodal_gen.runtime.loader.utils import get_param_names_mapping, hf_to_custom_state_dict

    quantization = None if precision == "native" else _quantization(precision)
    with default_dtype(module.dtype), torch.device("meta"):
        transformer = transformer_class(config, hf_config=dict(module.config), quant_config=quantization)
    made = transformer.state_dict()
    mapping = get_param_names_mapping(transformer.param_names_mapping, set(made))
    own, _ = hf_to_custom_state_dict(weights or module.state_dict(), mapping, set(made))
    # Its loader casts them too. diffusers keeps Wan's embedding of time in float32, for example, and SGLang does not.
    transformer.load_state_dict({name: x.to(made[name].dtype) for name, x in own.items()}, assign=True)
    for layer in transformer.modules() if quantization else ():
        if hasattr(layer, "quant_method"):
            layer.quant_method.process_weights_after_loading(layer)
    _finish_loading(transformer, module.dtype)
    transformer.eval().requires_grad_(False)
    for name in FUSIONS:
        getattr(fusions, name).mount(transformer)
    if compiled == "graphs":
        return GraphedTransformer(transformer)
    if compiled:
        _compile(transformer, compiled, config.torch_compile_inductor_config)
    return transformer


def _finish_loading(transformer: Any, dtype: torch.dtype) -> None:
    """Keep in float32 what the transformer chooses. The rest is in bfloat16, as in its pipelines."""
    chosen = "target_dtype" in inspect.signature(transformer.post_load_weights).parameters
    transformer.post_load_weights(**({"target_dtype": dtype} if chosen else {}))


def _compile(transformer: Any, compiled: Compiled, settings: dict[str, Any]) -> None:
    from sglang.multimodal_gen.runtime.utils.torch_compile import (
        apply_inductor_config,
        build_torch_compile_kwargs,
        compile_matching_submodules,
    )

    torch._dynamo.reset()
    apply_inductor_config(settings)
    torch._dynamo.config.automatic_dynamic_shapes = False  # each size as if it were the only one that is served
    how = build_torch_compile_kwargs(
        mode="max-autotune-no-cudagraphs", module=transformer, enable_inductor_compute_comm_overlap=True
    )
    if compiled == "whole":
        transformer.compile(**how)
    else:
        compile_matching_submodules(transformer, compile_kwargs=how)


def _quantization(precision: str) -> Any:
    from sglang.multimodal_gen.runtime.layers.quantization import get_quantization_config

    return get_quantization_config(precision)()


@cache
def begin(layout: ParallelSpec) -> None:
    """Return its default: two ranks that share a sequence gather keys and values instead of exchanging heads."""
    make_importable()
    allowed: bool = torch.backends.cuda.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]
    from sglang.multimodal_gen.runtime.distributed import parallel_state
    from sglang.multimodal_gen.runtime.server_args import server_args

    gathers = layout.ulysses == layout.context == 2
    degrees = {"kv_gather_degree": 2 if gathers else 1, "sp_split_auto": gathers}
    server_args.set_global_server_args(Arguments(tp_size=1, sp_degree=layout.context, **degrees))
    parallel_state.maybe_init_distributed_environment_and_model_parallel(
        tp_size=1,
        sp_size=layout.context,
        cfg_degree=layout.guidance,
        ulysses_degree=layout.ulysses,
        ring_degree=layout.ring,
    )
    if not (torch.cuda.is_available() and importlib.util.find_spec("cutlass")):
        _make_do_without_cute()
    if layout.context > 1:
        _exchange_by_nccl_in_captures()
    torch.backends.cuda.enable_cudnn_sdp(allowed)  # it forbids cuDNN's attention to the whole process


def _make_do_without_cute() -> None:
    """Replace its kernels in CuTe (nvidia-cutlass-dsl) by PyTorch, compiled where its modules say how.

    They are norms with modulation, and Wan's norm with rotary embedding, which then takes two passes.
    """
    from sglang.multimodal_gen.runtime.layers import layernorm

    for norm in (layernorm._NormScaleShift, layernorm._ScaleResidualNormScaleShift):
        norm.forward_cpu = norm.forward_cuda = norm.forward_native
    sys.modules[ROTARY_IN_CUTE] = _nothing_of(ROTARY_IN_CUTE)


def _exchange_by_nccl_in_captures() -> None:
    """Leave out its copies between GPUs while a graph is captured.

    They wait for counters that its Python raises at each call. A replay would wait for old ones, which is no waiting.
    """
    place = "sglang.multimodal_gen.runtime.distributed.device_communicators.ipc_a2a_multi"
    module: Any = importlib.import_module(place)
    is_ready = module.ipc_a2a_multi_ready

    def is_ready_outside_captures(*words: Any, **options: Any) -> bool:
        captures = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
        return not captures and is_ready(*words, **options)

    module.ipc_a2a_multi_ready = is_ready_outside_captures


def _nothing_of(name: str) -> ModuleType:
    """Return a module that has every name. Questions whether it can be used get "no"; the rest cannot be called."""
    module: Any = ModuleType(name)
    module.__getattr__ = lambda of: (lambda *_, **__: False) if of.startswith("can_use_") else _refuse(of)
    named: ModuleType = module
    return named


def make_importable() -> None:
    """Prepare imports. Call it before the first of its modules is imported."""
    import transformers

    register = transformers.AutoConfig.register
    # It registers models that transformers have had since.
    transformers.AutoConfig.register = staticmethod(lambda *names, **_: register(*names, exist_ok=True))
    if torch.cuda.is_available():
        _make_kernels_importable()


def _make_kernels_importable() -> None:
    """Replace sgl_kernel if it cannot be loaded: its names, FlashAttention-3 of fa3-fwd, and PyTorch's products.

    SGLang itself prefers PyTorch's product in float8 for the largest.
    """
    try:
        importlib.import_module("sgl_kernel")
    except ImportError:
        without_init("sgl_kernel")
        kernels: Any = sys.modules["sgl_kernel"]
        kernels.__getattr__ = _refuse
        kernels.fp8_scaled_mm, kernels.rmsnorm = _scaled_product, _rms_norm
        kernels.fused_add_rmsnorm, kernels.weak_ref_tensor = _add_and_rms_norm, weak_reference
        kernels.silu_and_mul = _silu_and_mul
        attention: Any = ModuleType("sgl_kernel.flash_attn")
        attention.flash_attn_varlen_func = _attention_of(importlib.import_module("fa3_fwd_interface"))
        attention.flash_attn_with_kvcache = _refuse("flash_attn_with_kvcache")
        sys.modules["sgl_kernel.flash_attn"] = attention


def _refuse(name: str) -> Callable[..., Any]:
    """Replace a function that is imported and not called."""
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"SGLang's kernel {name} cannot be loaded beside PyTorch {torch.__version__}")

    return missing


def _scaled_product(
    a_MK: Tensor, b_KN: Tensor, scales_a: Tensor, scales_b: Tensor, out_dtype: torch.dtype, bias_N: Tensor | None = None
) -> Tensor:
    """Multiply float8 with a scale a row and a scale a column, with SGLang's arguments."""
    scale_M1, scale_1N = scales_a.view(-1, 1), scales_b.view(1, -1)
    return torch._scaled_mm(
        a_MK, b_KN, scale_a=scale_M1, scale_b=scale_1N, bias=bias_N, out_dtype=out_dtype, use_fast_accum=True
    )


def _rms_norm(x_RC: Tensor, weight_C: Tensor, eps: float) -> Tensor:
    """Normalize wide rows: Qwen-Image's prompt, once a forward."""
    return torch.nn.functional.rms_norm(x_RC, weight_C.shape, weight_C, eps)


@torch.library.custom_op("peers::add_and_rms_norm", mutates_args=("x_RC", "residual_RC"))
def _add_and_rms_norm(x_RC: Tensor, residual_RC: Tensor, weight_C: Tensor, eps: float) -> None:
    """Normalize both in place, in every block of Cosmos 3, by its other kernel of that name, built with nvcc."""
    norm = importlib.import_module("sglang.kernels.ops.layernorm.norm")
    norm.fused_add_rmsnorm(x_RC, residual_RC, weight_C, eps)


def _silu_and_mul(gates_and_values_RC: Tensor, out_RH: Tensor) -> None:
    """Write the gated values of FLUX.3's blocks, by its other kernel of that name, built with nvcc."""
    importlib.import_module("sglang.kernels.ops.activation.activation").silu_and_mul(gates_and_values_RC, out_RH)


def _attention_of(flash: Any) -> Callable[..., Any]:
    """Return FlashAttention-3 with SGLang's arguments, for whole sequences (batch, tokens, ...), or for packed ones.

    A ring also asks for the logarithms of the sums.
    """
    forward = flash._flash_attn_forward

    def attend(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        softmax_scale: float | None,
        causal: bool,
        cu_seqlens_q: Tensor | None = None,
        **rest: Any,
    ) -> Any:
        assert not causal
        lengths = (
            {} if cu_seqlens_q is None else {name: rest[name] for name in LENGTHS} | {"cu_seqlens_q": cu_seqlens_q}
        )
        out, logsumexp, *_ = forward(q, k, v, softmax_scale=softmax_scale or q.shape[-1] ** -0.5, **lengths)
        return (out, logsumexp) if rest.get("return_softmax_lse") else out

    return attend


class Arguments(SimpleNamespace):
    """Arguments of a server or a request. Unset ones are None."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)
