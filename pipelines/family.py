"""The interface of a model family, and what it says about itself. One folder implements it per family."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from engines.core.model import DenoiserModel
from engines.core.sampler import Sampler
from pipelines.defaults import Defaults
from pipelines.pictures import NO_PICTURES, InputPictures
from pipelines.request import MediaRequest

if TYPE_CHECKING:  # the ingress reads defaults, and does without torch
    import torch
    from numpy.typing import NDArray
    from torch import Tensor


class TextEncoder(Protocol):
    def encode(self, request: MediaRequest, pictures: InputPictures = NO_PICTURES) -> Any:
        """The family's conditioning record (frozen, CPU tensors), negative prompt included if it is used.

        ``pictures`` are as many as ``request`` says, which its model's defaults allow.
        """
        ...


class Decoder(Protocol):
    def decode(self, latents: Tensor, request: MediaRequest) -> NDArray[Any]:
        """Frames as uint8, shape (frames, height, width, 3); one frame for a picture."""
        ...

    def preview(self, latents: Tensor, request: MediaRequest) -> NDArray[Any]:
        """One frame, as ``decode`` would give it first, from the latents of a running job; cheap for clips too."""
        ...


class Family(Protocol):
    """A module-level object ``FAMILY`` in each family's folder satisfies this. ``path`` is a diffusers directory."""

    name: str

    def defaults(self, path: Path) -> Defaults: ...

    def load_text_encoder(self, path: Path, device: torch.device, dtype: torch.dtype) -> TextEncoder: ...

    def load_denoiser(self, path: Path, device: torch.device, dtype: torch.dtype) -> DenoiserModel: ...

    def outline_denoiser(self, path: Path, dtype: torch.dtype) -> DenoiserModel:
        """``load_denoiser`` by the configuration alone, weights unset: for exports, under fake tensors."""
        ...

    def blank_conditioning(self, path: Path, request: MediaRequest) -> Any:
        """Zeros in the shapes that the text encoder gives: to prepare engines for sizes before anybody asks."""
        ...

    def load_sampler(self, path: Path, device: torch.device, dtype: torch.dtype) -> Sampler[Any]: ...

    def load_decoder(self, path: Path, device: torch.device, dtype: torch.dtype) -> Decoder: ...
