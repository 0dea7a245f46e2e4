"""Whole jobs of tiny checkpoints on the fake GPU, with steps recorded like a CUDA graph."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from engines.core.model import StepTensors
from engines.torch_engine import steps
from engines.torch_engine.engine import TorchEngine
from engines.torch_engine.hoisted import HoistedCache
from pipelines import whole_pipeline
from pipelines.blocks.opened import OpenedPipeline
from pipelines.models.generic.whole import WholeSpec
from tests.pipelines.support.pretend_gpu import PretendGpu, put_on_gpu

CPU = torch.device("cpu")
upsampler: Any = import_module("pipelines.models.ltx2.upsampler")


@contextmanager
def pretended_gpu() -> Iterator[PretendGpu]:
    """Load parts on the CPU and put them on the device. Steps are recorded again at each replay."""
    with PretendGpu() as gpu, ExitStack() as stack:
        runner = functools.partialmethod(_init_capturing, steps.StepRunner.__init__)
        for owner, name, value in (
            (steps, "GraphPool", lambda device: None),
            (steps, "CapturedStep", functools.partial(RecordedStep, gpu)),
            (steps.StepRunner, "__init__", runner),
            (OpenedPipeline, "load_part", _placed(OpenedPipeline.load_part)),
            (whole_pipeline, "load_whole", functools.partial(_load_whole, whole_pipeline.load_whole)),
            (upsampler, "load_folder", functools.partial(_load_folder, upsampler.load_folder)),
            (whole_pipeline, "_call", functools.partial(_call, whole_pipeline._call)),
        ):
            stack.enter_context(patch.object(owner, name, value))
        yield gpu


@contextmanager
def hoisted_again() -> Iterator[list[Hashable]]:
    """Yield the owners of cached tensors that a step computes although the step before it did."""
    found: list[Hashable] = []
    before, now = set[Hashable](), set[Hashable]()
    predict, get = TorchEngine.predict, HoistedCache._get

    def next_step(self: TorchEngine, *args: Any) -> tuple[Tensor, ...]:
        nonlocal before, now
        before, now = now, set()
        return predict(self, *args)

    def observed(self: HoistedCache, owner: Hashable, sources: tuple[Tensor, ...], make: Callable[[], Any]) -> Any:
        def noted() -> Any:
            now.add(owner)
            found.extend({owner} & before)
            return make()

        return get(self, owner, sources, noted)

    with patch.object(TorchEngine, "predict", next_step), patch.object(HoistedCache, "_get", observed):
        yield found


class RecordedStep:
    """Stands for a ``CapturedStep``."""

    def __init__(
        self, gpu: PretendGpu, function: Callable[[StepTensors], Tensor], example: StepTensors, pool: Any
    ) -> None:
        self._gpu, self._function, self.example = gpu, function, example
        self(example)

    def __call__(self, tensors: StepTensors) -> Tensor:
        with self._gpu.recording():
            return self._function(self.inputs(tensors))

    def inputs(self, tensors: StepTensors) -> StepTensors:
        """Return the inputs of a replay: the values of its caller."""
        return tensors

    def close(self) -> None:
        """Do nothing: there is no graph."""


def _init_capturing(self: Any, init: Callable[..., None], *args: Any, config: Any, **kwargs: Any) -> None:
    init(self, *args, config=replace(config, capture=not config.offloaded_blocks), **kwargs)


def _placed(load: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(load)
    def load_part(self: OpenedPipeline, *args: Any, **kwargs: Any) -> Any:
        with patch.object(self, "models_device", CPU):
            part = load(self, *args, **kwargs)
        if isinstance(part, nn.Module):
            put_on_gpu(part)
        return part

    return load_part


def _load_folder(load: Callable[..., Any], spec: Any, folder: Path, device: torch.device, dtype: torch.dtype) -> Any:
    part = load(spec, folder, CPU, dtype)
    put_on_gpu(part)
    return part


def _load_whole(load: Callable[..., Any], spec: WholeSpec, path: Path, device: torch.device, dtype: torch.dtype) -> Any:
    pipeline = load(spec, path, CPU, dtype)
    for part in pipeline.components.values():
        if isinstance(part, nn.Module):
            put_on_gpu(part)
    return pipeline


def _call(call: Callable[..., Any], *args: Any) -> Any:
    """Run the call in a mode of its own: it has its own thread, and torch's modes are per thread."""
    with PretendGpu():
        return call(*args)
