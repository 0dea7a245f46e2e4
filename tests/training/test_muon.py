"""Muon's steps are orthogonal matrices of AdamW's size, whatever the gradient's scale."""

import pytest
import torch
from torch import nn

from training.muon import Muon, hidden_matrices, orthogonal


@pytest.mark.parametrize("shape", [(24, 24), (16, 48), (48, 16)])
def test_orthogonal_has_singular_values_near_one(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    values = torch.linalg.svdvals(orthogonal(1e-4 * torch.randn(3, *shape)))
    assert values.quantile(0.05) > 0.6  # the smallest singular values of a square matrix may need more rounds
    assert values.max() < 1.3


def test_orthogonal_keeps_the_singular_vectors() -> None:
    torch.manual_seed(1)
    matrix = torch.randn(1, 20, 30)
    u, _, vh = torch.linalg.svd(matrix, full_matrices=False)
    turned = u.mT @ orthogonal(matrix) @ vh.mT
    assert (turned - torch.diag_embed(turned.diagonal(dim1=-2, dim2=-1))).abs().max() < 1e-4


def test_only_weights_of_blocks_are_hidden_matrices() -> None:
    block = nn.ModuleDict({"linear": nn.Linear(4, 4), "norm": nn.ModuleDict({"linear": nn.Linear(4, 8)})})
    module = nn.ModuleDict({"embed": nn.Embedding(5, 4), "blocks": nn.ModuleList([block]), "out": nn.Linear(4, 2)})
    assert [id(matrix) for matrix in hidden_matrices(module)] == [id(block["linear"].weight)]


def test_a_step_has_adams_size_and_decays_the_weights() -> None:
    torch.manual_seed(2)
    matrix = nn.Parameter(torch.randn(32, 32))
    optimizer = Muon([matrix], lr=torch.tensor(0.01), weight_decay=0.0)
    before, matrix.grad = matrix.detach().clone(), 1e-6 * torch.randn(32, 32)
    optimizer.step()
    size = (matrix.detach() - before).square().mean().sqrt().item()
    assert size == pytest.approx(0.2 * 0.01, rel=0.2)
    decayed = Muon([matrix], lr=torch.tensor(0.1), weight_decay=0.5)
    before, matrix.grad = matrix.detach().clone(), torch.zeros(32, 32)
    decayed.step()
    torch.testing.assert_close(matrix.detach(), 0.95 * before)


def test_muon_learns_faster_than_it_starts() -> None:
    torch.manual_seed(3)
    layers = nn.Sequential(nn.Linear(16, 32, bias=False), nn.Tanh(), nn.Linear(32, 16, bias=False))
    x = torch.randn(256, 16)
    y = x @ torch.randn(16, 16) / 4
    optimizer = Muon(hidden_matrices(layers), lr=torch.tensor(0.02), weight_decay=0.0)
    losses = []
    for _ in range(300):
        loss = (layers(x) - y).square().mean()
        layers.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.1 * losses[0]
