"""What decoding took, from latents to the bytes of a file: kept on the disk, for the first requests after a start."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from deployments.config import ModelConfig
from deployments.settings import Settings
from deployments.stages.gang.facts import model_facts, software_facts
from deployments.studio.interface import MediaFormat, Output
from engines.core.storage.devices import device_name
from engines.core.storage.files import file_about
from engines.gang.eta.measured_times import KeptTimes
from pipelines.request import MediaRequest

FOLDER = "decode_times"
NUM_NEEDED = 3
"""The first decode of a process may take longer than others: what is known is corrected by a median without it."""

DecodedLike = tuple[MediaFormat, int]
"""The format that is written, and pixels of all frames or layers."""


def decoded_like(request: MediaRequest, output: Output) -> DecodedLike:
    """Returns what the time of a decode goes by."""
    return output.format, request.width * request.height * max(request.num_frames, request.num_layers)


def decode_times_of(model: ModelConfig, folder: Path, devices: Sequence[str]) -> DecodeTimes:
    """Returns what is known of the decodes of ``model``, a checkpoint in ``folder``, on such devices of torch's, from a
    file in the data directory.

    Its name has a digest of the devices, the model, its decoder as it is configured, and the software.
    """
    facts = {
        "devices": [device_name(device) for device in devices],
        **model_facts(model, folder),
        "decoder": {"compile": model.decoder.compile, "memory_gib": model.decoder.memory_gib, "stages": model.stages},
        **software_facts(),
    }
    return DecodeTimes(file_about(Settings().data_dir / FOLDER, model.name, facts))


class DecodeTimes(KeptTimes):
    """By format and number of pixels."""

    def __init__(self, file: Path | None = None) -> None:
        super().__init__(file, "decodes", num_first=1, num_needed=NUM_NEEDED)

    def note(self, like: DecodedLike, decode_s: float) -> bool:
        """Hears of a decode. Returns whether that makes another prediction."""
        self.hear(like, decode_s)
        return bool(self.update())

    def has(self, like: DecodedLike) -> bool:
        """Returns whether the time of such a decode is known, and not by another's alone."""
        return like in self.known

    def predicted_s(self, like: DecodedLike) -> float | None:
        """Returns the seconds that such a decode will take; of a size that was not decoded yet, by its pixels beside
        the nearest; None before one in its format was."""
        output_format, num_pixels = like
        known = {pixels: time_s for (other, pixels), (time_s, _) in self.known.items() if other == output_format}
        if not known:
            return None
        nearest = min(known, key=lambda pixels: abs(pixels - num_pixels))
        return known[nearest] * num_pixels / nearest
