"""From the shapes a service will see to dynamic dims of the export and an optimization profile of the build."""

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
from engines.tensorrt_engine.export.exported import Exported, place_of
from engines.tensorrt_engine.export.trace import DynamicDims


def varying_dims(buckets: Sequence[ModelInputs]) -> DynamicDims:
    """Returns the dims in which the buckets' inputs differ, as ``torch.export`` wants them; none if static."""
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


def profile_over(exported: Exported, buckets: Sequence[ModelInputs]) -> Profile:
    """Returns one profile from the smallest to the largest shape of each engine input; tuned for the first bucket."""
    engine_inputs = [exported.engine_inputs(exported.run_prologue(inputs, 0)) for inputs in buckets]
    covered = {}
    for name in exported.graph.dynamic_inputs():
        shapes = [tuple(inputs[name].shape) for inputs in engine_inputs]
        smallest, largest = (tuple(pick(sizes) for sizes in zip(*shapes, strict=True)) for pick in (min, max))
        covered[name] = (smallest, shapes[0], largest)
    return Profile(shapes=covered)


def divides(model: DenoiserModel, branch: Branch, team: Team) -> bool:
    """Whether the team's ranks get equal shares of every token stream: an engine of varying sizes pads none.

    Where rings or gathers cross Ulysses groups, ranks share queries among them, and these shares must be equal too.
    """
    spec = team.spec
    num_shares = team.context.size * (spec.ring * spec.allgather_kv if spec.ulysses > 1 else 1)
    return all(length % num_shares == 0 for length in model.stream_lengths(branch.arguments).values())


def sharing(model: DenoiserModel, branches: Sequence[Branch], team: Team) -> list[Branch]:
    """Returns those of ``branches``, all of one module, that one engine of varying sizes is for; none if they are of
    one size. Constants (grids, for instance) are those of one size: where there are any, each has its own engine.
    """
    found = [branch for branch in branches if not branch.constants and divides(model, branch, team)]
    return found if len({shape_of(branch) for branch in found}) > 1 else []


def lies_between(
    model: DenoiserModel, branch: Branch, team: Team, shared: Sequence[Branch], exported: Exported
) -> bool:
    """Whether ``exported``, made over ``shared``, takes ``branch``: no smaller or larger than they are in any dim.

    Inputs of the engine must lie in its profile too: tokens are a product, and two sizes within may have too many.
    """
    if branch.constants or not divides(model, branch, team) or set(branch.inputs) != set(shared[0].inputs):
        return False
    for name, tensor in branch.inputs.items():
        others = [each.inputs[name] for each in shared]
        if tensor.dtype != others[0].dtype or tensor.ndim != others[0].ndim:
            return False
        for dim, size in enumerate(tensor.shape):
            sizes = [other.shape[dim] for other in others]
            if not min(sizes) <= size <= max(sizes):
                return False
    return exported.graph.takes(exported.engine_inputs(exported.run_prologue(branch.inputs, place_of(team))))


def check_branches(buckets: Sequence[Branch]) -> tuple[Branch, ...]:
    """Returns two branches of the first size to check a gang with, of two modules if there are; alike on every rank."""
    modules = list(dict.fromkeys(bucket.module for bucket in buckets))
    chosen = [next(bucket for bucket in buckets if bucket.module == name) for name in (modules[0], modules[-1])]
    return tuple(_with_noise(branch, seed) for seed, branch in enumerate(chosen))


def _with_noise(branch: Branch, seed: int) -> Branch:
    """Fills blank inputs (a prompt that nobody wrote): zeros would hide what is not exchanged."""
    generator = torch.Generator().manual_seed(seed)

    def filled(x: Tensor) -> Tensor:
        blank = x.is_floating_point() and x.numel() > 1 and not bool(x.any())
        return torch.randn(x.shape, generator=generator).to(x.device, x.dtype) if blank else x

    return dataclasses.replace(branch, inputs={name: filled(x) for name, x in branch.inputs.items()}, schedule=None)
