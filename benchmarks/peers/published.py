"""SGLang's and vLLM-Omni's transformers of FLUX.2, Z-Image, Qwen-Image, Wan and Cosmos 3, on one GPU or several.

SGLang's of FLUX.3 too, which vLLM-Omni has not. Several GPUs divide a step as the projects do it themselves.
"""

from __future__ import annotations

import gc
import importlib
import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves

from benchmarks.models.published import PublishedModel
from benchmarks.peers import sglang_models, vllm_omni_models
from benchmarks.peers.calls import known
from benchmarks.peers.layout import layout_of
from benchmarks.peers.step import begin_alone

MAKERS = ("vllm-omni", "vllm-omni-eager", "sglang", "sglang-graphs", "sglang-blocks")


@contextmanager
def peer_of(model: PublishedModel, maker: str) -> Iterator[Callable[[], Tensor]]:
    """Yield a step of all branches with the result of ``model.call``, in inference mode.

    The memory of the peer's weights is free afterwards. ValueError for unknown makers and transformers.
    """
    if maker not in MAKERS:
        raise ValueError(f"unknown peer {maker!r}; known: {', '.join(MAKERS)}")
    project = sglang_models if maker.startswith("sglang") else vllm_omni_models
    known(project.MODELS, type(model.module).__name__)
    begin_alone()
    layout = layout_of(model.module.config, len(model.branches), dist.get_world_size())
    transformer, prepare = project.transformer_of(model, maker, layout)
    mine = dist.get_rank() // layout.context  # its place among the ranks of one branch after the other
    try:
        gather = importlib.import_module(project.GROUPS).get_cfg_group().all_gather  # branch after branch
        calls = [prepare(transformer, own) for own in model.own_calls[mine :: layout.guidance]]

        @torch.inference_mode()
        def step() -> Tensor:
            outputs = [call() for call in calls]
            answers = torch.cat([x.flatten() for x in tree_leaves(outputs) if isinstance(x, Tensor)])
            gathered: Tensor = gather(answers)
            return gathered

        yield step
    finally:
        empty(transformer)


class OpenPeer:
    """The peer of ``model`` that is open: another way to time it needs no second copy of its weights."""

    def __init__(self, model: PublishedModel) -> None:
        self._model, self._maker, self._open = model, "", ExitStack()
        self._steps: list[Callable[[], Tensor]] = []
        self._device = next(model.module.parameters()).device

    def __enter__(self) -> OpenPeer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def step(self, maker: str) -> Callable[[], Tensor]:
        """Return the step of ``maker`` after closing that of another. The module may be on the CPU from now on."""
        if maker != self._maker or not self._steps:
            self.close()
            self._maker = maker
            self._steps = [self._open.enter_context(peer_of(self._model, maker))]
        return self._steps[0]

    def close(self) -> None:
        """Free its memory. The module is where it was afterwards."""
        if self._maker:
            self._maker, self._steps = "", []
            self._open.close()
            torch._dynamo.reset()  # which keeps what it compiled
            gc.collect()  # modules with hooks hold themselves
            torch.cuda.empty_cache()
            self._model.module.to(self._device)


def empty(transformer: Any) -> None:
    """Free its own weights, whatever still holds it: projects keep layers in tables, compilers compiled code."""
    for tensor in itertools.chain(transformer.parameters(), transformer.buffers()):
        tensor.data = tensor.data.new_empty(0)
