"""What decoding took, from latents to the bytes of a file: kept on the disk, for the first requests after a start."""

from __future__ import annotations

import json
import logging
import threading
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import get_args

from deployments.config import ModelConfig
from deployments.settings import Settings
from deployments.stages.gang.facts import model_facts, software_facts
from deployments.studio.interface import MediaFormat, Output
from engines.core.storage.devices import device_name
from engines.core.storage.files import file_about, write_atomically
from pipelines.request import MediaRequest

FOLDER = "decode_times"
NUM_KEPT = 32
"""Newest times of what is decoded alike, whose median counts."""
NUM_NEEDED = 3
"""The first decode of a process may take longer than others: what is known is corrected by a median without it."""
MIN_CHANGE = 0.1
"""A time that is known is replaced only by one that differs by so much."""

DecodedLike = tuple[int, MediaFormat]
"""Pixels of all frames or layers, and the format that they are written in."""

logger = logging.getLogger(__name__)


def decoded_like(request: MediaRequest, output: Output) -> DecodedLike:
    """Returns what the time of a decode goes by."""
    return request.width * request.height * max(request.num_frames, request.num_layers), output.format


def predicted_decode_s(times_s: Mapping[DecodedLike, float], like: DecodedLike) -> float | None:
    """Returns what decoding took; of a size that was not decoded yet, by its pixels beside the nearest; None before
    anything of the format was."""
    num_pixels, output_format = like
    known = {pixels: time_s for (pixels, other), time_s in times_s.items() if other == output_format}
    if not known:
        return None
    nearest = min(known, key=lambda pixels: abs(pixels - num_pixels))
    return known[nearest] * num_pixels / nearest


def decode_times_of(model: ModelConfig, devices: Sequence[str]) -> DecodeTimes:
    """Returns what is known of the decodes of ``model`` on such devices of torch's, from a file in the data directory.

    Its name has a digest of the devices, the model, its decoder as it is configured, and the software.
    """
    facts = {
        "devices": [device_name(device) for device in devices],
        **model_facts(model),
        "decoder": {"compile": model.decoder.compile, "memory_gib": model.decoder.memory_gib, "stages": model.stages},
        **software_facts(),
    }
    return DecodeTimes(file_about(Settings().data_dir / FOLDER, model.name, facts))


class DecodeTimes:
    """``file`` has them in seconds, by format and number of pixels; it is made when there is something to keep. None
    keeps them in memory alone. Any thread may call."""

    def __init__(self, file: Path | None = None) -> None:
        self._file, self._lock = file, threading.Lock()
        self._known = {} if file is None else _read(file)
        self._times: defaultdict[DecodedLike, deque[float]] = defaultdict(lambda: deque(maxlen=NUM_KEPT))

    def note(self, like: DecodedLike, decode_s: float) -> bool:
        """Hears of a decode. Returns whether that makes another prediction."""
        with self._lock:
            times, known_s = self._times[like], self._known.get(like)
            times.append(decode_s)
            median_s = round(median(times), 6)
            if known_s is not None and (len(times) < NUM_NEEDED or abs(median_s - known_s) <= MIN_CHANGE * known_s):
                return False
            self._known[like] = median_s
            return True

    def has(self, like: DecodedLike) -> bool:
        """Returns whether the time of such a decode is known, and not by another's alone."""
        with self._lock:
            return like in self._known

    def predicted_s(self, like: DecodedLike) -> float | None:
        """Returns the seconds that such a decode will take; None before one in its format was."""
        with self._lock:
            return predicted_decode_s(self._known, like)

    def save(self) -> None:
        """Writes the file, with what others have written there meanwhile; waits for the disk."""
        if self._file is None:
            return
        with self._lock:
            try:
                write_atomically(self._file, json.dumps(_nested(_read(self._file) | self._known), indent=1).encode())
            except OSError as error:  # it is measured again the next time
                logger.warning("the times of decodes cannot be kept in %s: %s", self._file, error)


def _nested(known: Mapping[DecodedLike, float]) -> dict[str, dict[str, float]]:
    nested: defaultdict[str, dict[str, float]] = defaultdict(dict)
    for (num_pixels, output_format), decode_s in sorted(known.items()):
        nested[output_format][str(num_pixels)] = decode_s
    return nested


def _read(file: Path) -> dict[DecodedLike, float]:
    """Returns what was kept; nothing where there is no such file, or none that can be read."""
    if not file.is_file():
        return {}
    try:
        nested = json.loads(file.read_text())
        return {
            (int(num_pixels), output_format): float(decode_s)
            for output_format in get_args(MediaFormat)
            for num_pixels, decode_s in nested.get(output_format, {}).items()
        }
    except (OSError, ValueError, AttributeError, TypeError) as error:
        logger.warning("%s holds no times of decodes (%s): they are measured anew", file, error)
        return {}
