"""Run a pipeline's own ``__call__`` as jobs of a gang: for pipelines without modular blocks (``generic.whole``).

A job is a call in a thread of its own. It pauses after each step of its scheduler, and a gang's step lasts from one
pause to the next. The call has its own encoders and decoder, so the stages around a gang pass values along.
"""

from __future__ import annotations

import copy
import functools
import inspect
import logging
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Semaphore, Thread
from typing import Any

import numpy as np
import torch
from diffusers import ConfigMixin, ModelMixin
from diffusers.guiders.guider_utils import BaseGuidance
from diffusers.modular_pipelines.modular_pipeline_utils import ComponentSpec
from diffusers.pipelines.pipeline_loading_utils import simple_get_class_obj
from diffusers.schedulers.scheduling_utils import SchedulerMixin
from numpy.typing import NDArray
from PIL.Image import Image
from torch import Tensor, nn
from transformers import PreTrainedModel

from engines.core.engine import EagerEngine, Forwards, JobFailedError
from engines.core.logs import log_level
from engines.core.model import Branch
from pipelines.blocks.decoder import BlocksDecoder, DecodedMedia
from pipelines.blocks.encoder import BlocksEncoder, Conditioning
from pipelines.blocks.opened import inputs_of
from pipelines.blocks.sampler import BlocksSampler, check_finite
from pipelines.component_weights import has_scales, load_folder
from pipelines.defaults import Defaults
from pipelines.directory import DENOISERS, lone_file, quantiser_of
from pipelines.libraries import quiet_libraries
from pipelines.models.generic.compiled_forwards import CompiledForwards
from pipelines.models.generic.whole import DISTILLED_SCALE, REFERENCES, VIDEO_MASK, WholeSpec
from pipelines.request import NO_PICTURES, InputPictures, InputVideo, MediaRequest
from pipelines.single_file import cast_like_diffusers, check_base, load_single_file

logger = logging.getLogger(__name__)

PICTURES, FRAMES, CALL = "pictures", "frames_FHWC", "call"
CLIPS = {"video": "video_FHWC", "video_mask": "video_mask_FHWC"}
"""Names of the tensors of a conditioning, by what they are of ``InputPictures``."""
FLOW = "FlowMatch"
"""Part of the names of schedulers whose prediction is a velocity."""
UNPACK = "_unpack_latents"


class _CallCancelled(BaseException):
    """Ends the thread of an abandoned call. It is no ``Exception``, since a pipeline might catch one."""


@dataclass(slots=True, eq=False)
class _Handover:
    """Lets two threads take turns: the owner of a call, and the call."""

    may_run: Semaphore = field(default_factory=lambda: Semaphore(0))
    """Released when the call is to go on."""
    has_paused: Semaphore = field(default_factory=lambda: Semaphore(0))
    """Released when the call has taken a step, or has ended."""
    is_cancelled: bool = False
    """The call ends at its next turn."""
    has_ended: bool = False
    """The call takes no more turns."""
    result: Any = None
    """Value that the call returned."""
    error: BaseException | None = None
    """Error that the call raised, until its owner has seen it."""

    def pause(self) -> None:
        self.has_paused.release()
        self.wait()

    def wait(self) -> None:
        self.may_run.acquire()
        if self.is_cancelled:
            raise _CallCancelled

    def cancel(self) -> None:
        self.is_cancelled = True
        self.may_run.release()


class PausedCall:
    """A call in a thread of its own, which runs from one pause to the next while its owner waits.

    ``call`` gets the function that pauses it. The thread ends when this object is collected.
    """

    def __init__(self, call: Callable[[Callable[[], None]], Any], device: torch.device) -> None:
        self._handover = _Handover()
        self._thread = Thread(target=_run, args=(self._handover, call, device), name=CALL, daemon=True)
        weakref.finalize(self, self._handover.cancel)

    @property
    def has_ended(self) -> bool:
        return self._handover.has_ended

    @property
    def result(self) -> Any:
        """The value that the call returned; None until it has ended."""
        return self._handover.result

    def resume(self) -> None:
        """Let the call run until its next pause or its end. Raise its error."""
        if self.has_ended:
            return
        if self._thread.ident is None:
            self._thread.start()
        self._handover.may_run.release()
        self._handover.has_paused.acquire()
        error, self._handover.error = self._handover.error, None
        if error is not None:
            raise error


