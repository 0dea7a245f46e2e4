"""Muon: momentum made orthogonal before each step (Jordan et al., kellerjordan.github.io/posts/muon).

Steps are scaled to AdamW's usual size, so both share one learning rate (Liu et al., arXiv 2502.16982). Nothing here
waits for the GPU or reads numbers back, so a step can be part of a CUDA graph.
"""

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn

_QUINTIC = (3.4445, -4.7750, 2.0315)
_ROUNDS = 5
_ADAM_LIKE = 0.2  # root mean square of an AdamW step, per learning rate


def orthogonal(matrices_NRC: Tensor) -> Tensor:
    """Nearest matrices with all singular values about 1, by Newton-Schulz iterations."""
    x: Tensor = matrices_NRC.to(torch.bfloat16 if matrices_NRC.is_cuda else matrices_NRC.dtype)
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    a, b, c = _QUINTIC
    for _ in range(_ROUNDS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.mT if tall else x).to(matrices_NRC.dtype)


def hidden_matrices(module: nn.Module) -> list[Tensor]:
    """Weights of the linear layers in stacks of blocks. Embeddings, modulations and outputs are not among them."""
    return [
        child.weight
        for name, child in module.named_modules()
        if isinstance(child, nn.Linear)
        and child.weight.requires_grad
        and any(part.isdigit() for part in name.split("."))
        and "norm" not in name
    ]


class Muon(torch.optim.Optimizer):
    """One group a shape, so that matrices of one shape are orthogonalised together."""

    def __init__(self, matrices: list[Tensor], *, lr: Tensor, momentum: float = 0.95, weight_decay: float = 0.05):
        by_shape: dict[torch.Size, list[Tensor]] = defaultdict(list)
        for matrix in matrices:
            by_shape[matrix.shape].append(matrix)
        groups = [{"params": group} for group in by_shape.values()]
        super().__init__(groups, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        for matrix in matrices:
            self.state[matrix]["momentum"] = torch.zeros_like(matrix)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            self._step(group)

    def _step(self, group: dict[str, Any]) -> None:
        matrices, lr = group["params"], group["lr"]
        gradients = [matrix.grad for matrix in matrices]
        momenta = [self.state[matrix]["momentum"] for matrix in matrices]
        torch._foreach_lerp_(momenta, gradients, 1 - group["momentum"])
        ahead = torch._foreach_lerp(gradients, momenta, group["momentum"])  # Nesterov's
        steps = orthogonal(torch.stack(ahead)) * (_ADAM_LIKE * max(matrices[0].shape) ** 0.5)
        torch._foreach_mul_(matrices, 1 - lr * group["weight_decay"])
        torch._foreach_sub_(matrices, list((lr * steps).unbind()))
