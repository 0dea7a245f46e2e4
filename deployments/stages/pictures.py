"""Pictures on their way from the ingress to an encoder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from pipelines.pictures import InputPicture, InputPictures, Mode


@dataclass(frozen=True, kw_only=True, slots=True)
class SentPicture:
    """One picture. Ray leaves the bytes of an array in the object store and copies none to read, as of a ``Parcel``."""

    width: int
    height: int
    mode: Mode
    pixels: NDArray[np.uint8]

    @classmethod
    def of(cls, picture: InputPicture) -> Self:
        pixels = np.frombuffer(picture.data, np.uint8)
        return cls(width=picture.width, height=picture.height, mode=picture.mode, pixels=pixels)

    def open(self) -> InputPicture:
        return InputPicture(width=self.width, height=self.height, mode=self.mode, data=self.pixels.tobytes())


@dataclass(frozen=True, kw_only=True, slots=True)
class SentPictures:
    """The pictures of a request. They travel as values, to the encoder alone (``engines.core.transport.parcel``)."""

    pictures: tuple[SentPicture, ...] = ()
    mask: SentPicture | None = None

    @classmethod
    def of(cls, inputs: InputPictures) -> Self:
        """Pack ``inputs`` without a copy."""
        mask = None if inputs.mask is None else SentPicture.of(inputs.mask)
        return cls(pictures=tuple(map(SentPicture.of, inputs.pictures)), mask=mask)

    def open(self) -> InputPictures:
        pictures = tuple(picture.open() for picture in self.pictures)
        return InputPictures(pictures=pictures, mask=None if self.mask is None else self.mask.open())


NO_SENT_PICTURES = SentPictures()
