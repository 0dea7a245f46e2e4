"""What makes small models train fast on a big GPU: mixed precision, compiled blocks, whole steps as CUDA graphs."""

from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
import torch._inductor.config
from torch import Tensor, nn
from torch.nn import functional

RECOMPILE_LIMIT = 64  # every block and every resolution may cost one; the default of 8 would fall back to eager
NORMS = ("GroupNorm", "WanRMS_norm")
Step = Callable[[], Tensor]


def speed_up(blocks: Iterable[nn.Module], device: str, *, dynamic: bool | None) -> None:
    """Runs each block in bfloat16 autocast, compiled on a GPU.

    The embeddings around the blocks stay in float32: a timestep rounded to bfloat16 would never show the model the
    noise levels between two of its values, which float32 sampling visits.
    """
    torch._dynamo.config.recompile_limit = RECOMPILE_LIMIT
    torch._inductor.config.triton.coalesce_tiling_analysis = False  # asserts on dynamic shapes in torch 2.11
    torch._inductor.config.triton.mix_order_reduction = False  # fails on dynamic shapes in torch 2.11
    torch.backends.cuda.enable_cudnn_sdp(False)  # its backward gives NaN for FLUX's double blocks (torch 2.11, H200)
    for block in blocks:
        forward = torch.compile(block.forward, dynamic=dynamic) if device == "cuda" else block.forward
        block.forward = torch.autocast(device, torch.bfloat16)(forward)


def speed_up_norms(module: nn.Module) -> None:
    """Compiles an auto-encoder's norms and lets them return their input's type, which autocast would widen."""
    torch._dynamo.config.recompile_limit = RECOMPILE_LIMIT
    for child in module.modules():
        if type(child).__name__ in NORMS:
            child.forward = _narrow(child)


@torch.compile(dynamic=True)
def _rms_norm(x: Tensor, gain: Tensor) -> Tensor:
    normed: Tensor = (functional.normalize(x.float(), dim=1) * gain).to(x.dtype)
    return normed


def _narrow(norm: Any) -> Callable[[Tensor], Tensor]:
    if type(norm).__name__ == "WanRMS_norm":  # one graph for all widths: the gain is no parameter, so no constant
        return lambda x: _rms_norm(x, norm.gamma * norm.scale)
    wide = norm.forward

    def narrow(x: Tensor) -> Tensor:
        return cast(Tensor, wide(x).to(x.dtype))

    compiled: Callable[[Tensor], Tensor] = torch.compile(narrow, dynamic=True)
    return compiled


def slow_down(module: nn.Module) -> None:
    """Undoes `speed_up` and `speed_up_norms`."""
    for child in module.modules():
        child.__dict__.pop("forward", None)


def eager_step(module: nn.Module, loss_of: Step) -> Step:
    """A step that fills the gradients and returns the loss."""

    def step() -> Tensor:
        module.zero_grad(set_to_none=True)
        loss = loss_of()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    return step


class GraphedStep:
    """The same as one CUDA graph, for a loss of one tensor of fixed shape.

    PyTorch's recipe for whole-network capture: gradients are None at capture, so each replay overwrites them.
    """

    def __init__(
        self, module: nn.Module, loss_of: Callable[[Tensor], Tensor], make_input: Callable[[], Tensor]
    ) -> None:
        self.make_input, self.input = make_input, make_input()
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                module.zero_grad(set_to_none=True)
                loss_of(self.input).backward()  # type: ignore[no-untyped-call]
        torch.cuda.current_stream().wait_stream(side)
        module.zero_grad(set_to_none=True)
        self.graph: Any = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.loss = loss_of(self.input)
            self.loss.backward()  # type: ignore[no-untyped-call]

    def __call__(self) -> Tensor:
        self.input.copy_(self.make_input())
        self.graph.replay()
        return self.loss.detach().clone()
