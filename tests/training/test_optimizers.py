"""Muon's steps are orthogonal matrices of AdamW's size, whatever the gradient's scale."""

import pytest
import torch
from torch import nn

from training.optimizers import hidden_matrices, muon, optimizers


def _orthogonalised(matrix: torch.Tensor) -> torch.Tensor:
    """Return Muon's first step for a gradient, without the factor for AdamW's size."""
    parameter = nn.Parameter(torch.zeros_like(matrix))
    parameter.grad = matrix
    muon([parameter], lr=1.0).step()  # type: ignore[no-untyped-call]
    made: torch.Tensor = -parameter.detach() / (0.2 * max(matrix.shape) ** 0.5)
    return made


@pytest.mark.parametrize("shape", [(24, 24), (16, 48), (48, 16)])
def test_a_step_has_singular_values_near_one(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    values = torch.cat([torch.linalg.svdvals(_orthogonalised(1e-4 * torch.randn(*shape))) for _ in range(3)])
    assert values.quantile(0.05) > 0.6  # the smallest singular values of a square matrix may need more rounds
    assert values.max() < 1.3


def test_a_step_keeps_the_singular_vectors() -> None:
    torch.manual_seed(1)
    matrix = torch.randn(20, 30)
    u, _, vh = torch.linalg.svd(matrix, full_matrices=False)
    turned = u.mT @ _orthogonalised(matrix) @ vh.mT
    assert (turned - turned.diagonal().diag()).abs().max() < 0.02  # torch's Muon computes in bfloat16


def test_only_weights_of_blocks_are_hidden_matrices() -> None:
    block = nn.ModuleDict({"linear": nn.Linear(4, 4), "norm": nn.ModuleDict({"linear": nn.Linear(4, 8)})})
    module = nn.ModuleDict({"embed": nn.Embedding(5, 4), "blocks": nn.ModuleList([block]), "out": nn.Linear(4, 2)})
    assert [id(matrix) for matrix in hidden_matrices(module)] == [id(block["linear"].weight)]


def test_every_trained_parameter_has_one_optimizer() -> None:
    block = nn.ModuleDict({"linear": nn.Linear(4, 4), "frozen": nn.Linear(4, 4).requires_grad_(False)})
    module = nn.ModuleDict({"embed": nn.Embedding(5, 4), "blocks": nn.ModuleList([block]), "norm": nn.LayerNorm(4)})
    trained = {id(parameter) for parameter in module.parameters() if parameter.requires_grad}
    for with_muon, num_optimizers in ((False, 1), (True, 2)):
        chosen = optimizers(module, with_muon=with_muon)
        ids = [
            id(parameter) for optimizer in chosen for group in optimizer.param_groups for parameter in group["params"]
        ]
        assert len(chosen) == num_optimizers
        assert len(ids) == len(set(ids))
        assert set(ids) == trained


def test_a_step_has_adams_size_and_decays_the_weights() -> None:
    torch.manual_seed(2)
    matrix = nn.Parameter(torch.randn(32, 32))
    optimizer = muon([matrix], lr=0.01, weight_decay=0.0)
    before, matrix.grad = matrix.detach().clone(), 1e-6 * torch.randn(32, 32)
    optimizer.step()  # type: ignore[no-untyped-call]
    size = (matrix.detach() - before).square().mean().sqrt().item()
    assert size == pytest.approx(0.2 * 0.01, rel=0.2)
    decayed = muon([matrix], lr=0.1, weight_decay=0.5)
    before, matrix.grad = matrix.detach().clone(), torch.zeros(32, 32)
    decayed.step()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(matrix.detach(), 0.95 * before)


def test_muon_learns_faster_than_it_starts() -> None:
    torch.manual_seed(3)
    layers = nn.Sequential(nn.Linear(16, 32, bias=False), nn.Tanh(), nn.Linear(32, 16, bias=False))
    x = torch.randn(256, 16)
    y = x @ torch.randn(16, 16) / 4
    optimizer = muon(hidden_matrices(layers), lr=0.02, weight_decay=0.0)
    losses = []
    for _ in range(300):
        loss = (layers(x) - y).square().mean()
        layers.zero_grad()
        loss.backward()
        optimizer.step()  # type: ignore[no-untyped-call]
        losses.append(loss.item())
    assert losses[-1] < 0.1 * losses[0]
