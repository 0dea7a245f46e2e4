"""A file with changed bytes is a picture or a refusal, and never anything else."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from deployments.requests.request_errors import RequestError
from tests.deployments.requests.pictures.test_unpack import ORIENTATION, unpacked
from tests.deployments.support.files import file_of, noise

NUM_FILES = 300


def whole(format: str) -> bytes:
    exif = Image.Exif()
    exif[ORIENTATION] = 6
    return file_of(noise(24, 16), format, exif=exif.tobytes(), icc_profile=bytes(200))


@pytest.mark.filterwarnings("ignore::UserWarning:PIL", "ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("format", ["png", "jpeg", "webp"])
def test_changed_files_are_pictures_or_refused(format: str) -> None:
    random, data = np.random.default_rng(0), np.frombuffer(whole(format), np.uint8)
    outcomes = set[str]()
    for _ in range(NUM_FILES):
        changed = data.copy()
        places = random.integers(0, len(data), random.integers(1, 6))
        changed[places] = random.integers(0, 256, len(places))
        file = changed[: random.integers(1, len(data) + 1)] if random.random() < 0.3 else changed
        try:
            outcomes.add(unpacked(file.tobytes()).pictures[0].mode)
        except RequestError as refusal:
            outcomes.add(refusal.code)
    assert {"RGB", "bad_picture"} <= outcomes <= {"RGB", "RGBA", "bad_picture", "picture_too_large"}