def _run(handover: _Handover, call: Callable[[Callable[[], None]], Any], device: torch.device) -> None:
    try:
        handover.wait()
        if device.type == "cuda":
            torch.cuda.set_device(device)  # a thread begins with the first device
        handover.result = call(handover.pause)
    except _CallCancelled:
        return
    except BaseException as error:  # it belongs to the owner
        handover.error = error
    handover.has_ended = True
    handover.has_paused.release()


@dataclass(slots=True, eq=False)
class CallProgress:
    """The last step of a call's scheduler."""

    num_calls: int = 0
    """Steps of the scheduler so far."""
    latents: Tensor | None = None
    """Latents after the last step; None before the first."""
    expected: Tensor | None = None
    """The final latents that the step predicts, of schedulers of flows."""


def follow(scheduler: Any, progress: CallProgress, pause: Callable[[], None]) -> None:
    """Make ``scheduler`` report each step to ``progress``, and pause after it: a second-order one after two.

    Its class is replaced, not its method, so that copies which a pipeline makes of it report nothing.
    """
    own: Any = type(scheduler)
    signature, order = inspect.signature(own.step), int(getattr(scheduler, "order", 1))

    @functools.wraps(own.step)
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        made = own.step(self, *args, **kwargs)
        if self is scheduler:
            values = signature.bind(self, *args, **kwargs).arguments
            progress.latents = made[0]
            progress.expected = _expected(self, values)
            progress.num_calls += 1
            if progress.num_calls % order == 0:
                pause()
        return made

    scheduler.__class__ = type(own.__name__, (own,), {"step": step})


def _expected(scheduler: Any, values: Mapping[str, Any]) -> Tensor | None:
    """Return ``x - sigma * v`` of the step that ``scheduler`` has just taken; None if it predicts no velocity."""
    place, sigmas = getattr(scheduler, "step_index", None), getattr(scheduler, "sigmas", None)
    if FLOW not in type(scheduler).__name__ or not place or sigmas is None:
        return None
    sample, velocity = values["sample"], values["model_output"]
    expected: Tensor = sample.float() - sigmas[place - 1].to(sample.device) * velocity.float()
    return expected.to(sample.dtype)


@dataclass(frozen=True, kw_only=True, slots=True)
class WholeState:
    """A job before its next step. Its call holds all else."""

    request: MediaRequest
    """The client's request."""
    call: PausedCall
    """The pipeline's call in its own thread, paused after its last step."""
    progress: CallProgress
    """Last report of its scheduler."""
    step: int = 0
    """Number of the next step."""


class WholeEngine(EagerEngine):
    """Takes the next step of each call: a step's forwards, guidance and solver are the call's own.

    ``compiled``: the forwards of its denoisers, if they are compiled.
    """

    def __init__(self, compiled: CompiledForwards | None = None) -> None:
        self._compiled, self._warm = compiled, set[tuple[int, int, int]]()

    @property
    def forwards(self) -> Forwards:
        """Form of the denoisers' forwards, after the warm-up."""
        return "eager" if self._compiled is None else self._compiled.forwards

    def warm_up(self, branches: tuple[Branch, ...], ranks: tuple[int, ...] = (0,)) -> None:
        """Compile for the first steps of calls. A call that fails is logged, since others may not."""
        if self._compiled is None:
            return
        with self._compiled.warming():
            try:
                self.predict(branches, ranks)
            except (ValueError, JobFailedError) as error:
                logger.error("the warm-up of the pipeline failed, and forwards may run eagerly", exc_info=error)

    def predict(self, branches: tuple[Branch, ...], ranks: tuple[int, ...] = (0,)) -> tuple[Tensor, ...]:
        """Return each call's latents after its next step. Errors of a pipeline fail the job, those of a device all."""
        shapes = {branch.constants["shape"] for branch in branches}
        self.was_warm = shapes <= self._warm
        predictions = tuple(_latents_after_step(branch.constants[CALL]) for branch in branches)
        self._warm |= shapes
        return predictions


