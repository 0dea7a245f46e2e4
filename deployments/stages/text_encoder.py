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
    """Loads the family's text encoder once; requests run one after the other (they take milliseconds): a
    tokenizer keeps the padding of its last call for the next. Who says what was said before, does not wait for them."""

    def __init__(self, spec: StageSpec) -> None:
        with quick_imports():
            checkpoint = load_stage(spec)
            self._encoder = checkpoint.text_encoder(compiled=spec.model.text_encoder.compile)
        self._encoding = Workers(1, "encoding")
        self._encoding.run(warm_encoder, self._encoder, spec, checkpoint)
        self._kept = Conditionings(spec.model.text_encoder.conditionings_mib * MIB)

    def encode(self, request: MediaRequest, pictures: SentPictures = NO_SENT_PICTURES) -> Encoded:
        started_s = time.perf_counter()
        with request_context(request.request_id):
            names = self._kept.names(request, pictures)
            encoded = self._kept.find(names) or self._encoding.run(self._encode, request, pictures, names)
            encoded = replace(encoded, encode_s=time.perf_counter() - started_s)
            fields = {"encode_s": round(encoded.encode_s, 4), "was_kept": encoded.was_kept}
            logger.info("text is encoded", extra=fields)
        return encoded

    def _encode(self, request: MediaRequest, pictures: SentPictures, names: Names | None) -> Encoded:
        """Look once more: of those who come together and say the same, the first may have been before this one."""
        if encoded := self._kept.find(names):
            return encoded
        conditioning = self._encoder.encode(request, pictures.open())
        encoded = Encoded.of(conditioning, encode_s=0.0, shapes=conditioning.shapes)
        self._kept.keep(names, encoded, drew_noise=conditioning.noise is not None)
        return encoded
