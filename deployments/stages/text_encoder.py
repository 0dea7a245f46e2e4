"""Serve deployment: prompt in, conditioning out."""

from __future__ import annotations

import logging
import threading
import time

from deployments.observability.logs import request_context
from deployments.stages.common import Encoded, StageSpec, load_stage
from pipelines.request import MediaRequest

logger = logging.getLogger(__name__)


class PromptEncoder:
    """Loads the family's text encoder once; requests run one after the other (they take milliseconds).

    Serve calls from a pool of threads, and a tokenizer keeps the padding of its last call for the next: hence the lock.
    """

    def __init__(self, spec: StageSpec) -> None:
        self._one_at_a_time = threading.Lock()
        self._encoder = load_stage(spec).text_encoder()

    def encode(self, request: MediaRequest) -> Encoded:
        started_s = time.perf_counter()
        with request_context(request.request_id):
            with self._one_at_a_time:
                conditioning = self._encoder.encode(request)
            encoded = Encoded.of(conditioning, encode_s=time.perf_counter() - started_s)
            logger.info("text is encoded", extra={"encode_s": round(encoded.encode_s, 4)})
        return encoded