def _latents_after_step(state: WholeState) -> Tensor:
    try:
        state.call.resume()
    except (ValueError, JobFailedError, torch.AcceleratorError):
        raise
    except Exception as error:
        raise JobFailedError(
            f"the pipeline failed at step {state.step + 1}: {type(error).__name__}: {error}"
        ) from error
    return torch.empty(0) if state.progress.latents is None else state.progress.latents


class WholeSampler(BlocksSampler):
    """Calls ``pipeline`` once a job, each with a scheduler and guiders of its own."""

    def __init__(self, pipeline: Any, spec: WholeSpec, defaults: Defaults) -> None:
        self._loaded, self._whole, self._defaults = pipeline, spec, defaults

    def begin(self, request: MediaRequest, conditioning: Conditioning) -> Any:
        pictures = _opened(conditioning.values, request)
        inputs, progress = self._inputs(request, pictures), CallProgress()
        call = functools.partial(_call, self._loaded, inputs, progress)
        return WholeState(request=request, call=PausedCall(call, self._loaded.device), progress=progress)

    def num_steps(self, state: Any) -> int:
        return self._defaults.num_steps_of(state.request)

    def branches(self, state: Any) -> tuple[Branch, ...]:
        """Return one branch, which stands for all that the pipeline does in the step."""
        request = state.request
        shape = request.width, request.height, request.num_frames
        return (Branch(inputs={}, constants={CALL: state, "shape": shape}, module="pipeline"),)

    def kinds(self, state: Any) -> tuple[tuple[Branch, ...], ...]:
        return (self.branches(state),)

    def advance(self, state: Any, predictions: tuple[Tensor, ...]) -> Any:
        return replace(state, step=state.step + 1)

    def latents(self, state: Any) -> Mapping[str, Any]:
        """Return the frames, after the rest of the call, such as its decoder and steps beyond the expected number."""
        while not state.call.has_ended:
            state.call.resume()
        if state.progress.latents is not None:
            check_finite((state.progress.latents.isfinite().all(),), state.request, "latents")
        return {FRAMES: torch.from_numpy(_frames_of(state.call.result))}

    @torch.no_grad()
    def preview(self, state: Any) -> Mapping[str, Any]:
        """Return the expected picture; nothing if the form of the latents is unknown."""
        expected = state.progress.latents if state.progress.expected is None else state.progress.expected
        latents = None if expected is None else _picture_latents(self._loaded, expected, state.request)
        return {} if latents is None else {FRAMES: torch.from_numpy(_decoded(self._loaded, latents))}

    def _inputs(self, request: MediaRequest, pictures: InputPictures) -> dict[str, Any]:
        """Return the arguments of the call. A scale that clients name is the one of its ``guidance_scale``."""
        names = self._whole.inputs
        inputs = inputs_of(request, names, pictures)
        inputs.pop("use_kv_cache", None)  # it is for calls in blocks
        scales = {"guidance_scale": request.guidance_scale, "true_cfg_scale": request.true_cfg_scale}
        if not self._whole.has_distilled_scale:
            scales = {"guidance_scale": request.true_cfg_scale}
        scales[DISTILLED_SCALE] = request.guidance_scale
        if pictures.control is not None and self._whole.control == "image":
            inputs["image"] = pictures.control.cut_to(request.width, request.height).image()
        if self._whole.lists_pictures and pictures.pictures:
            inputs["image"] = [picture.on_white() for picture in pictures.pictures]
        if REFERENCES in names and pictures.pictures:
            inputs[REFERENCES] = [picture.on_white() for picture in pictures.pictures]
        if VIDEO_MASK in names and pictures.video_mask is not None:
            inputs[VIDEO_MASK] = pictures.video_mask.frames()
        return {**inputs, **{name: scale for name, scale in scales.items() if name in names}, "output_type": "pil"}


