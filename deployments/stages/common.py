"""Types that the stages share and exchange, and the opening of a stage's checkpoint."""

from __future__ import annotations

import asyncio
import logging
import math
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import copy_context
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from deployments.config import ProvenanceConfig
from deployments.model_config import ModelConfig
from deployments.requests.request_errors import is_user_error
from deployments.settings import set_defaults
from deployments.sharing.share_actor import ShareSpec
from deployments.sharing.share_member import AwakeGate, ThreadMember
from deployments.stages.devices import asleep_folder, stage_devices
from deployments.stages.stage_config import StageConfig
from engines.core.parcel import Parcel, Shapes
from engines.gang.errors import portable
from engines.gang.jobs.job import JobEvent
from pipelines.checkpoint import Checkpoint
from pipelines.request import InputPicture, InputPictures, InputVideo, MetadataLevel, ServiceTier

if TYPE_CHECKING:
    from torch import nn

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class StageSpec:
    """Configuration of one stage of a model."""

    model: ModelConfig
    """The model."""
    stage: StageConfig
    """Resources of the stage."""
    metadata: MetadataLevel = "full"
    """Content of files' metadata about their request."""
    provenance: ProvenanceConfig | None = None
    """Signs files; None: they are not signed."""
    share: ShareSpec | None = None
    """The models that it shares GPUs with."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Encoded(Parcel):
    """Conditioning of one request."""

    encode_s: float
    """Time in the encoder; next to 0 if it comes from the cache."""
    shapes: Shapes
    """Shapes of its tensors by name."""
    was_kept: bool = False
    """True if it comes from the cache."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodingDone:
    """The first event of a job: its conditioning is there."""

    encode_s: float
    """Time in the encoder; next to 0 if it comes from the cache."""
    was_kept: bool = False
    """True if it comes from the cache."""


StageEvent = EncodingDone | JobEvent | Exception
"""Events of a job. A wrong request, a full queue and a broken gang are events, since Serve logs the traceback of every
exception that a replica raises.
"""


def refusal(error: ValueError, **fields: object) -> Exception:
    """Log a wrong request as an event with ``fields``, and return its error as the replica's answer.

    Raise ``error`` if it is a defect.
    """
    if not is_user_error(error):
        raise error
    at = traceback.extract_tb(error.__traceback__)[-1]
    extra = {"reason": str(error), "at": f"{at.filename}:{at.lineno}"}
    logger.info("request is refused", extra=extra | fields)
    return portable(error)


@dataclass(frozen=True, kw_only=True, slots=True)
class Decoded:
    """Finished files."""

    data: bytes
    """The file; for a picture in layers, that of the lowest one."""
    thumbnail: bytes
    """A WebP of a clip's first frame; empty for pictures."""
    decode_s: float
    """Time from latents to bytes."""
    further: tuple[bytes, ...] = ()
    """Layers above the first."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the files as arrays: Ray copies arrays once on either side, bytes five times."""
        files_B = tuple(np.frombuffer(file, np.uint8) for file in (self.data, *self.further))
        return _decoded, (files_B, self.thumbnail, self.decode_s)


def _decoded(files_B: Sequence[NDArray[np.uint8]], thumbnail: bytes, decode_s: float) -> Decoded:
    data, *further = (file_B.tobytes() for file_B in files_B)
    return Decoded(data=data, thumbnail=thumbnail, decode_s=decode_s, further=tuple(further))


PRIORITIES: Mapping[ServiceTier, float] = {"flex": 0.25, "default": 1.0, "priority": 4.0}
"""Divisors of a job's predicted duration in the queue order."""


CHECK_S = 0.8
"""Duration of a health check, below its period of 1 s."""
LATE_S = 1.5
"""Pause between two health checks above which the second was held up, perhaps with its predecessors."""
SLOW_S = 0.3
"""Delay of a health check's end above which the process lacks time: the next one does not wait."""


class HealthCheckPace:
    """Lets a health check last almost until the next one.

    So Serve's timeout has begun when the process hangs, and ends sooner. The first call, and one after a pause or a
    delay, ends at once: that time is lacking for the answer.
    """

    def __init__(self) -> None:
        self._waits_until_s = -math.inf
        """The next call waits if it begins before this time."""

    @contextmanager
    def call(self) -> Iterator[Callable[[], float]]:
        """Yield how many seconds the call inside the block has left to wait; 0 if it may not wait."""
        began_s = time.monotonic()
        ends_s = began_s + CHECK_S if began_s < self._waits_until_s else began_s
        yield lambda: max(0.0, ends_s - time.monotonic())
        ended_s = time.monotonic()
        is_slow = ended_s - began_s > CHECK_S + SLOW_S
        self._waits_until_s = -math.inf if is_slow else ended_s + LATE_S


class WeightStage:
    """A deployment with weights that sleep if its model shares GPUs."""

    _weights: StageWeights

    @cached_property
    def _pace(self) -> HealthCheckPace:
        return HealthCheckPace()

    async def check_health(self) -> None:
        """Raise an error if the weights do not sleep and wake as ordered."""
        self._weights.check()
        with self._pace.call() as left_s:
            if wait_s := left_s():
                await asyncio.sleep(wait_s)

    def __del__(self) -> None:
        """Leave other models' GPUs. Serve calls it when a replica is stopped."""
        if (weights := getattr(self, "_weights", None)) is not None:
            weights.close()


LOW_PRIORITY = {"CUDA_MPS_CLIENT_PRIORITY": "1"}
"""Below the priority of ranks, 0. CUDA reads it at a process's first use of a GPU, under MPS only. Stream priorities
hold within one process; without MPS, processes time-slice a GPU.
"""


