"""Serve deployment: prompt and pictures in, conditioning out."""

from __future__ import annotations

import logging
import time

from deployments.observability.logs import request_context
from deployments.stages.common import Encoded, StageSpec, load_stage
from deployments.stages.pictures import NO_SENT_PICTURES, SentPictures
from deployments.stages.workers import Workers
from pipelines.libraries import quick_imports
from pipelines.request import MediaRequest

logger = logging.getLogger(__name__)


class PromptEncoder:
    """Loads the family's text encoder once; requests run one after the other (they take milliseconds): a
    tokenizer keeps the padding of its last call for the next."""

    def __init__(self, spec: StageSpec) -> None:
        with quick_imports():
            self._encoder = load_stage(spec).text_encoder()
        self._encoding = Workers(1, "encoding")

    def encode(self, request: MediaRequest, pictures: SentPictures = NO_SENT_PICTURES) -> Encoded:
        started_s = time.perf_counter()
        with request_context(request.request_id):
            conditioning = self._encoding.run(lambda: self._encoder.encode(request, pictures.open()))
            encode_s = time.perf_counter() - started_s
            encoded = Encoded.of(conditioning, encode_s=encode_s, shapes=conditioning.shapes)
            logger.info("text is encoded", extra={"encode_s": round(encoded.encode_s, 4)})
        return encoded
