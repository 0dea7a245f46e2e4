"""Serve deployment: prompt and pictures in, conditioning out."""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import Self

from deployments.observability.logs import request_context
from deployments.stages.common import (
    NO_SENT_PICTURES,
    Encoded,
    SentPictures,
    StageSpec,
    StageWeights,
    WeightStage,
    Workers,
    load_stage,
    refusal,
    use_device,
)
from deployments.stages.devices import stage_devices
from deployments.stages.kernel_cache import stage_kernels
from deployments.stages.warm_up import warm_encoder
from engines.core.logs import timed
from pipelines.libraries import quick_imports
from pipelines.request import InputSound, MediaRequest
from pipelines.solver import AS_THE_MODEL

MIB = 2**20
OVERHEAD_BYTES = 1024
"""Bytes of a cache entry beside its tensors and skeleton."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheKeys:
    """Digests of everything that conditioning may depend on.

    Fields that cannot matter are excluded by name, so a new field counts by default. The client's API key is included:
    otherwise cache timing would reveal other clients' prompts.
    """

    unseeded: bytes
    """Key without the seed, for encoders that draw nothing."""
    seeded: bytes
    """With the seed."""

    @classmethod
    def of(cls, request: MediaRequest, pictures: SentPictures) -> Self:
        relevant = replace(request, request_id="", preview_steps=(), solver=AS_THE_MODEL, attention=None)
        relevant = replace(relevant, service_tier="default", deadline_s=None, waited_s=0.0, weight=1.0)
        relevant = replace(relevant, enhance_prompt=None, enhancer_outcome=None, given_prompt=None, source_clip_id=None)
        picture_digest = _digest(pictures)
        texts = (repr(replace(relevant, seed=0)), repr(relevant))
        unseeded, seeded = (hashlib.sha256(text.encode() + picture_digest).digest() for text in texts)
        return cls(unseeded=b"unseeded" + unseeded, seeded=b"seeded" + seeded)


def _digest(pictures: SentPictures) -> bytes:
    """Return SHA-256 over number, mask flag, shapes and pixels (zero-copy), and those of clips with their sound."""
    mask = () if pictures.mask is None else (pictures.mask,)
    control = () if pictures.control is None else (pictures.control,)
    sent = (*pictures.pictures, *control, *mask)
    forms = [(one.form, one.pixels.nbytes) for one in sent]
    clips = [one for one in (pictures.video, *pictures.further_videos, pictures.video_mask) if one is not None]
    clip_forms = [(replace(one.form, sound=None), _sound_form(one.form.sound)) for one in clips]
    digest = hashlib.sha256(repr((len(mask), len(control), forms, clip_forms)).encode())
    for one in (*sent, *clips):
        digest.update(one.pixels.data)
    for clip in clips:
        digest.update(b"" if clip.form.sound is None else clip.form.sound.data)
    return digest.digest()


def _sound_form(sound: InputSound | None) -> tuple[int, ...]:
    return () if sound is None else (sound.num_channels, sound.rate, len(sound.data))


class ConditioningCache:
    """Thread-safe LRU cache of up to ``max_bytes``; disabled with 0.

    Entries are shared parcels, never changed: opening one copies its bytes.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes, self._num_bytes = max_bytes, 0
        self._entries: OrderedDict[bytes, Encoded] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def num_bytes(self) -> int:
        """Bytes in the cache."""
        return self._num_bytes

    def keys(self, request: MediaRequest, pictures: SentPictures) -> CacheKeys | None:
        """Return the cache keys of a request; None if the cache is disabled."""
        return CacheKeys.of(request, pictures) if self._max_bytes else None

    def find(self, keys: CacheKeys | None) -> Encoded | None:
        if keys is None:
            return None
        with self._lock:
            key = next((key for key in (keys.unseeded, keys.seeded) if key in self._entries), None)
            if key is None:
                return None
            self._entries.move_to_end(key)
            return replace(self._entries[key], was_kept=True)

    def add(self, keys: CacheKeys | None, encoded: Encoded, *, drew_noise: bool) -> None:
        """Add an entry. ``drew_noise``: the encoder used the request's generator, so the seed is part of the key."""
        if keys is None or (size := _num_bytes(encoded)) > self._max_bytes:
            return
        key = keys.seeded if drew_noise else keys.unseeded
        with self._lock:
            if key in self._entries:
                self._num_bytes -= _num_bytes(self._entries.pop(key))
            self._entries[key] = encoded
            self._num_bytes += size
            while self._num_bytes > self._max_bytes:
                _, oldest = self._entries.popitem(last=False)
                self._num_bytes -= _num_bytes(oldest)


