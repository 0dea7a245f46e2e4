"""From the shapes a service will see to dynamic dims of the export and an optimization profile of the build."""

from __future__ import annotations

from collections.abc import Sequence

from torch.export import Dim

from engines.model import ModelInputs
from engines.tensorrt_engine.builder import Profile
from engines.tensorrt_engine.export import Exported
from engines.tensorrt_engine.trace import DynamicDims


def varying_dims(buckets: Sequence[ModelInputs]) -> DynamicDims:
    """The dims in which the buckets' inputs differ, as ``torch.export`` wants them. Empty: the shapes are static."""
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


def profile_over(exported: Exported, buckets: Sequence[ModelInputs], likely: int = 0) -> Profile:
    """One profile from the smallest to the largest shape of each engine input; bucket ``likely`` is tuned for."""
    fed = [exported.engine_inputs(exported.feed(inputs, 0)) for inputs in buckets]
    shapes = [{name: tuple(tensor.shape) for name, tensor in inputs.items()} for inputs in fed]
    covered = {}
    for name in exported.graph.dynamic_inputs():
        seen = [shape[name] for shape in shapes]
        smallest, largest = (tuple(pick(sizes) for sizes in zip(*seen, strict=True)) for pick in (min, max))
        covered[name] = (smallest, seen[likely], largest)
    return Profile(shapes=covered)
