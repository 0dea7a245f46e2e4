"""Every private name of PyTorch that the product uses.

Operators are the original callables, so that calls have no overhead. Functions import the modules that are slow to
import. ``tests/engines/core/test_torch_private.py`` tests each name.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from operator import attrgetter
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

__all__ = ["TorchDispatchMode", "tree_leaves", "tree_map_only"]

int_mm: Callable[..., Tensor] = torch._int_mm
"""(values_MK, values_KN), int8, to int32."""
scaled_mm: Callable[..., Tensor] = torch._scaled_mm
"""A float8 product with scales; ``torch.nn.functional.scaled_mm`` takes another path to it."""
addmm_activation: Callable[..., Tensor] = torch._addmm_activation
"""``addmm`` with GELU in its epilogue."""
cpu_attention: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
cudnn_attention: Any = torch.ops.aten._scaled_dot_product_cudnn_attention
flash_attention: Any = torch.ops.aten._scaled_dot_product_flash_attention
efficient_attention: Any = torch.ops.aten._scaled_dot_product_efficient_attention
"""Fused attention that also returns the log-sum-exp, unlike ``torch.nn.functional``."""
collective_ops: Any = torch.ops._c10d_functional
"""Functional collectives: traceable, one operator per exchange."""
COLLECTIVE_PREFIX = "_c10d_functional::"
"""Prefix of their operator names."""
version_of = attrgetter("_version")
"""Takes a tensor and returns a counter of its in-place changes."""
ONNX_REGISTRATION_LOGGER = "torch.onnx._internal.exporter._registration"


def raise_recompile_limit(num_variants: int) -> None:
    """Allow at least ``num_variants`` compiled versions of a function in this process; PyTorch's own limit is 8."""
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, num_variants)


def keep_kernel_choices() -> None:
    """Let Inductor time only variants of a kernel whose choice it keeps on disk.

    It also makes smaller blocks of reductions that take many registers. Such a choice is not found again: each process
    would time it anew, choose another one, and sum in another order.
    """
    import torch._inductor.config

    torch._inductor.config.dynamic_scale_rblock = False


def mark_static(x: Tensor, dim: int) -> None:
    """Let dynamic shapes have the exact size of one dim of this tensor object."""
    torch._dynamo.mark_static(x, dim)


def separate_sizes() -> AbstractContextManager[None]:
    """Return a context in which equal sizes of a dynamic compilation count as different ones (in its thread).

    Code for one number of tokens in text and picture would otherwise be compiled again for two.
    """
    import torch.fx.experimental._config as config

    context: AbstractContextManager[None] = config.patch(use_duck_shape=False)  # type: ignore[attr-defined]
    return context


def end_failed_capture(device: torch.device, pool: Any) -> None:
    """Tell the allocator of ``device`` (with an index) that a capture into the graph pool ``pool`` has ended.

    Some versions of PyTorch forget that when a capture fails. Without effect if no capture into the pool is under way.
    """
    try:
        torch._C._cuda_endAllocateToPool(device.index, pool)
    except RuntimeError:  # it has ended, or never began
        return
    torch._C._cuda_releasePool(device.index, pool)


def load_compiled(bundle: bytes) -> None:
    """Put the kernels and choices of ``torch.compiler.save_cache_artifacts`` into this node's caches.

    PyTorch reads those kinds whose modules are imported, which a compilation does later. RuntimeError without a bundle.
    """
    import torch._functorch._aot_autograd.autograd_cache
    import torch._inductor.codecache
    import torch._inductor.runtime.autotune_cache

    if torch.compiler.load_cache_artifacts(bundle) is None:
        raise RuntimeError("PyTorch cannot read them")


def recompile_limit_error() -> type[Exception]:
    """Return the error of a full graph whose function has no more compiled versions left."""
    from torch._dynamo.exc import FailOnRecompileLimitHit

    return FailOnRecompileLimitHit


def compile_error() -> type[Exception]:
    """Return the error of a function that cannot be traced or compiled."""
    from torch._dynamo.exc import TorchDynamoException

    return TorchDynamoException


def compile_backend(name: str) -> Any:
    """Return the compiler of a ``torch.compile`` backend."""
    from torch._dynamo.backends.registry import lookup_backend

    return lookup_backend(name)


def symmetric_memory() -> Any:
    """Return the module that maps memory between GPUs (``empty``, ``rendezvous``)."""
    import torch.distributed._symmetric_memory as symmetric

    return symmetric


def process_group(name: str) -> dist.ProcessGroup:
    resolve: Any = dist.distributed_c10d._resolve_process_group  # type: ignore[attr-defined]
    return cast(dist.ProcessGroup, resolve(name))


def default_nccl_options() -> Any:
    """Return the options of the default group, which is NCCL's."""
    group: Any = dist.distributed_c10d._get_default_group()
    return group._get_backend(torch.device("cuda")).options


def nccl_communicator(group: dist.ProcessGroup, device: torch.device) -> int:
    """Return the address of the group's ``ncclComm_t``; there is one after its first collective."""
    backend: Any = group._get_backend(device)
    return int(backend._comm_ptr())


def fake_store() -> Any:
    """Return a store for process groups with the backend "fake", which needs no other rank."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore()


def fake_mode(**options: Any) -> Any:
    """Return a context in which tensors are fake: shapes without values."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(**options)


def fake_mode_of(tensor: Tensor) -> AbstractContextManager[Any]:
    """Return the context that a fake tensor was made in; for a real tensor, a context without effect."""
    from torch._subclasses.fake_tensor import FakeTensor

    return tensor.fake_mode if isinstance(tensor, FakeTensor) else nullcontext()


def without_modes() -> AbstractContextManager[Any]:
    """Return a context without the dispatch modes around it, such as ``fake_mode``."""
    return _disable_current_modes()


def is_operator(target: object) -> bool:
    """Return whether a node's target is an overload of a PyTorch operator."""
    return isinstance(target, torch._ops.OpOverload)


def floor_divisions() -> tuple[Any, Any]:
    """Return sympy's functions for divisions of traced sizes: with and without a remainder."""
    from torch.utils._sympy.functions import CleanDiv, FloorDiv

    return FloorDiv, CleanDiv


def has_persistent_buffer(module: nn.Module, name: str) -> bool:
    """Return whether the buffer is part of the module's ``state_dict``."""
    return name in module._buffers and name not in module._non_persistent_buffers_set


def clear_forward_hooks(module: nn.Module) -> None:
    """Remove all hooks before and after the module's own forward."""
    module._forward_hooks.clear()
    module._forward_pre_hooks.clear()