def _call(pipeline: Any, inputs: Mapping[str, Any], progress: CallProgress, pause: Callable[[], None]) -> Any:
    """Call a copy of ``pipeline``, since a call writes to its object; weights are shared."""
    own = copy.copy(pipeline)
    for name, part in vars(pipeline).items():
        if isinstance(part, SchedulerMixin | BaseGuidance):
            vars(own)[name] = copy.deepcopy(part)
    follow(own.scheduler, progress, pause)
    return own(**inputs)


def _opened(values: Mapping[str, Any], request: MediaRequest) -> InputPictures:
    """Return the inputs of ``request`` from the values of its conditioning."""
    pictures: InputPictures = values.get(PICTURES, NO_PICTURES)
    clips: dict[str, Any] = {name: _clip(values[key], request.fps) for name, key in CLIPS.items() if key in values}
    return replace(pictures, **clips)


def _clip(video_FHWC: Tensor, fps: int) -> InputVideo:
    num_frames, height, width = video_FHWC.shape[:3]
    data = video_FHWC.cpu().numpy().tobytes()
    return InputVideo(width=width, height=height, num_frames=num_frames, fps=fps, data=data)


def _frames_of(output: Any) -> NDArray[np.uint8]:
    """Return the frames of the first picture or clip of a pipeline's output."""
    media = next(iter(output.values())) if isinstance(output, Mapping) else output[0]
    frames = media[0] if isinstance(media[0], list | tuple) else media[:1]
    if not all(isinstance(frame, Image) for frame in frames):
        raise JobFailedError(f"the pipeline returned {type(frames[0]).__name__} where pictures were asked for")
    return np.stack([np.asarray(frame.convert("RGB")) for frame in frames])


def _picture_latents(pipeline: Any, latents: Tensor, request: MediaRequest) -> Tensor | None:
    """Return ``latents_BCHW`` in the auto-encoder's form; None for other forms, such as clips."""
    vae = getattr(pipeline, "vae", None)
    num_channels = getattr(getattr(vae, "config", None), "latent_channels", None)
    if latents.ndim == 3 and hasattr(pipeline, UNPACK):
        latents = pipeline._unpack_latents(latents, request.height, request.width, pipeline.vae_scale_factor)
    if latents.ndim == 5 and latents.shape[1] == 1 and latents.shape[-1] == num_channels:  # a frame, channels last
        latents = latents[:, 0].movedim(-1, 1)
    return latents if latents.ndim == 4 and latents.shape[1] == num_channels else None


def _decoded(pipeline: Any, latents_BCHW: Tensor) -> NDArray[np.uint8]:
    config = pipeline.vae.config
    scale, shift = getattr(config, "scaling_factor", None) or 1.0, getattr(config, "shift_factor", None) or 0.0
    pixels_BCHW = pipeline.vae.decode((latents_BCHW / scale + shift).to(pipeline.vae.dtype), return_dict=False)[0]
    return _frames_of((pipeline.image_processor.postprocess(pixels_BCHW, output_type="pil"),))


class WholeEncoder(BlocksEncoder):
    """Passes pictures and clips along: the pipeline encodes them and the prompt on the rank."""

    def __init__(self) -> None:
        self.max_tokens = 0

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        return ()

    def compile_calls(self) -> AbstractContextManager[None]:
        return nullcontext()

    def encode(self, request: MediaRequest, pictures: InputPictures = NO_PICTURES) -> Conditioning:
        values: dict[str, Any] = {PICTURES: replace(pictures, video=None, video_mask=None)}
        for name, key in CLIPS.items():
            if (clip := getattr(pictures, name)) is not None:  # a tensor, which travels beside the message
                shape = (clip.num_frames, clip.height, clip.width, 3)
                values[key] = torch.frombuffer(bytearray(clip.data), dtype=torch.uint8).reshape(shape)
        return Conditioning(values=values, kinds={}, dtype=torch.float32)


