"""Faster encoders and decoders.

On CUDA, decoders have fused norms. Encoders are captured in graphs, for forms that were prepared before the first
request; others run with the same bytes. On the CPU ``torch.compile`` does both. It takes many times longer than a
request may wait: shapes that were not prepared run as they are written, with other rounding.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

from engines.core.torch_private import keep_kernel_choices, raise_recompile_limit
from pipelines.blocks.captured import CapturedForward, form_of, run_as_captured
from pipelines.blocks.offloaded_layers import text_encoders_of
from pipelines.vae.fused import fuse_decoder
from pipelines.vae.fused_clips import check_preparable, fuse_clip_decoder, fused_dtype, is_supported_clip_decoder
from pipelines.vae.layers import is_supported_decoder

INDUCTOR = "inductor"
BIAS = "compute_bias"
"""Method of T5's attention (and of similar models) that returns each head's bias by distance of tokens."""
MAX_VARIANTS = 64
"""Compiled versions of one function, which several encoders may share. PyTorch's default is 8."""


class CompiledForward:
    """A ``forward`` that runs ``compiled`` for forms called inside ``compile_calls``, and ``plain`` otherwise.

    ``every_form``: it always runs ``compiled``, which takes no preparation.
    """

    def __init__(self, plain: Callable[..., Any], compiled: Callable[..., Any], *, every_form: bool = False) -> None:
        self._every_form = every_form
        self.__wrapped__, self._compiled = plain, compiled  # inspect reads the signature of __wrapped__
        self._forms: set[Hashable] = set()
        self.is_compiling = False

    def __call__(self, *args: Any, **options: Any) -> Any:
        if self._every_form:
            return self._compiled(*args, **options)
        form = form_of(args, options)
        if self.is_compiling:
            self._forms.add(form)
        return self._run(form, args, options)

    def _run(self, form: Hashable, args: tuple[Any, ...], options: Mapping[str, Any]) -> Any:
        return (self._compiled if form in self._forms else self.__wrapped__)(*args, **options)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., Any]:
        """Return the plain forward of the copied module: what is prepared has weights or memory of its own."""
        return copy.deepcopy(self.__wrapped__, memo)

    def is_ready(self, *args: Any, **options: Any) -> bool:
        """Return whether such a call is compiled, or is compiled by the next call."""
        return self._every_form or self.is_compiling or form_of(args, options) in self._forms


class PreparedCaptures(CompiledForward):
    """A ``CompiledForward`` of a captured one: calls of other forms run uncaptured, with the same bytes."""

    def __init__(self, plain: Callable[..., Any], device: torch.device) -> None:
        self._captured = CapturedForward(plain, device)
        super().__init__(plain, self._captured)

    def _run(self, form: Hashable, args: tuple[Any, ...], options: Mapping[str, Any]) -> Any:
        if form in self._forms:
            return self._captured.run(form, args, options)
        return self._captured.run_uncaptured(args, options)


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
    """Put faster forwards into the text encoders of ``pipeline``: captured on CUDA, else compiled by ``backend``."""
    forwards = []
    for module in text_encoders_of(pipeline).values():
        make_bias_contiguous(module)
        forwards.append(faster_encoder(module, backend))
        module.__dict__["forward"] = forwards[-1]
    return tuple(forwards)


def faster_encoder(encoder: nn.Module, backend: str = INDUCTOR) -> CompiledForward:
    """Return the prepared ``forward`` of ``encoder``: captured on CUDA, else compiled."""
    device = next(encoder.parameters()).device
    if device.type == "cuda":
        return PreparedCaptures(encoder.forward, device)
    raise_recompile_limit(MAX_VARIANTS)
    keep_kernel_choices()
    return CompiledForward(encoder.forward, torch.compile(encoder.forward, dynamic=False, backend=backend))


def compute_as_captured(encoder: nn.Module) -> None:
    """Let ``encoder`` compute as one that is captured on CUDA, with the same bytes, where none can be captured."""
    make_bias_contiguous(encoder)
    plain = encoder.forward

    @wraps(plain)
    def forward(*args: Any, **options: Any) -> Any:
        return run_as_captured(plain, args, options)

    encoder.__dict__["forward"] = forward


def make_bias_contiguous(encoder: nn.Module) -> None:
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


def compiled_bytes(vae: Any) -> int:
    """Return what ``compile_decoder`` adds to the weights on CUDA, of an auto-encoder (or None) on "meta".

    A picture's decoder is copied. A clip's has more weights than before, and half as many bytes each if it is float32.
    """
    decoder: Any = getattr(vae, "decoder", None)
    if is_supported_clip_decoder(decoder):
        fused = copy.deepcopy(decoder)
        with torch.device("meta"):
            fused = fuse_clip_decoder(fused, fused_dtype(fused))
        return _weight_bytes(fused) - _weight_bytes(decoder)
    return _weight_bytes(decoder) if is_supported_decoder(decoder) else 0


def _weight_bytes(module: nn.Module) -> int:
    return sum(weight.nbytes for weight in module.parameters())


def compile_decoder(vae: Any, backend: str = INDUCTOR) -> tuple[CompiledForward, ...]:
    """Put a faster forward into the decoder of ``vae``: fused on CUDA, for every size, else compiled by ``backend``.

    On CUDA it has weights of its own. Decoders of clips are fused in place, on all devices; nothing is returned. On
    CUDA, those in float32 and some in bfloat16 compute in float16 (``fused_dtype``): it has the digits of TF32, the
    format of their convolutions there. ValueError if the decoder is not supported.
    """
    check_preparable(vae)
    weight = next(vae.decoder.parameters())
    is_fused = weight.is_cuda
    if is_supported_clip_decoder(vae.decoder):
        vae.decoder = fuse_clip_decoder(vae.decoder, fused_dtype(vae.decoder) if is_fused else weight.dtype)
        return ()
    if is_fused:
        faster = fuse_decoder(vae.decoder).forward
    else:
        keep_kernel_choices()
        faster = torch.compile(vae.decoder.forward, dynamic=False, fullgraph=True, backend=backend)
    forward = CompiledForward(vae.decoder.forward, faster, every_form=is_fused)
    vae.decoder.__dict__["forward"] = forward
    return (forward,)
