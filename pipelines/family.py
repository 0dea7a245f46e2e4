"""The interface of a model family, and what it says about itself. One folder implements it per family."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from engines.core.model import DenoiserModel
from engines.core.sampler import Sampler
from pipelines.request import MediaKind, MediaRequest

if TYPE_CHECKING:  # the ingress reads defaults, and does without torch
    import torch
    from numpy.typing import NDArray
    from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Defaults:
    """What a model does when the client does not say: sizes in pixels, frames per second, steps, scales."""

    kind: MediaKind
    width: int
    height: int
    num_frames: int
    fps: int
    num_inference_steps: int
    guidance_scale: float
    true_cfg_scale: float
    size_multiple: int
    frame_multiple: int
    max_pixels: int
    max_frames: int
    max_steps: int

    def request(self, model: str, prompt: str, **changes: Any) -> MediaRequest:
        """A request that says no more than ``prompt`` and ``changes`` (fields of ``MediaRequest``)."""
        fields: dict[str, Any] = {
            "request_id": "default",
            "kind": self.kind,
            "width": self.width,
            "height": self.height,
            "num_frames": self.num_frames,
            "fps": self.fps,
            "num_inference_steps": self.num_inference_steps,
            "guidance_scale": self.guidance_scale,
            "true_cfg_scale": self.true_cfg_scale,
            "seed": 0,
        }
        return MediaRequest(model=model, prompt=prompt, **(fields | changes))


class TextEncoder(Protocol):
    def encode(self, request: MediaRequest) -> Any:
        """The family's conditioning record (frozen, CPU tensors), negative prompt included if it is used."""
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