def load_stage(spec: StageSpec) -> Checkpoint:
    """Set this process's threads and GPU priority; return the checkpoint on the device of the stage."""
    import torch

    from deployments.replicas import prepare_replica  # ranks import this module without Ray Serve

    prepare_replica()
    if spec.stage.gives_way:
        set_defaults(LOW_PRIORITY)
    torch.set_num_threads(spec.stage.num_threads)
    return Checkpoint.open(spec.model.source, stage_devices(spec.stage)[0], spec.model.dtype)


def use_device(device: str) -> None:
    """Run a first kernel on ``device``, for which CUDA makes the process's context. Weights come next."""
    import torch

    torch.zeros(1, device=device).tolist()


class StageWeights:
    """The weights of one encoder or decoder, or of both in one process, which sleep if the model shares GPUs."""

    def __init__(self, spec: StageSpec, stage: str) -> None:
        from engines.core.resources import rank_resources
        from engines.core.weight_memory import WeightMemory

        self.memory = memory = rank_resources().get(WeightMemory)
        self._gate: AwakeGate | None = None
        self._member: ThreadMember | None = None
        if spec.share is not None:
            self._gate = AwakeGate(memory.sleep, memory.wake)
            name = f"{spec.model.name}/{stage}" if _takes_turns(spec, stage) else spec.model.name
            self._member = ThreadMember(spec.share, name, stage, self._gate, memory.use, memory.reserve)
            self._member.may_load()
            memory.open(stage_devices(spec.stage)[0], asleep_folder())

    @contextmanager
    def loading(self) -> Iterator[list[nn.Module]]:
        """Load weights inside the block, and add their modules to the list."""
        modules: list[nn.Module] = []
        with self.memory.region():
            yield modules
        for module in modules:
            self.memory.hold(module)
        if self._member is not None:
            self.memory.prepare(self._member.granted())  # host memory is touched beside the warm-up

    def loaded(self) -> None:
        """Report that all weights are loaded and warmed up; from now on they may sleep."""
        if self._member is not None:
            self._member.loaded()

    def work(self) -> AbstractContextManager[None]:
        """Return a context for work that needs the weights: entering it waits until they are awake."""
        return nullcontext() if self._gate is None else self._gate.work()

    def close(self) -> None:
        """Leave the models that share the GPUs: this process ends."""
        if self._member is not None:
            self._member.close()

    def check(self) -> None:
        """Raise an error if they do not follow orders any more."""
        if self._member is not None:
            self._member.check()


def _takes_turns(spec: StageSpec, stage: str) -> bool:
    """Return whether a stage sleeps while the others of its model are awake, as a model of its own would."""
    return stage == "text_encoder" and spec.model.text_encoder.takes_turns


P = ParamSpec("P")
T = TypeVar("T")
M = TypeVar("M", InputPicture, InputVideo)


class Workers:
    """A pool of ``num_threads`` that runs the work of all callers.

    glibc's per-thread arenas keep freed memory: large work in many threads would enlarge the process.
    """

    def __init__(self, num_threads: int, name: str) -> None:
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix=name)

    def run(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run ``work`` and return its result. Log lines carry the caller's request id."""
        context = copy_context()
        return self._pool.submit(lambda: context.run(work, *args, **kwargs)).result()

    def begin(self, work: Callable[[], None]) -> None:
        """Run ``work``, which must not raise, without waiting."""
        self._pool.submit(work)


@dataclass(frozen=True, kw_only=True, slots=True)
class SentMedia(Generic[M]):
    """A picture or clip with its bytes as an array, which Ray reads from the object store without a copy.

    A ``Parcel`` does the same for tensors.
    """

    form: M
    """The picture or clip without its bytes."""
    pixels: NDArray[np.uint8]
    """Its bytes."""

    @classmethod
    def of(cls, media: M) -> SentMedia[M]:
        return cls(form=replace(media, data=b""), pixels=np.frombuffer(media.data, np.uint8))

    def open(self) -> M:
        return replace(self.form, data=self.pixels.tobytes())


@dataclass(frozen=True, kw_only=True, slots=True)
class SentPictures:
    """Pictures and clip of a request, sent by value to the encoder only (``engines.core.parcel``)."""

    pictures: tuple[SentMedia[InputPicture], ...] = ()
    """Input pictures in the client's order."""
    mask: SentMedia[InputPicture] | None = None
    """Mask of a picture."""
    video: SentMedia[InputVideo] | None = None
    """Input clip."""
    further_videos: tuple[SentMedia[InputVideo], ...] = ()
    """Clips after the first."""
    video_mask: SentMedia[InputVideo] | None = None
    """Mask of the clip."""
    control: SentMedia[InputPicture] | None = None
    """Control picture."""

    @classmethod
    def of(cls, inputs: InputPictures) -> Self:
        """Pack ``inputs`` without a copy. Both classes have the same fields."""
        return cls(**{one.name: _each(SentMedia.of, getattr(inputs, one.name)) for one in fields(cls)})

    def open(self) -> InputPictures:
        return InputPictures(**{one.name: _each(SentMedia.open, getattr(self, one.name)) for one in fields(self)})


def _each(convert: Callable[[Any], Any], media: Any) -> Any:
    """Return a picture or clip converted, or each of several; None if there is none."""
    if isinstance(media, tuple):
        return tuple(map(convert, media))
    return None if media is None else convert(media)


NO_SENT_PICTURES = SentPictures()
