"""Text encoders on CUDA, each call of a known form in one CUDA graph: the module's own kernels, replayed with one call.

Nothing is compiled: a new process captures within a second, and every process has the same kernels.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from engines.core.torch_private import end_failed_capture, tree_leaves, tree_map_only
from engines.fast.graph import CapturedStep, GraphPool

logger = logging.getLogger(__name__)

Results = Any
"""Result of a ``forward``: tensors in tuples, lists, dicts, or an output of transformers."""


def form_of(args: tuple[Any, ...], options: Mapping[str, Any]) -> Hashable:
    """Return the properties of a call that its preparation depends on: tensors' shapes and dtypes, other values."""
    return tuple(map(_key, args)), tuple((name, _key(options[name])) for name in sorted(options))


def _key(value: Any) -> Hashable:
    return (tuple(value.shape), value.dtype) if isinstance(value, Tensor) else repr(value)


class CapturedCall:
    """``forward`` for arguments of one form: tensors of the same shapes and dtypes, all else equal."""

    def __init__(
        self, forward: Callable[..., Results], args: tuple[Any, ...], options: Mapping[str, Any], pool: GraphPool
    ) -> None:
        self._forward = forward
        self._args = tuple(map(_without_tensor, args))
        self._options = {name: _without_tensor(value) for name, value in options.items()}
        self._results: Results = None
        with masks_as_traced():
            self._step = CapturedStep(self._run, _tensors(args, options), pool)

    def _run(self, tensors: Mapping[str, Tensor]) -> Tensor:
        args = tuple(tensors.get(str(place), value) for place, value in enumerate(self._args))
        options = {name: tensors.get(name, value) for name, value in self._options.items()}
        self._results = self._forward(*args, **options)
        return torch.empty(0)

    def __call__(self, *args: Any, **options: Any) -> Results:
        """Return copies of the results: the next replay of any graph of the pool overwrites them."""
        self._step(_tensors(args, options))
        return tree_map_only(Tensor, Tensor.clone, self._results)


def _laid_out(value: Any) -> Any:
    """Return an argument as a graph reads it."""
    return value.contiguous() if isinstance(value, Tensor) else value


def _without_tensor(value: Any) -> Any:
    return None if isinstance(value, Tensor) else value


def _tensors(args: tuple[Any, ...], options: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the arguments that are tensors: those by place have numbers as names."""
    named = {**{str(place): value for place, value in enumerate(args)}, **options}
    return {name: value for name, value in named.items() if isinstance(value, Tensor)}


@contextmanager
def masks_as_traced() -> Iterator[None]:
    """Let transformers make masks as it does in traced code: without a look at their values, which a graph cannot have.

    It does so by itself while a stream captures, but the runs before that must take the same path.
    """
    from transformers import masking_utils

    plain = masking_utils.is_tracing
    masking_utils.is_tracing = lambda tensor=None: True
    try:
        yield
    finally:
        masking_utils.is_tracing = plain


def run_as_captured(forward: Callable[..., Results], args: tuple[Any, ...], options: Mapping[str, Any]) -> Results:
    """Run a call with the bytes of a captured one: masks, and the layout of arguments, decide among kernels."""
    with masks_as_traced():
        return forward(*map(_laid_out, args), **{name: _laid_out(value) for name, value in options.items()})


class CapturedForward:
    """``forward`` captured for each form of its arguments that it is called with. For calls that are prepared.

    A form that cannot be captured runs uncaptured, with a warning. Its code reads a value from the GPU, or a replay
    would not read its arguments (tensors inside other arguments, or on the host).
    """

    def __init__(self, forward: Callable[..., Results], device: torch.device) -> None:
        self._forward = forward
        self._pool = GraphPool(device)
        self._calls: dict[Hashable, CapturedCall | None] = {}

    def __call__(self, *args: Any, **options: Any) -> Results:
        return self.run(form_of(args, options), args, options)

    def run(self, form: Hashable, args: tuple[Any, ...], options: Mapping[str, Any]) -> Results:
        """Run a call whose ``form`` (``form_of``) is known."""
        if form not in self._calls:
            self._calls[form] = self._captured(args, options)
        call = self._calls[form]
        return self.run_uncaptured(args, options) if call is None else call(*args, **options)

    def run_uncaptured(self, args: tuple[Any, ...], options: Mapping[str, Any]) -> Results:
        """Run a call with the bytes of a replay."""
        return run_as_captured(self._forward, args, options)

    def _captured(self, args: tuple[Any, ...], options: Mapping[str, Any]) -> CapturedCall | None:
        if not _are_read(args, options, self._pool.device):
            self._warn("an argument has tensors inside, or on another device")
            return None
        stream = torch.cuda.current_stream(self._pool.device)
        try:
            return CapturedCall(self._forward, args, options, self._pool)
        except RuntimeError as error:
            _recover(self._pool, stream)
            self._pool = GraphPool(self._pool.device)  # that of a capture that failed takes no other
            self._warn(str(error).partition("\n")[0])
            return None

    def _warn(self, reason: str) -> None:
        name = type(getattr(self._forward, "__self__", None)).__name__
        logger.warning("%s cannot be captured and runs call by call: %s", name, reason)


def _are_read(args: tuple[Any, ...], options: Mapping[str, Any], device: torch.device) -> bool:
    """Return whether a replay reads all tensors of the arguments: each is an argument itself, on ``device``."""
    tensors = _tensors(args, options).values()
    num_found = sum(isinstance(leaf, Tensor) for leaf in tree_leaves((args, dict(options))))
    return num_found == len(tensors) and all(x.device.type == device.type for x in tensors)


def _recover(pool: GraphPool, stream: torch.cuda.Stream) -> None:
    """Undo what a capture that failed leaves behind: its stream, and allocator and generator that expect its end.

    Otherwise the allocator would release no memory any more, and CUDA's generator would refuse to draw.
    """
    torch.cuda.set_stream(stream)
    torch.cuda.synchronize(pool.device)
    end_failed_capture(pool.device, pool.handle)
    graph = torch.cuda.CUDAGraph()  # a capture that succeeds resets the generator
    with torch.cuda.graph(graph, stream=pool.stream, capture_error_mode="thread_local"):
        torch.zeros(1, device=pool.device)
