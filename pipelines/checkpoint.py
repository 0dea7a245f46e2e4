"""A checkpoint: a diffusers directory, the spec of its transformer, and the device of its parts."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast, get_args

from engines.core.model import Branch, DenoiserModel
from pipelines.control_network import PART, UPSAMPLER_FOLDER, SeparatePart
from pipelines.defaults import Defaults
from pipelines.description import Description, read_description
from pipelines.directory import DENOISERS, GGUF, has_part, lone_file, part_class, part_folder, quantiser_of, read_config
from pipelines.loading import ModelSource, resolve_configuration, resolve_dtype, resolve_path
from pipelines.lora.source import LoraLimits, LoraSource
from pipelines.models.registry import spec_of, transformer_class
from pipelines.own_defaults import with_own_defaults
from pipelines.request import MediaRequest, SecondStage
from pipelines.schedules import with_schedule
from pipelines.size import Size

if TYPE_CHECKING:  # reading defaults must not import torch
    import torch
    from torch import nn

    from engines.parallel.collectives import Axis
    from pipelines.blocks.decoder import BlocksDecoder
    from pipelines.blocks.encoder import BlocksEncoder
    from pipelines.blocks.footprint import Footprint
    from pipelines.blocks.opened import OpenedPipeline
    from pipelines.blocks.sampler import BlocksSampler
    from pipelines.blocks.state import BlocksState
    from pipelines.models.generic.whole import WholeSpec
    from pipelines.models.spec import ModelSpec
    from pipelines.recipes import Recipe
    from pipelines.whole_pipeline import WholeEngine

logger = logging.getLogger(__name__)

VAE, PLAIN, TINY = "vae", "AutoencoderKL", "AutoencoderTiny"
"""The auto-encoder's part, and its classes for pictures; the second decodes the first one's latents (TAESD)."""


class Checkpoint:
    """A model whose parts are loaded on demand, on ``device`` ("meta": shapes only) and in ``dtype``.

    "auto" is bfloat16 on a GPU and float32 on the CPU. ``loras`` are adapters of the transformers, ``runtime_loras``
    the limits of those that come later. A ``file`` replaces the transformer's weights in ``path``. ValueError if
    ``path`` is not a diffusers directory of a supported transformer.
    """

    def __init__(
        self,
        path: Path,
        device: str | torch.device = "cpu",
        dtype: str | torch.dtype = "auto",
        loras: Iterable[LoraSource] = (),
        file: Path | None = None,
        runtime_loras: LoraLimits | None = None,
    ) -> None:
        self.path, self.loras, self.file, self.runtime_loras = path, tuple(loras), file, runtime_loras
        self.spec = spec_of(path)
        _check_auto_encoder(path, self.spec)
        self._device, self._dtype = device, dtype

    @classmethod
    def open(
        cls,
        source: str,
        device: str | torch.device = "cpu",
        dtype: str | torch.dtype = "auto",
        *,
        weights: bool = True,
        loras: Iterable[LoraSource] = (),
        runtime_loras: LoraLimits | None = None,
    ) -> Checkpoint:
        """Open a folder, a shipped checkpoint or a hub id (downloaded if needed), or another ``ModelSource``.

        ``weights=False`` skips the download of weights. ValueError names the attempts.
        """
        model = ModelSource.parse(source)
        file, part = Path(model.file) if model.file else None, model.part
        checkpoint = cls(resolve_path(source, weights=weights), device, dtype, loras, file, runtime_loras)
        if part is not None and (checkpoint.spec.is_whole or not checkpoint.takes(part)):
            what = "a control network" if part.kind == PART else "a latent upsampler"
            use = "follows none by its blocks" if part.kind == PART else "makes clips in one pass"
            raise ValueError(
                f"{part.place} is {what}, and {checkpoint.spec.family} {use}: leave {part.kind} out"
                + (", or take a folder that diffusers' ControlNet pipeline has saved" if part.kind == PART else "")
            )
        return checkpoint

    def takes(self, part: SeparatePart) -> bool:
        """Return whether requests can use a part that was stored apart."""
        return self.defaults.takes_control if part.kind == PART else self.defaults.stage_scale > 0

    @classmethod
    def of_configuration(
        cls, source: str, device: str | torch.device = "cpu", dtype: str | torch.dtype = "auto"
    ) -> Checkpoint:
        """Open a checkpoint without weights; the name of a published model is enough."""
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
        """Defaults of the model, the scheduler and the folder, read without torch."""
        spec, usual = self.spec, self.spec.defaults(self.path)
        shifts = spec.shifts_schedule
        scheduled = with_schedule(self.path, usual, spec.schedulers, spec.schedules, shifts=shifts)
        own = with_own_defaults(self.path, scheduled)
        return replace(own, takes_cache=own.takes_cache and not self.spec.is_whole)

    @property
    def recipes(self) -> Mapping[str, Recipe]:
        """The recipes that ship with the model's family."""
        return self.spec.recipes(self.path)

    def eager_only(self, *, is_split: bool) -> str:
        """Return the transformer's class and why only torch can run its forward; empty if it can be exported.

        ``is_split``: the ranks share the tokens.
        """
        follows = "runs with a control network" if self.spec.control_part and self.defaults.takes_control else ""
        reason = self.spec.eager_only or (self.spec.eager_split if is_split else "") or follows
        return f"{transformer_class(self.path)} {reason}" if reason else ""

    @cached_property
    def description(self) -> Description:
        """The directory's description of the model. ValueError if it is invalid."""
        return read_description(self.path, self.defaults)

    def num_steps(self, request: MediaRequest) -> int:
        """Return the number of steps of ``request``, fewer with strength. Do not import torch."""
        return self.defaults.num_steps_of(request)

    def text_encoder(self, *, compiled: bool = False, offloads_layers: bool = False) -> BlocksEncoder:
        """Return an encoder. ValueError if this model's layers cannot be in host memory (``offloads_layers``)."""
        from pipelines.blocks.encoder import BlocksEncoder

        if self.spec.is_whole:
            if offloads_layers:
                raise ValueError(
                    f"{self.spec.family} runs as a whole pipeline, its encoders included: remove "
                    "text_encoder.offloads_layers"
                )
            from pipelines.whole_pipeline import WholeEncoder

            return WholeEncoder()
        return BlocksEncoder(
            self._opened,
            self.defaults.max_tokens,
            fits_pictures=self.defaults.fits_pictures,
            compiled=compiled,
            offloads_layers=offloads_layers,
        )

    def sampler(self) -> BlocksSampler:
        """Return the sampler, the same object at every call."""
        return self._sampler

    def rank_parts(self) -> tuple[nn.Module, ...]:
        """Return the models that a rank calls beside the transformers, loaded: in steps, and between two stages.

        A request may ask for two stages wherever the checkpoint has a latent upsampler, with or without a recipe.
        """
        between = (self._sampler.latent_upsampler.module,) if self.defaults.stage_scale else ()
        return (*(self._opened.rank_part(name) for name in self.spec.rank_parts), *between)

    def decoder(
        self, *, compiled: bool = False, memory_bytes: int | None = None, others: Sequence[str] = ()
    ) -> BlocksDecoder:
        """Return a decoder; ``others`` are further devices.

        ValueError if this model's decoder cannot be compiled, limited to ``memory_bytes``, or split across devices.
        """
        import torch

        from pipelines.blocks.decoder import BlocksDecoder

        if self.spec.is_whole:
            from pipelines.whole_pipeline import WholeDecoder

            return WholeDecoder()
        devices = tuple(map(torch.device, others))
        return BlocksDecoder(self._opened, compiled=compiled, memory_bytes=memory_bytes, others=devices)

    def denoiser(
        self,
        *,
        sliced: bool = False,
        quantised: bool = False,
        num_offloaded: int = 0,
        typical: MediaRequest | None = None,
        axis: Axis | None = None,
    ) -> DenoiserModel:
        """Return the transformers. An "auto" strategy is chosen for steps like those of ``typical``.

        With ``sliced``, no weight is read yet: each rank reads its share, for models that fit no single device. With
        ``quantised``, weights stay on the host until the engine quantises them, those of ``num_offloaded`` blocks for
        ever. The ranks of ``axis`` read whole weights together: all make this call.
        """
        if self.spec.is_whole:
            return self._whole_denoiser()
        load = self._loader(quantised=quantised, num_offloaded=num_offloaded, axis=axis)
        model = self._without_weights() if sliced else self._as_denoiser(load)
        if self.loras:
            from pipelines.lora.model import with_loras

            model = with_loras(model, self.loras, type(self._opened.pipeline))
        if self.runtime_loras is not None:
            from pipelines.lora.lora_cache import with_runtime_loras

            network = (self._opened.control_part,) if self._opened.control_part else ()
            model = replace(model, unchanged=network)
            model = with_runtime_loras(model, type(self._opened.pipeline), self.runtime_loras)
        if typical is None or not self.spec.has_known_conditioning:
            return model
        return replace(model, typical_lengths=model.stream_lengths(self.first_step(typical)[0].arguments))

    def _loader(self, *, quantised: bool, num_offloaded: int, axis: Axis | None = None) -> Callable[[str], Any]:
        from engines.parallel.mesh import ALONE
        from engines.parallel.offload import offloaded_weights
        from engines.quantization.linear import weights_to_quantise

        load_part = partial(self._opened.load_part, axis=axis or ALONE)
        if not (quantised or num_offloaded):
            return load_part
        plan = self.spec.shard_plan(self._opened.part_config(self._opened.transformers[0]))

        def stays(module: nn.Module) -> frozenset[str]:
            offloaded = offloaded_weights(module, plan, num_offloaded) if num_offloaded else frozenset[str]()
            return offloaded | (weights_to_quantise(module, plan) if quantised else frozenset())

        return partial(load_part, stays=stays)

    def own_engine(self, *, compiled: bool = False) -> WholeEngine | None:
        """Return the engine that a whole pipeline needs; None for models that run on any engine.

        ``compiled``: its warm-up with ``trial_steps`` compiles the denoisers.
        """
        if not self.spec.is_whole:
            return None
        from pipelines.models.generic.compiled_forwards import CompiledForwards
        from pipelines.whole_pipeline import WholeEngine, parts_of

        return WholeEngine(CompiledForwards(parts_of(self._whole)) if compiled else None)

    def trial_steps(self, sizes: Iterable[Size]) -> Iterator[tuple[Branch, ...]]:
        """Yield first steps of a whole pipeline's calls: for each of ``sizes`` (none: the default), twice."""
        from pipelines.models.generic.compiled_forwards import blank_pictures, trial_requests

        encoder, sampler = self.text_encoder(), self.sampler()
        for request in trial_requests(self.defaults, sizes):
            yield sampler.branches(sampler.begin(request, encoder.encode(request, blank_pictures(request))))

    def outline(self) -> DenoiserModel:
        """Return the transformers without weight values, from the configuration, for exports under fake tensors."""
        return self._as_denoiser(self._opened.outline)

    def weightless(self) -> DenoiserModel:
        """Return the transformers with parameters on "meta". Buffers, which no file has, have values."""
        from accelerate import init_empty_weights  # type: ignore[import-untyped]

        with init_empty_weights():
            return self.outline()

    def weights_bytes(self, *, quantised: bool = False) -> int:
        """Return the memory of all transformers' weights in bytes, from the configuration alone.

        If they are ``quantised``, each value of the large layers takes one byte.
        """
        from engines.quantization.linear import weights_to_quantise

        model = self.weightless()
        total = 0
        for module in model.modules.values():
            large = weights_to_quantise(module, model.plan) if quantised else ()
            sizes = ((x.numel() if name in large else x.nbytes) for name, x in module.named_parameters())
            total += sum(sizes)
        return total

    def first_step(self, request: MediaRequest) -> tuple[Branch, ...]:
        """Return the branches of the first step of ``request``, with blank prompts. ValueError outside the limits."""
        return self._sampler.branches(self._begin(request, self.defaults.max_tokens))

    def largest_step(self, request: MediaRequest) -> tuple[Branch, ...]:
        """Return the branches of the last step of ``request``, the largest one where steps grow."""
        return self._sampler.kinds(self._begin(request, self.defaults.max_tokens))[-1]

    def first_latents(self, request: MediaRequest) -> Mapping[str, Any]:
        """Return the decoder's input before the first step of ``request``, for a clip in chunks before its first chunk.

        With two passes over the latents, it is that before the second. ValueError outside the model's limits.
        """
        self.defaults.check(request)
        return self._sampler.preview(self._begin(request.stages[-1], self.defaults.max_tokens))

    def footprint(self, request: MediaRequest) -> Footprint:
        """Return the memory and work of encoder and decoder for ``request``, of a checkpoint on "meta"."""
        from pipelines.blocks.footprint import footprint

        latents = self.first_latents(request) if self.spec.has_known_conditioning else None
        one = footprint(self._opened, self._opened.max_tokens(self.defaults.max_tokens), latents)
        if self.defaults.stage_scale:
            assert self.spec.latent_upsampler_bytes is not None
            between = {UPSAMPLER_FOLDER: self.spec.latent_upsampler_bytes(self.path, self._opened.dtype)}
            one = replace(one, ranks={**one.ranks, **between})
        if one.decode is None or not self.defaults.chunk_overlap:
            return one
        number = self.defaults.num_chunks(request.num_frames)
        rank_decode_bytes = one.decode_bytes or 0 if number > 1 and one.ranks else 0
        return replace(one, decode=one.decode.times(number), rank_decode_bytes=rank_decode_bytes)

    def typical_step(self) -> tuple[Branch, ...]:
        """Return the branches of a step of the default request; none if the conditioning is unknown."""
        if not self.spec.has_known_conditioning:
            return ()
        return self.first_step(self.defaults.request())

    def first_steps(
        self,
        sizes: Iterable[Size],
        modules: Iterable[str],
        *,
        fills_prompts: bool = False,
        second_stage: SecondStage | None = None,
    ) -> tuple[tuple[Branch, ...], ...]:
        """Return a step for each size and each of ``modules``, in order, with the model's usual number of branches.

        If requests may have a control picture, there is one with it and one without. If steps grow, there is one of
        each kind. Models with prompt windows, or engines that pad (``fills_prompts``), add short prompts. So does a
        ``second_stage`` with its steps in the sizes that results of two passes may have. Empty if conditioning is
        unknown before a request (``ModelSpec.blank_conditioning``).
        """
        if not self.spec.has_known_conditioning:
            logger.info("no warm-up before the first request: conditioning of %s is unknown", self.spec.family)
            return ()
        short = (*self.spec.short_prompts, *(self.spec.windowed_prompts if fills_prompts else ()))
        names, prompts = tuple(modules), (self.defaults.max_tokens, *short)
        defaults, sizes = self.defaults, tuple(sizes)
        controls = {defaults.takes_control, defaults.needs_control}
        requests = [defaults.request(size, has_control=one) for size in sizes for one in sorted(controls, reverse=True)]
        staged = [] if second_stage is None else filter(defaults.has_second_stage, sizes)
        requests += [defaults.request(size, second_stage=second_stage).stages[-1] for size in staged]
        states = (self._begin(request, num_tokens) for request in requests for num_tokens in prompts)
        steps = [step for state in states for step in self._sampler.kinds(state)]
        return tuple(tuple(replace(branch, module=name) for branch in step) for step in steps for name in names)

    def _begin(self, request: MediaRequest, num_tokens: int) -> BlocksState:
        """Return the state of ``request`` before its first step, with blank prompts of ``num_tokens``."""
        from pipelines.blocks.blank import blank_conditioning

        self.defaults.check(request)
        blank = blank_conditioning(self._opened, request, self._opened.max_tokens(num_tokens))
        return self._sampler.begin(request, blank)

    @cached_property
    def _opened(self) -> OpenedPipeline:
        from pipelines.blocks.opened import OpenedPipeline

        if self.spec.is_whole:
            raise ValueError(
                f"{self.spec.family} runs as a whole pipeline: it cannot be estimated, exported or calibrated"
            )
        return OpenedPipeline(self.path, self.device, self.dtype, self.file)

    @cached_property
    def _sampler(self) -> BlocksSampler:
        from pipelines.blocks.sampler import BlocksSampler

        if self.spec.is_whole:
            from pipelines.whole_pipeline import WholeSampler

            return WholeSampler(self._whole, cast("WholeSpec", self.spec), self.defaults)
        return BlocksSampler(self._opened)

    @cached_property
    def _whole(self) -> Any:
        """The loaded pipeline of diffusers, for models that run as a whole."""
        from pipelines.whole_pipeline import load_whole

        return load_whole(cast("WholeSpec", self.spec), self.path, self.device, self.dtype)

    def _whole_denoiser(self) -> DenoiserModel:
        """Return all models of a whole pipeline, for their memory; its own engine calls none of them itself."""
        from pipelines.blocks.denoiser import as_denoiser
        from pipelines.whole_pipeline import parts_of

        if self.loras or self.file is not None:
            raise ValueError(f"{self.spec.family} runs as a whole pipeline: it takes no loras and no transformer file")
        return as_denoiser(parts_of(self._whole), self.spec, {}, tuple)

    def _as_denoiser(self, load: Callable[[str], Any]) -> DenoiserModel:
        from pipelines.blocks.blank import BlocksProbe
        from pipelines.blocks.denoiser import as_denoiser

        opened = self._opened
        modules = {name: load(name) for name in opened.transformers}
        probe = BlocksProbe(opened=opened, defaults=self.defaults, modules=tuple(modules))
        return as_denoiser(modules, self.spec, opened.part_config(opened.transformers[0]), probe)

    def _without_weights(self) -> DenoiserModel:
        from engines.parallel.weight_files import WeightFiles
        from pipelines.component_weights import check_names

        if self.file is not None:
            raise ValueError(f"every rank would read its share of {self.file}, which is read whole: say load: whole")
        empty = self.weightless()
        modules, control = dict(empty.modules), self._opened.control_part
        folders = {part: part_folder(self.path, part) for part in modules}
        if control:
            modules |= {f"{part}.{control}": module.get_submodule(control) for part, module in empty.modules.items()}
            folders |= {f"{part}.{control}": part_folder(self.path, control) for part in empty.modules}
        for part, module in modules.items():
            file = lone_file(folders[part])
            if kind := quantiser_of(folders[part]) or (file and ("GGUF" if file.suffix == GGUF else file.name)):
                raise ValueError(f"{folders[part]} has weights of {kind}, which are read whole: say load: whole")
            check_names(module, folders[part])
        return replace(empty, weights=WeightFiles(folders=folders, device=self.device))


def _check_auto_encoder(path: Path, spec: ModelSpec) -> None:
    """Raise ValueError for an auto-encoder of other latents than the transformer takes. Import torch for a tiny one."""
    if part_class(path, VAE) == TINY:
        _check_tiny(path, spec)
    part = next(part for part in DENOISERS if part_class(path, part) is not None)
    if has_part(path, part) and has_part(path, VAE):
        spec.check_latents(read_config(path, part), read_config(path, VAE), path)


def _check_tiny(path: Path, spec: ModelSpec) -> None:
    """Raise ValueError unless the pipeline takes an auto-encoder of pictures."""
    expected = spec.auto_encoder(path)
    kinds = [getattr(one, "__name__", str(one)) for one in get_args(expected) or (expected,)]
    if expected is not None and not {PLAIN, TINY} & set(kinds):
        raise ValueError(
            f"{path} has an {TINY}, and its latents are those of an {' or '.join(kinds)}: take the model's own "
            "auto-encoder"
        )
