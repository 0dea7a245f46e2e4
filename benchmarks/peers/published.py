"""Other projects' transformers of published models, on one GPU or several, on the same weights.

SGLang's and vLLM-Omni's of FLUX, Z-Image, Qwen-Image, Wan, Cosmos 3, LTX-2 and MiniMax-H3, vLLM-Omni's of
HunyuanVideo 1.5, and xDiT's attention in FLUX.1. Several GPUs divide a step as the projects do it themselves.
"""

from __future__ import annotations

import gc
import importlib
import itertools
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves

from benchmarks.models.published import PublishedModel
from benchmarks.peers import sglang_models, vllm_omni_models, xdit
from benchmarks.peers.calls import known
from engines.core.spec import ParallelSpec

XDIT, TENSOR = "xdit", "vllm-omni-tensor"
VLLM_OMNI = ("vllm-omni", "vllm-omni-eager", TENSOR)
MAKERS = (*VLLM_OMNI, *sglang_models.COMPILED, XDIT)
HEADS = ("num_key_value_heads", "num_attention_heads", "n_kv_heads")
"""Names in configurations of transformers. The first that is present counts."""
Step = Callable[[], Tensor]


def layout_of(config: Mapping[str, Any], num_branches: int, num_ranks: int) -> ParallelSpec:
    """Return each branch on its own ranks if the ranks suffice, as both projects advise.

    Within a branch: Ulysses as far as the heads of attention divide, and a ring of such groups beyond. Ranks that share
    a sequence are neighbours.
    """
    branches = math.gcd(num_branches, num_ranks)
    sequence = num_ranks // branches
    ulysses = math.gcd(next(config[name] for name in HEADS if name in config), sequence)
    return ParallelSpec(guidance=branches, ulysses=ulysses, ring=sequence // ulysses)


def of_project(maker: str) -> ModuleType | None:
    """Return the module of a project that brings its own transformers and precisions; None for other makers."""
    if maker.startswith("vllm-omni"):
        return vllm_omni_models
    return sglang_models if maker.startswith("sglang") else None


@contextmanager
def peer_of(model: PublishedModel, maker: str, precision: str = "native") -> Iterator[Step]:
    """Yield a step of all branches with the result of ``model.call``, in inference mode.

    The memory of the peer's weights is free afterwards. ValueError for unknown makers and transformers.
    """
    if maker not in MAKERS:
        raise ValueError(f"unknown peer {maker!r}; known: {', '.join(MAKERS)}")
    project, name = of_project(maker), type(model.module).__name__
    known(project.MODELS if project else xdit.MODELS, name)
    begin_alone()
    if project is None:
        with xdit.opened(model.module, model.own_calls) as step:
            yield torch.inference_mode()(step)
        return
    layout = layout_of(model.module.config, len(model.branches), dist.get_world_size())
    layout = ParallelSpec(tensor=dist.get_world_size()) if maker == TENSOR else layout
    transformer, prepare = project.transformer_of(model, maker, layout, precision)
    mine = dist.get_rank() // layout.context % layout.guidance  # its branch
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


def begin_alone() -> None:
    """Do for one rank what a launcher does for several: peers ask for device and groups."""
    os.environ.setdefault("LOCAL_RANK", "0")
    if not dist.is_initialized():
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=0, world_size=1)


class OpenPeer:
    """The peer of ``model`` that is open: another way to time it needs no second copy of its weights."""

    def __init__(self, model: PublishedModel, precision: str = "native") -> None:
        self._model, self._precision, self._maker, self._open = model, precision, "", ExitStack()
        self._steps: list[Step] = []
        self._device = next(model.module.parameters()).device

    def __enter__(self) -> OpenPeer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def step(self, maker: str) -> Step:
        """Return the step of ``maker`` after closing that of another. The module may be on the CPU from now on."""
        if maker != self._maker or not self._steps:
            self.close()
            self._maker = maker
            self._steps = [self._open.enter_context(peer_of(self._model, maker, self._precision))]
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
