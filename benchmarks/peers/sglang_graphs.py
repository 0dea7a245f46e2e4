"""SGLang's own CUDA graphs (``--enable-breakable-cuda-graph``, sglang 0.5.23), driven by its own runner.

It captures what lies before, between and after the attentions. They run eagerly, with their exchange between ranks.
Its documents validate them for FLUX.1-dev, FLUX.2-klein, FLUX.3-klein, Qwen-Image, Z-Image, LTX-2 and MiniMax-H3.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from benchmarks.peers.capture import forget_capture, reason_of


class GraphedTransformer:
    """One of its transformers behind its graphs, called as its stage of denoising does (``_bcg_run``).

    A call fills prompts up to a bucket and replays. The first call of its shapes captures, as a request of the warm-up
    does. Other attributes are the transformer's.
    """

    def __init__(self, transformer: Any) -> None:
        from sglang.multimodal_gen.runtime.breakable_cuda_graph import prompt_padding
        from sglang.multimodal_gen.runtime.server_args import DEFAULT_BCG_TEXT_BUCKETS

        self._transformer, self._padding, self._buckets = transformer, prompt_padding, DEFAULT_BCG_TEXT_BUCKETS
        self._run = _runner_class()(transformer, next(transformer.parameters()).device)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_transformer"], name)

    def __call__(self, **arguments: Any) -> Any:
        return self._run(**self._padded(arguments))

    def _padded(self, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        padder = self._padding.select_prompt_padder(self._transformer, arguments)
        if padder is None:
            padded: Mapping[str, Any] = self._padding.pad_masked_prompt_kwargs(arguments, self._buckets)
        else:
            padded = padder(arguments, self._transformer, self._buckets)
        return padded


def _runner_class() -> Any:
    from sglang.multimodal_gen.runtime.breakable_cuda_graph.runner import DiffusionBreakableCudaGraphRunner

    class Runner(DiffusionBreakableCudaGraphRunner):
        """Its runner, but it says why it cannot capture. Its own runs such a step eagerly."""

        def _should_capture_on_call(self, key: tuple[Any, ...]) -> bool:
            return True

        def capture(self, **arguments: Any) -> bool:
            key, stream = self._signature(arguments), torch.cuda.current_stream()
            try:
                self.entries[key] = self._capture(arguments, key)
            except Exception as error:
                forget_capture(stream)
                raise RuntimeError(f"SGLang cannot capture its graphs: {reason_of(error)}") from error
            return True

    return Runner


def weak_reference(x: Tensor) -> Tensor:
    """Return a tensor of the same memory on a GPU that does not keep the memory: SGLang's ``weak_ref_tensor``."""
    storage = x.untyped_storage()
    num_bytes = storage.nbytes() // x.itemsize * x.itemsize
    interface = {"shape": (num_bytes,), "typestr": "|u1", "data": (storage.data_ptr(), False), "version": 2}
    memory = torch.as_tensor(SimpleNamespace(__cuda_array_interface__=interface), device=x.device)
    return memory.view(x.dtype).as_strided(x.size(), x.stride(), x.storage_offset())
