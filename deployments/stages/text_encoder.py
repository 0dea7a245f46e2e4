"""Serve deployment: prompt and pictures in, conditioning out."""

from __future__ import annotations

import logging
import time
from dataclasses import replace

from deployments.observability.logs import request_context
from deployments.stages.common import Encoded, StageSpec, load_stage
from deployments.stages.conditionings import MIB, Conditionings, Names
from deployments.stages.pictures import NO_SENT_PICTURES, SentPictures
from deployments.stages.warm_up import warm_encoder
from deployments.stages.workers import Workers
from pipelines.libraries import quick_imports
from pipelines.request import MediaRequest

logger = logging.getLogger(__name__)


class PromptEncoder:
    """Encodes one request at a time, since tokenizers keep state. Cache hits do not wait."""

    def __init__(self, spec: StageSpec) -> None:
        with quick_imports():
            checkpoint = load_stage(spec)
            self._encoder = checkpoint.text_encoder(compiled=spec.model.text_encoder.compile)
        self._encoding = Workers(1, "encoding")
        self._encoding.run(warm_encoder, self._encoder, spec, checkpoint)
        self._cache = Conditionings(spec.model.text_encoder.conditionings_mib * MIB)

    def encode(self, request: MediaRequest, pictures: SentPictures = NO_SENT_PICTURES) -> Encoded:
        started_s = time.perf_counter()
        with request_context(request.request_id):
            names = self._cache.names(request, pictures)
            encoded = self._cache.find(names) or self._encoding.run(self._encode, request, pictures, names)
            encoded = replace(encoded, encode_s=time.perf_counter() - started_s)
            fields = {"encode_s": round(encoded.encode_s, 4), "was_kept": encoded.was_kept}
            logger.info("text is encoded", extra=fields)
        return encoded

    def _encode(self, request: MediaRequest, pictures: SentPictures, names: Names | None) -> Encoded:
        """Check the cache again, then encode: an identical request may have been encoded meanwhile."""
        if encoded := self._cache.find(names):
            return encoded
        conditioning = self._encoder.encode(request, pictures.open())
        encoded = Encoded.of(conditioning, encode_s=0.0, shapes=conditioning.shapes)
        self._cache.keep(names, encoded, drew_noise=conditioning.noise is not None)
        return encoded
