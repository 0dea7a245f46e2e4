"""Compiled forwards of a whole pipeline's denoisers: of repeated blocks, or of a class without any as a whole.

All is compiled in the warm-up, for tokens of any number. Later calls that do not fit the compiled code run
eagerly. So no request waits for a compiler, and its bytes do not depend on earlier requests.
"""

from __future__ import annotations

import functools
import logging
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from engines.core.engine import Forwards
from engines.core.torch_private import keep_kernel_choices, raise_recompile_limit, separate_sizes
from engines.torch_engine.compiler import with_rewrites
from pipelines.request import InputPicture, InputPictures, InputVideo, MediaRequest

if TYPE_CHECKING:
    from pipelines.defaults import Defaults
    from pipelines.size import Size

logger = logging.getLogger(__name__)

DENOISERS = ("transformer", "unet")
"""Beginnings of the names of parts that make predictions."""
INEXACT = {"Kandinsky5Transformer3DModel": "on an H200 its compiled blocks differed from eager ones by 8e-4 in float32"}
"""Classes of transformers that are not compiled, and why."""
MAX_VARIANTS = 64
"""Compiled versions of one kind of block: one per form of its inputs."""
PROMPT, NEGATIVE_PROMPT = "a fox beside a river, early in the morning", "fog"
"""Prompts of the warm-up. A dim of 1, such as that of an empty prompt, would be compiled as a constant."""
GREY = 128


class CompiledForwards:
    """Puts compiled forwards into the denoisers among ``parts``, a pipeline's models by name.

    If one of them cannot be compiled in the warm-up, all run as they are written.
    """

    def __init__(self, parts: Mapping[str, nn.Module], backend: str = "inductor") -> None:
        self._is_warming = self._was_warmed = False
        denoisers = [part for name, part in parts.items() if name.startswith(DENOISERS)]
        self.error = next((why for part in denoisers if (why := INEXACT.get(type(part).__name__))), "")
        """Why nothing is compiled; empty if all is, or before the warm-up."""
        if self.error:
            logger.warning("the pipeline's forwards run eagerly: %s", self.error)
        for module in () if self.error else (each for part in denoisers for each in compiled_modules(part)):
            forward = types.MethodType(type(module).forward, module)
            settings: dict[str, Any] = {"dynamic": True, "fullgraph": True}
            compiled = torch.compile(forward, backend=with_rewrites(backend), **settings)
            module.__dict__["forward"] = self._faster(forward, compiled)

    @property
    def forwards(self) -> Forwards:
        """Form in which they run."""
        return "compiled" if self._was_warmed and not self.error else "eager"

    @contextmanager
    def warming(self) -> Iterator[None]:
        """Compile the calls that are made inside the block."""
        self._is_warming = True
        try:
            yield
        finally:
            self._is_warming = False

    def _faster(self, plain: Callable[..., Any], compiled: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(plain)
        def forward(*args: Any, **options: Any) -> Any:
            if self.error:
                return plain(*args, **options)
            if self._is_warming:
                return self._compile(plain, compiled, args, options)
            with torch.compiler.set_stance("eager_on_recompile"):
                return compiled(*args, **options)

        return forward

    def _compile(
        self, plain: Callable[..., Any], compiled: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]
    ) -> Any:
        """Return the result of ``compiled``; if it fails where ``plain`` does not, nothing is compiled any more."""
        raise_recompile_limit(MAX_VARIANTS)  # such settings are those of the thread
        keep_kernel_choices()
        try:
            with separate_sizes():
                result = compiled(*args, **options)
        except Exception as error:
            result = plain(*args, **options)
            self.error = f"{type(error).__name__}: {error}"
            kind = type(getattr(plain, "__self__", plain)).__name__
            logger.error("%s cannot be compiled: the pipeline's forwards run eagerly", kind, exc_info=error)
        self._was_warmed = True
        return result


def compiled_modules(denoiser: Any) -> tuple[nn.Module, ...]:
    """Return the modules whose forwards are compiled: the repeated blocks, or else ``denoiser`` itself."""
    kinds = set(getattr(denoiser, "_repeated_blocks", None) or getattr(denoiser, "_no_split_modules", None) or ())
    return tuple(_outermost(denoiser, kinds)) or (denoiser,)


def _outermost(module: nn.Module, kinds: set[str]) -> Iterator[nn.Module]:
    for child in module.children():
        if type(child).__name__ in kinds:
            yield child
        else:
            yield from _outermost(child, kinds)


def trial_requests(defaults: Defaults, sizes: Iterable[Size]) -> Iterator[MediaRequest]:
    """Yield requests for the warm-up: for each of ``sizes`` (none: the default), with and without guidance."""
    chosen: list[Size | None] = [*sizes]
    for size in chosen or [None]:
        request = defaults.request(size, prompt=PROMPT)
        yield request
        scale, negative = (1.0, None) if request.true_cfg_scale > 1 else (4.0, NEGATIVE_PROMPT)
        yield replace(request, true_cfg_scale=scale, negative_prompt=negative)


def blank_pictures(request: MediaRequest) -> InputPictures:
    """Return grey pictures and clips in the number and size of ``request``, and masks that paint everything."""
    width, height = request.width, request.height
    size = {"width": width, "height": height}
    picture = InputPicture(**size, mode="RGB", data=bytes([GREY]) * (3 * width * height))
    mask = InputPicture(**size, mode="L", data=bytes([255]) * (width * height))
    has_mask, clip = request.has_mask, None
    if number := request.num_video_frames:
        clip = InputVideo(width=width, height=height, num_frames=number, fps=request.fps, data=picture.data * number)
    return InputPictures(
        pictures=(picture,) * request.num_pictures,
        mask=mask if has_mask and clip is None else None,
        video=clip,
        video_mask=None if clip is None or not has_mask else replace(clip, data=bytes([255]) * len(clip.data)),
        control=picture if request.has_control else None,
    )
