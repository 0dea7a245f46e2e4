"""Input pictures of a request: to edit, to describe, or to start a clip with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from PIL.Image import Image

Mode = Literal["RGB", "RGBA", "L"]


@dataclass(frozen=True, kw_only=True, slots=True)
class InputPicture:
    """A validated, decoded picture: ``data`` are rows of 8-bit pixels of ``mode``, upright, without metadata."""

    width: int
    height: int
    mode: Mode
    data: bytes

    @classmethod
    def of(cls, image: Image) -> InputPicture:
        """Convert a Pillow image. ValueError for modes other than ``Mode``."""
        if image.mode not in ("RGB", "RGBA", "L"):
            raise ValueError(f"a picture of mode {image.mode}; known: RGB, RGBA, L")
        mode: Mode = image.mode  # type: ignore[assignment]  # checked above
        return cls(width=image.width, height=image.height, mode=mode, data=image.tobytes())

    def image(self) -> Image:
        from PIL import Image

        return Image.frombytes(self.mode, (self.width, self.height), self.data)

    def on_white(self) -> Image:
        """Return its colours on white: colours under transparency are arbitrary, often black."""
        from PIL import Image

        image = self.image()
        if self.mode != "RGBA":
            return image.convert("RGB")
        ground = Image.new("RGBA", image.size, "white")
        return Image.alpha_composite(ground, image).convert("RGB")

    def cut_to(self, width: int, height: int) -> InputPicture:
        """See ``InputPictures.cut_to``."""
        from PIL import Image, ImageOps

        colours = self.on_white()
        return self.of(ImageOps.fit(colours, (width, height), Image.Resampling.LANCZOS))


@dataclass(frozen=True, kw_only=True, slots=True)
class InputPictures:
    """The pictures of one request, in the client's order. ``mask`` is "L": white where to paint."""

    pictures: tuple[InputPicture, ...] = ()
    mask: InputPicture | None = None

    @property
    def num_bytes(self) -> int:
        """Memory of the pixels, those of the mask included."""
        mask = () if self.mask is None else (self.mask,)
        return sum(len(picture.data) for picture in (*self.pictures, *mask))

    def cut_to(self, width: int, height: int) -> InputPictures:
        """Return the pictures in RGB and of that size: scaled to cover it, then cropped around the centre."""
        return InputPictures(pictures=tuple(picture.cut_to(width, height) for picture in self.pictures), mask=self.mask)


NO_PICTURES = InputPictures()
