"""Fast training of small models on a big GPU: mixed precision, compiled blocks, CUDA graphs."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any, cast

import torch
import torch._inductor.config
from torch import Tensor, nn
from torch.nn import functional

RECOMPILE_LIMIT = 64  # every block and every resolution may cost one; the default of 8 would fall back to eager
NORMS = ("GroupNorm", "WanRMS_norm")
WARM_UP_CALLS = 3
TensorFunction = Callable[[], Tensor]


def prepare(seed: int) -> None:
    """Seed the run. Let the GPU use TensorFloat-32 and the convolutions that it measures to be fastest."""
    torch.manual_seed(seed)
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.benchmark = True


def channels_last(module: nn.Module) -> None:
    """Store convolutions' weights, and so their activations, with the channels innermost."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    for child in module.modules():
        if isinstance(child, nn.Conv2d | nn.Conv3d):
            child.weight.data = child.weight.data.contiguous(memory_format=formats[child.weight.ndim])


def speed_up(blocks: Iterable[nn.Module], device: str, *, dynamic: bool | None) -> None:
    """Run each block in bfloat16 autocast, compiled on a GPU.

    The embeddings around the blocks stay in float32. Sampling in float32 visits noise levels between two values of
    bfloat16, which the model would never see in training.
    """
    torch._dynamo.config.recompile_limit = RECOMPILE_LIMIT
    torch._inductor.config.triton.coalesce_tiling_analysis = False  # asserts on dynamic shapes in torch 2.11
    torch._inductor.config.triton.mix_order_reduction = False  # fails on dynamic shapes in torch 2.11
    torch.backends.cuda.enable_cudnn_sdp(False)  # its backward gives NaN for FLUX's double blocks (torch 2.11, H200)
    for block in blocks:
        forward = torch.compile(block.forward, dynamic=dynamic) if device == "cuda" else block.forward
        block.forward = torch.autocast(device, torch.bfloat16)(forward)


def speed_up_norms(module: nn.Module) -> None:
    """Compile an auto-encoder's norms and let them return their input's type, which autocast would widen."""
    torch._dynamo.config.recompile_limit = RECOMPILE_LIMIT
    for child in module.modules():
        if type(child).__name__ in NORMS:
            child.forward = _type_preserving(child)


def _rms_norm(x: Tensor, gain: Tensor) -> Tensor:
    normed: Tensor = (functional.normalize(x.float(), dim=1) * gain).to(x.dtype)
    return normed


@cache
def _compiled_rms_norm() -> Callable[[Tensor, Tensor], Tensor]:
    """Compile the norm at the first call: the import of the compiler takes seconds."""
    compiled: Callable[[Tensor, Tensor], Tensor] = torch.compile(_rms_norm, dynamic=True)
    return compiled


def _type_preserving(norm: Any) -> Callable[[Tensor], Tensor]:
    if type(norm).__name__ == "WanRMS_norm":  # one graph for all widths: the gain is no parameter, so no constant
        rms_norm = _compiled_rms_norm()
        return lambda x: rms_norm(x, norm.gamma * norm.scale)
    forward = norm.forward

    def preserving(x: Tensor) -> Tensor:
        return cast(Tensor, forward(x).to(x.dtype))

    compiled: Callable[[Tensor], Tensor] = torch.compile(preserving, dynamic=True)
    return compiled


def uncompiled(*, on: bool) -> AbstractContextManager[object]:
    """Return a context in which compiled blocks run as they are written: for shapes that come too rarely to wait for
    another compilation."""
    context: AbstractContextManager[object] = torch.compiler.set_stance("force_eager") if on else nullcontext()
    return context


def undo_speed_up(module: nn.Module) -> None:
    """Undo `speed_up` and `speed_up_norms`."""
    for child in module.modules():
        child.__dict__.pop("forward", None)


class GraphedFunction:
    """A function whose work is all on the GPU, as a CUDA graph: every call runs it once.

    The first calls run it eagerly, which compiles and allocates all that it keeps; then it is captured and replayed.
    All graphs share one memory pool: they run one after the other, and each result is copied out.
    """

    _pool: Any = None

    def __init__(self, function: TensorFunction) -> None:
        self.function, self.calls = function, 0
        self.graph: Any = None

    def __call__(self) -> Tensor:
        if self.graph is None and self.calls < WARM_UP_CALLS:
            self.calls += 1
            return self._on_side_stream()
        if self.graph is None:
            self._capture()
        self.graph.replay()
        return self.result.clone()

    def _on_side_stream(self) -> Tensor:
        """Call the function on a separate stream, as warm-up calls before a capture must be."""
        current, side = torch.cuda.current_stream(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(current)
        with torch.cuda.stream(side):
            result = self.function()
        current.wait_stream(side)
        return result.clone()

    def _capture(self) -> None:
        GraphedFunction._pool = GraphedFunction._pool or torch.cuda.graph_pool_handle()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, pool=GraphedFunction._pool):
            self.result = self.function()


def graphed(function: TensorFunction, *, on: bool) -> TensorFunction:
    """Return the function itself, or a `GraphedFunction` of it."""
    return GraphedFunction(function) if on else function
