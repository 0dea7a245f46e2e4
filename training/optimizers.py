"""The optimisers of a run: Muon for the matrices in the blocks, AdamW for everything else.

Muon is that of Jordan et al. (kellerjordan.github.io/posts/muon). Its steps are scaled to
AdamW's usual size, so both share one learning rate (Liu et al., arXiv 2502.16982).
"""

from collections.abc import Sequence

from torch import Tensor, nn
from torch.optim import AdamW, Muon, Optimizer


def hidden_matrices(module: nn.Module) -> list[Tensor]:
    """Return the weights of the linear layers in stacks of blocks, without those of embeddings, modulations and
    outputs."""
    return [
        child.weight
        for name, child in module.named_modules()
        if isinstance(child, nn.Linear)
        and child.weight.requires_grad
        and any(part.isdigit() for part in name.split("."))
        and "norm" not in name
    ]


def muon(matrices: Sequence[Tensor], *, lr: float = 0.0, weight_decay: float = 0.05) -> Muon:
    """Return Muon for these matrices (rows, columns)."""
    return Muon(matrices, lr=lr, weight_decay=weight_decay, momentum=0.95, adjust_lr_fn="match_rms_adamw")


def _adam(parameters: Sequence[Tensor]) -> AdamW:
    groups: list[dict[str, object]] = [
        {"params": [parameter for parameter in parameters if parameter.ndim > 1], "weight_decay": 0.01},
        {"params": [parameter for parameter in parameters if parameter.ndim <= 1], "weight_decay": 0.0},
    ]
    return AdamW(groups, lr=0.0, betas=(0.9, 0.98), fused=True)


def optimizers(module: nn.Module, *, with_muon: bool) -> list[Optimizer]:
    """Return AdamW, and with `with_muon` Muon for the blocks' matrices. `fit` sets their learning rates."""
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    matrices = hidden_matrices(module) if with_muon else []
    rest = [parameter for parameter in trained if all(parameter is not matrix for matrix in matrices)]
    return [_adam(rest), muon(matrices)] if matrices else [_adam(rest)]
