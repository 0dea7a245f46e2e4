"""``torch.compile`` for encoders and decoders, for shapes that were compiled before the first request.

Compilation takes many times longer than a request may wait: every other shape runs uncompiled.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from engines.core.torch_private import keep_kernel_choices, raise_recompile_limit, tree_map_only
from pipelines.vae.layers import check_decoder

INDUCTOR = "inductor"
ENCODERS = "text_encoder"
"""Prefix of the names of a pipeline's text encoders."""
BIAS = "compute_bias"
"""Method of T5's attention (and of similar models) that returns each head's bias by distance of tokens."""
MAX_VARIANTS = 64
"""Compiled versions of one function, which several encoders may share. PyTorch's default is 8."""


class CompiledForward:
    """A ``forward`` that runs ``compiled`` for signatures called inside ``compile_calls``, and ``plain`` otherwise."""

    def __init__(self, plain: Callable[..., Any], compiled: Callable[..., Any]) -> None:
        self.__wrapped__, self._compiled = plain, compiled  # inspect reads the signature of __wrapped__
        self._signatures: set[Hashable] = set()
        self.is_compiling = False

    def __call__(self, *args: Any, **options: Any) -> Any:
        if self.is_compiling:
            self._signatures.add(_signature(args, options))
        return (self._compiled if self.is_ready(*args, **options) else self.__wrapped__)(*args, **options)

    def is_ready(self, *args: Any, **options: Any) -> bool:
        """Return whether such a call is compiled, or is compiled by the next call."""
        return self.is_compiling or _signature(args, options) in self._signatures


def _signature(args: tuple[Any, ...], options: Mapping[str, Any]) -> Hashable:
    """Return the properties of a call that its compilation depends on."""
    return tuple(map(_key, args)), tuple((name, _key(options[name])) for name in sorted(options))


def _key(value: Any) -> Hashable:
    return (tuple(value.shape), value.dtype) if isinstance(value, Tensor) else repr(value)


@contextmanager
def compile_calls(forwards: Iterable[CompiledForward]) -> Iterator[None]:
    """Compile the calls of ``forwards`` that are made inside the block, now and later."""
    compiling = tuple(forwards)
    for forward in compiling:
        forward.is_compiling = True
    try:
        yield
    finally:
        for forward in compiling:
            forward.is_compiling = False


def compile_encoders(pipeline: Any, backend: str = INDUCTOR) -> tuple[CompiledForward, ...]:
    """Put compiled forwards into the text encoders of ``pipeline``. On CUDA each is one graph, replayed with one call.

    A graph's results are copied, since its next call (a second prompt) overwrites their memory.
    """
    raise_recompile_limit(MAX_VARIANTS)
    keep_kernel_choices()
    modules = [part for name, part in vars(pipeline).items() if name.startswith(ENCODERS)]
    forwards = []
    for module in (module for module in modules if isinstance(module, nn.Module)):
        _make_bias_contiguous(module)
        plain = module.forward
        mode = "reduce-overhead" if backend == INDUCTOR else None
        compiled = torch.compile(plain, dynamic=False, backend=backend, mode=mode)
        forwards.append(CompiledForward(plain, _copy_results(compiled)))
        module.__dict__["forward"] = forwards[-1]
    return tuple(forwards)


def _make_bias_contiguous(encoder: nn.Module) -> None:
    """Compute T5's bias in a layout that PyTorch's fused attention accepts.

    Otherwise attention falls back to products in float32, a third of the encoder's time.
    """
    for module in encoder.modules():
        if hasattr(module, BIAS):
            module.__dict__[BIAS] = _contiguous(getattr(module, BIAS))


def _contiguous(compute: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def run(*args: Any, **options: Any) -> Tensor:
        return compute(*args, **options).contiguous()

    return run


def _copy_results(compiled: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **options: Any) -> Any:
        return tree_map_only(Tensor, Tensor.clone, compiled(*args, **options))

    return run


def compile_decoder(vae: Any, backend: str = INDUCTOR) -> CompiledForward:
    """Put a compiled forward into the decoder of ``vae``. ValueError if the decoder is not supported.

    On CUDA it has weights of its own, channels last: compiled convolutions prefer that layout, plain ones do not.
    """
    check_decoder(vae, "compile")
    keep_kernel_choices()
    decoder = vae.decoder
    if any(weight.is_cuda for weight in decoder.parameters()):
        decoder = copy.deepcopy(decoder).to(memory_format=torch.channels_last)
    compiled = torch.compile(decoder.forward, dynamic=False, fullgraph=True, backend=backend)
    forward = CompiledForward(vae.decoder.forward, compiled)
    vae.decoder.__dict__["forward"] = forward
    return forward
