"""Dynamic dims of an export and optimization profile of a build, from a service's expected shapes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.export import Dim

from engines.core.model import Branch, DenoiserModel, ModelInputs
from engines.parallel.division import shape_of
from engines.parallel.mesh import Team
from engines.tensorrt_engine.build.builder import Profile
from engines.tensorrt_engine.export.exported import EngineExport, rank_index_of
from engines.tensorrt_engine.export.trace import DynamicDims


def varying_dims(buckets: Sequence[ModelInputs]) -> DynamicDims:
    """Return the dims in which the buckets' inputs differ, in ``torch.export``'s form; empty if none do."""
    first, *others = buckets
    dims: dict[str, dict[int, object]] = {}
    for name, tensor in first.items():
        for other in others:
            if other[name].ndim != tensor.ndim:
                raise ValueError(
                    f"input {name!r} has {tensor.ndim} dims in one bucket and {other[name].ndim} in another"
                )
        varying = [d for d in range(tensor.ndim) if any(other[name].shape[d] != tensor.shape[d] for other in others)]
        if varying:
            dims[name] = dict.fromkeys(varying, Dim.AUTO)
    return dims


def profile_over(exported: EngineExport, buckets: Sequence[ModelInputs]) -> Profile:
    """Return a profile from the smallest to the largest shape of each engine input, tuned for the first bucket."""
    engine_inputs = [exported.engine_inputs(exported.run_prologue(inputs, 0)) for inputs in buckets]
    covered = {}
    for name in exported.graph.dynamic_inputs():
        shapes = [tuple(inputs[name].shape) for inputs in engine_inputs]
        smallest, largest = (tuple(pick(sizes) for sizes in zip(*shapes, strict=True)) for pick in (min, max))
        covered[name] = (smallest, shapes[0], largest)
    return Profile(shapes=covered)


def divides_evenly(model: DenoiserModel, branch: Branch, team: Team) -> bool:
    """Return whether all ranks get equal shares of every token stream: an engine of varying sizes has no padding.

    With Ulysses and a ring or gather, query shares must be equal too.
    """
    spec = team.spec
    num_shares = team.context.size * (spec.ring * spec.allgather_kv if spec.ulysses > 1 else 1)
    return all(length % num_shares == 0 for length in model.stream_lengths(branch.arguments).values())


def shared_branches(model: DenoiserModel, branches: Sequence[Branch], team: Team) -> list[Branch]:
    """Return the branches for one engine of varying sizes; empty if all have one size.

    ``branches`` are of one module. Constants (grids) belong to one size, so a branch with any has its own engine.
    """
    found = [branch for branch in branches if not branch.constants and divides_evenly(model, branch, team)]
    return found if len({shape_of(branch) for branch in found}) > 1 else []


def fits_export(
    model: DenoiserModel, branch: Branch, team: Team, shared: Sequence[Branch], exported: EngineExport
) -> bool:
    """Return whether ``exported``, made for ``shared``, accepts ``branch``: inputs within the bounds of ``shared``."""
    if branch.constants or not divides_evenly(model, branch, team) or set(branch.inputs) != set(shared[0].inputs):
        return False
    for name, tensor in branch.inputs.items():
        others = [each.inputs[name] for each in shared]
        if tensor.dtype != others[0].dtype or tensor.ndim != others[0].ndim:
            return False
        for dim, size in enumerate(tensor.shape):
            sizes = [other.shape[dim] for other in others]
            if not min(sizes) <= size <= max(sizes):
                return False
    # Engine inputs need a check too: two dims within bounds may give too many tokens, their product.
    return exported.graph.takes(exported.engine_inputs(exported.run_prologue(branch.inputs, rank_index_of(team))))


def check_branches(buckets: Sequence[Branch]) -> tuple[Branch, ...]:
    """Return two branches for a gang's self-check, of two modules if possible; equal on every rank."""
    modules = list(dict.fromkeys(bucket.module for bucket in buckets))
    chosen = [next(bucket for bucket in buckets if bucket.module == name) for name in (modules[0], modules[-1])]
    return tuple(_with_noise(branch, seed) for seed, branch in enumerate(chosen))


def _with_noise(branch: Branch, seed: int) -> Branch:
    """Replace all-zero inputs (an empty prompt) by noise: zeros would hide missing exchanges."""
    generator = torch.Generator().manual_seed(seed)

    def fill(x: Tensor) -> Tensor:
        blank = x.is_floating_point() and x.numel() > 1 and not bool(x.any())
        return torch.randn(x.shape, generator=generator).to(x.device, x.dtype) if blank else x

    return dataclasses.replace(branch, inputs={name: fill(x) for name, x in branch.inputs.items()}, schedule=None)
