"""One noun for a checkpoint: a diffusers directory, the family that serves it, and where its parts are loaded to."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engines.core.model import Branch, DenoiserModel
from engines.core.sampler import Sampler
from pipelines.defaults import Defaults
from pipelines.description import Description, read_description
from pipelines.family import Decoder, TextEncoder
from pipelines.loading import resolve_configuration, resolve_dtype, resolve_path
from pipelines.registry import load_family
from pipelines.request import MediaRequest
from pipelines.size import Size

if TYPE_CHECKING:  # who reads defaults alone does without torch
    import torch


class Checkpoint:
    """Parts are loaded onto ``device`` ("meta": shapes alone) and in ``dtype``, when they are asked for.

    "auto" is bfloat16 on a GPU and float32 on the CPU. Raises ValueError where ``path`` is not a diffusers directory of
    a known family.
    """

    def __init__(self, path: Path, device: str | torch.device = "cpu", dtype: str | torch.dtype = "auto") -> None:
        self.path = path
        self.family = load_family(path)
        self._device, self._dtype = device, dtype

    @classmethod
    def open(
        cls, source: str, device: str | torch.device = "cpu", dtype: str | torch.dtype = "auto", *, weights: bool = True
    ) -> Checkpoint:
        """What ``source`` names: a folder, a shipped checkpoint, or a hub id, downloaded if it is not there.

        Without ``weights`` for who reads configurations alone. ValueError says what was tried.
        """
        return cls(resolve_path(source, weights=weights), device, dtype)

    @classmethod
    def of_configuration(
        cls, source: str, device: str | torch.device = "cpu", dtype: str | torch.dtype = "auto"
    ) -> Checkpoint:
        """Opens it without weights, which need not be anywhere: a published model's name will do."""
        return cls(resolve_configuration(source), device, dtype)

    @cached_property
    def device(self) -> torch.device:
        import torch

        return torch.device(self._device)

    @cached_property
    def dtype(self) -> torch.dtype:
        return resolve_dtype(self._dtype, self.device) if isinstance(self._dtype, str) else self._dtype

    @cached_property
    def defaults(self) -> Defaults:
        """The family's and the directory's own. Read without torch."""
        return self.family.defaults(self.path)

    @cached_property
    def description(self) -> Description:
        """What the directory says of the model to people. ValueError if that cannot be."""
        return read_description(self.path, self.defaults)

    def text_encoder(self) -> TextEncoder:
        return self.family.load_text_encoder(self.path, self.device, self.dtype)

    def sampler(self) -> Sampler[Any]:
        """The same one at every call."""
        return self._sampler

    def decoder(self) -> Decoder:
        return self.family.load_decoder(self.path, self.device, self.dtype)

    def denoiser(self, *, sliced: bool = False, typical: MediaRequest | None = None) -> DenoiserModel:
        """The transformers. ``typical`` says what most steps will be like: an "auto" strategy is chosen for it.

        If ``sliced``, no weight is read yet: an engine reads its rank's share from the files, for a model that fits no
        single device.
        """
        model = self._without_weights() if sliced else self.family.load_denoiser(self.path, self.device, self.dtype)
        if typical is None:
            return model
        return replace(model, typical_lengths=model.stream_lengths(self.first_step(typical)[0].inputs))

    def outline(self) -> DenoiserModel:
        """The transformers by their configuration alone, weights unset; see ``Family.outline_denoiser``."""
        return self.family.outline_denoiser(self.path, self.dtype)

    def weights_bytes(self) -> int:
        """What the transformers' weights take in memory, whole; from the configuration alone."""
        modules = self._empty().modules.values()
        return sum(weight.nbytes for module in modules for weight in module.parameters())

    def first_step(self, request: MediaRequest) -> tuple[Branch, ...]:
        """The branches of the first step of ``request``, with a blank prompt."""
        blank = self.family.blank_conditioning(self.path, request)
        return self._sampler.branches(self._sampler.begin(request, blank))

    def first_steps(self, sizes: Iterable[Size], modules: Iterable[str]) -> tuple[tuple[Branch, ...], ...]:
        """A step of each size, with the model's usual number of branches, for each of its ``modules``, in order."""
        names = tuple(modules)
        steps = [self.first_step(self.defaults.request(size)) for size in sizes]
        return tuple(tuple(replace(branch, module=name) for branch in step) for step in steps for name in names)

    @cached_property
    def _sampler(self) -> Sampler[Any]:
        return self.family.load_sampler(self.path, self.device, self.dtype)

    def _without_weights(self) -> DenoiserModel:
        from engines.parallel.weight_files import WeightFiles

        empty = self._empty()
        weights = WeightFiles(folders={part: self.path / part for part in empty.modules}, device=self.device)
        probe: Any = empty.probe  # a record with the device of its inputs, which was the outline's
        return replace(empty, weights=weights, probe=replace(probe, device=self.device))

    def _empty(self) -> DenoiserModel:
        """Parameters on "meta". Buffers are there: they are computed, and in no file."""
        from accelerate import init_empty_weights  # type: ignore[import-untyped]

        with init_empty_weights():
            return self.outline()