def _num_bytes(encoded: Encoded) -> int:
    return encoded.message.nbytes + len(encoded.skeleton) + OVERHEAD_BYTES


class PromptEncoder(WeightStage):
    """Encodes one request at a time, since tokenizers keep state. Cache hits do not wait."""

    def __init__(self, spec: StageSpec, *, is_whole: bool = True) -> None:
        """Load the encoder. ``is_whole``: this process has no other part of the model."""
        with quick_imports(), timed("encoder: weights", model=spec.model.name):
            with timed("encoder: checkpoint", model=spec.model.name):
                checkpoint = load_stage(spec)
            self._weights = StageWeights(spec, "text_encoder")
            with timed("encoder: device", model=spec.model.name):
                use_device(stage_devices(spec.stage)[0])
            with self._weights.loading() as modules:
                options = spec.model.text_encoder
                self._encoder = checkpoint.text_encoder(
                    compiled=options.compile, offloads_layers=options.offloads_layers
                )
                modules.extend(self._encoder.modules)
        self._weights.memory.before_sleep(self._encoder.forget_copies)
        self._encoding = Workers(1, "encoding")
        kernels = stage_kernels(spec.model, "text_encoder", stage_devices(spec.stage)[0])
        with timed("encoder: warm up", model=spec.model.name), kernels:
            self._encoding.run(warm_encoder, self._encoder, spec, checkpoint)
        self._cache = ConditioningCache(spec.model.text_encoder.conditionings_mib * MIB)
        if is_whole:
            self._weights.loaded()

    def encode(self, request: MediaRequest, pictures: SentPictures = NO_SENT_PICTURES) -> Encoded | Exception:
        """Return the conditioning, or the error of a wrong request."""
        with request_context(request.request_id):
            try:
                return self.encode_valid(request, pictures)
            except ValueError as error:
                return refusal(error)

    def encode_valid(self, request: MediaRequest, pictures: SentPictures = NO_SENT_PICTURES) -> Encoded:
        """Return the conditioning. ValueError if the request is wrong."""
        start_s = time.perf_counter()
        keys = self._cache.keys(request, pictures)
        encoded = self._cache.find(keys) or self._encode_awake(request, pictures, keys)
        encoded = replace(encoded, encode_s=time.perf_counter() - start_s)
        fields = {"encode_s": round(encoded.encode_s, 4), "was_kept": encoded.was_kept}
        logger.info("text is encoded", extra=fields)
        return encoded

    def _encode_awake(self, request: MediaRequest, pictures: SentPictures, keys: CacheKeys | None) -> Encoded:
        with self._weights.work():
            return self._encoding.run(self._encode, request, pictures, keys)

    def _encode(self, request: MediaRequest, pictures: SentPictures, keys: CacheKeys | None) -> Encoded:
        """Check the cache again, then encode: an identical request may have been encoded meanwhile."""
        if encoded := self._cache.find(keys):
            return encoded
        conditioning = self._encoder.encode(request, pictures.open())
        encoded = Encoded.of(conditioning, encode_s=0.0, shapes=conditioning.shapes)
        self._cache.add(keys, encoded, drew_noise=conditioning.noise is not None)
        return encoded
