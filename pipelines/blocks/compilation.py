"""Encoders and decoders compiled (``torch.compile``), for calls of the shapes that were prepared before anybody asked.

To compile takes many times longer than a request may wait: every other shape runs as it is written.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from pipelines.vae.known import check_decoder

INDUCTOR = "inductor"
ENCODERS = "text_encoder"
"""How the names begin of a pipeline's parts that read prompts."""
BIAS = "compute_bias"
"""The method of T5's attention, and of its kin's, that gives each head its bias for each distance of two tokens."""
MAX_VARIANTS = 64
"""Compiled versions of one function, which several encoders may share: PyTorch's own limit of 8 is for accidents."""


class Prepared:
    """A ``forward`` that is ``compiled`` for calls as they were made while it was ``preparing``, and ``plain`` else."""

    def __init__(self, plain: Callable[..., Any], compiled: Callable[..., Any]) -> None:
        self.__wrapped__, self._compiled = plain, compiled  # by which inspect finds the signature
        self._known: set[Hashable] = set()
        self.preparing = False

    def __call__(self, *args: Any, **options: Any) -> Any:
        if self.preparing:
            self._known.add(_call(args, options))
        return (self._compiled if self.is_ready(*args, **options) else self.__wrapped__)(*args, **options)

    def is_ready(self, *args: Any, **options: Any) -> bool:
        """Returns whether such a call is compiled, or will be with the next one."""
        return self.preparing or _call(args, options) in self._known


def _call(args: tuple[Any, ...], options: Mapping[str, Any]) -> Hashable:
    return tuple(map(_form, args)), tuple((name, _form(options[name])) for name in sorted(options))


def _form(value: Any) -> Hashable:
    """What a value is compiled for."""
    return (tuple(value.shape), value.dtype) if isinstance(value, Tensor) else repr(value)


@contextmanager
def preparing(parts: Iterable[Prepared]) -> Iterator[None]:
    """What is called inside the block is compiled, now and later."""
    held = tuple(parts)
    for part in held:
        part.preparing = True
    try:
        yield
    finally:
        for part in held:
            part.preparing = False


def compile_encoders(pipeline: Any, backend: str = INDUCTOR) -> tuple[Prepared, ...]:
    """Puts compiled forwards into the text encoders of ``pipeline``; on CUDA each is one graph, replayed with one call.

    A graph's results lie in its own memory, which its next call overwrites (a second prompt's), so they are copied.
    """
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, MAX_VARIANTS)
    modules = [part for name, part in vars(pipeline).items() if name.startswith(ENCODERS)]
    parts = []
    for module in (module for module in modules if isinstance(module, nn.Module)):
        _lay_out_bias(module)
        plain = module.forward
        mode = "reduce-overhead" if backend == INDUCTOR else None
        compiled = torch.compile(plain, dynamic=False, backend=backend, mode=mode)
        parts.append(Prepared(plain, _copied(compiled)))
        module.__dict__["forward"] = parts[-1]
    return tuple(parts)


def _lay_out_bias(encoder: nn.Module) -> None:
    """T5 computes what it adds to the scores in a layout that PyTorch's fused attention refuses: it would fall back on
    products in float32, a third of the encoder's time."""
    for module in encoder.modules():
        if hasattr(module, BIAS):
            module.__dict__[BIAS] = _contiguous(getattr(module, BIAS))


def _contiguous(compute: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def run(*args: Any, **options: Any) -> Tensor:
        return compute(*args, **options).contiguous()

    return run


def _copied(compiled: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **options: Any) -> Any:
        return tree_map_only(Tensor, Tensor.clone, compiled(*args, **options))

    return run


def compile_decoder(vae: Any, backend: str = INDUCTOR) -> Prepared:
    """Puts a compiled forward into the decoder of ``vae``. On CUDA it has weights of its own with the channels last,
    as convolutions want them when they are compiled, but not when they are not. ValueError if it cannot be compiled."""
    check_decoder(vae, "compile")
    decoder = vae.decoder
    if any(weight.is_cuda for weight in decoder.parameters()):
        decoder = copy.deepcopy(decoder).to(memory_format=torch.channels_last)
    compiled = torch.compile(decoder.forward, dynamic=False, fullgraph=True, backend=backend)
    prepared = Prepared(vae.decoder.forward, compiled)
    vae.decoder.__dict__["forward"] = prepared
    return prepared