class WholeDecoder(BlocksDecoder):
    """Passes frames along: the pipeline decodes latents on the rank."""

    def __init__(self) -> None:
        pass

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        return ()

    def compile_calls(self) -> AbstractContextManager[None]:
        return nullcontext()

    def warm_kernels(self) -> None:
        """Do nothing: the rank decodes."""

    def check_fits(self, request: MediaRequest) -> None:
        """Do nothing: the rank decodes."""

    def decode_all(self, latents: Mapping[str, Any], request: MediaRequest) -> DecodedMedia:
        return DecodedMedia(frames_FHWC=self.decode(latents, request))

    def decode_chunks(self, latents: Mapping[str, Any], request: MediaRequest) -> Iterator[DecodedMedia]:
        yield self.decode_all(latents, request)

    def decode(self, latents: Mapping[str, Any], request: MediaRequest) -> NDArray[np.uint8]:
        frames_FHWC: NDArray[np.uint8] = latents[FRAMES].numpy()
        return frames_FHWC[: request.num_frames]

    def preview(self, latents: Mapping[str, Any], request: MediaRequest) -> NDArray[np.uint8]:
        if FRAMES not in latents:
            raise ValueError(f"the latents of {request.model} have no known form: there are no previews of it")
        return self.decode(latents, request)


def load_whole(spec: WholeSpec, path: Path, device: torch.device, dtype: torch.dtype) -> Any:
    """Return the pipeline in the folder ``path`` with its weights, without progress bars.

    Weights are those that a user loads. ValueError names tensors that are missing, unread or not finite, and the part.
    """
    classes = _model_classes(spec, path)
    for name in classes.keys() & set(DENOISERS):
        if (file := lone_file(path / name)) is not None:
            check_base(name, file, path, classes.get("vae"))
    parts = {name: _load_part(name, kind, path, device, dtype) for name, kind in classes.items()}
    with log_level(logging.ERROR, "diffusers.pipelines.pipeline_loading_utils"):  # it warns of parts that are given
        pipeline = spec.pipeline_class.from_pretrained(str(path), dtype=dtype, **parts).to(device)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def part_problems(spec: WholeSpec, path: Path) -> Iterator[str]:
    """Yield why parts in the folder ``path`` cannot be loaded: tensors that are missing, unread or of another shape.

    No values are kept. Parts whose values a library converts are left out.
    """
    for name, kind in _model_classes(spec, path).items():
        folder = path / name
        is_scaled = not issubclass(kind, ModelMixin) and has_scales(folder)
        if quantiser_of(folder) or lone_file(folder) or is_scaled:
            continue
        try:
            with quiet_libraries():
                _load_part(name, kind, path, torch.device("meta"), torch.bfloat16)
        except ValueError as error:
            yield str(error)


def _model_classes(spec: WholeSpec, path: Path) -> Mapping[str, Any]:
    """Return the classes of the models that the pipeline takes from the folder ``path``.

    A class without a configuration is a list of models, such as several control networks: it loads these itself.
    ValueError if a library lacks a class.
    """
    taken = inspect.signature(spec.pipeline_class.__init__).parameters
    index = spec.pipeline_class.load_config(str(path))
    models = (name for name in taken if index.get(name) and (path / name / "config.json").is_file())
    classes = {name: _class_of(path / name, *index[name]) for name in models if index[name][0] is not None}
    own = {name: kind for name, kind in classes.items() if issubclass(kind, nn.Module)}
    return {name: kind for name, kind in own.items() if issubclass(kind, ConfigMixin | PreTrainedModel)}


def _class_of(folder: Path, library: str, name: str) -> Any:
    try:
        return simple_get_class_obj(library, name)
    except AttributeError as error:
        raise ValueError(f"{folder} needs {name}, which this {library} lacks: install a release that has it") from error


def _load_part(name: str, kind: Any, path: Path, device: torch.device, dtype: torch.dtype) -> Any:
    if issubclass(kind, ModelMixin) and (file := lone_file(path / name)) is not None:
        return cast_like_diffusers(load_single_file(kind, file, path / name, device, dtype), dtype)
    spec = ComponentSpec(name=name, type_hint=kind, pretrained_model_name_or_path=str(path), subfolder=name)
    return load_folder(spec, path / name, device, dtype, dequantise=False)


def parts_of(pipeline: Any) -> Mapping[str, nn.Module]:
    """Return the models of ``pipeline`` by name."""
    return {name: part for name, part in vars(pipeline).items() if isinstance(part, nn.Module)}
