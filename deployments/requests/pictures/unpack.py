"""Pixels from bytes of strangers, with Pillow. It looks at all heads before it unpacks anything."""

from __future__ import annotations

import io
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from deployments.requests.pictures.limits import PictureLimits
from deployments.requests.pictures.sources import (
    PICTURE,
    VIDEO,
    VIDEO_MASK,
    Sources,
    bytes_of,
    check_num_bytes,
    max_bytes_of,
)
from deployments.requests.pictures.video import FormBeside, VideoForm, VideoHead, is_clip, read_video
from deployments.requests.request_errors import RequestError
from pipelines.request import NO_PICTURES, InputPicture, InputPictures, InputVideo

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("PNG", "JPEG", "WEBP")
ANIMATED = ("PNG", "WEBP")
"""Formats whose further frames are an animation. In a JPEG they are views of a camera; the first is the picture."""
VIDEO_FIELD, MASK_FIELD = "video", "mask"
KINDS = "a PNG, JPEG or WebP file"
OPAQUE = 255
PROFILE = "icc_profile"
COLOURED = ("L", "RGB", "RGBA", "CMYK")


def unpack(sources: Sources, limits: PictureLimits, form_of: FormBeside | None = None) -> InputPictures:
    """Return upright 8-bit pictures, "RGB" ("RGBA" with transparency), the mask, and the clips as ``form_of`` has it.

    It chooses by the first clip, and further ones have the same form.

    Metadata is dropped; palettes, CMYK, 16 bits and the colours of ICC profiles are converted. RequestError for a file
    that is no still picture of the formats, is broken or exceeds a limit. It is also raised for a mask that does not
    fit the first picture. Call it outside event loops, since it takes time.
    """
    num_pictures = len(sources.pictures)
    if num_pictures > limits.max_input_pictures:
        message = f"{num_pictures} input pictures were sent; the limit is {limits.max_input_pictures}"
        raise RequestError(message, sources.param)
    pictures = _pictures(sources, limits)
    if sources.video is None:
        return pictures
    assert form_of is not None, "a clip needs a form"
    forms = list[VideoForm]()

    def form(head: VideoHead) -> VideoForm:
        forms.append(form_of(head, pictures))
        return forms[0]

    first, *others = (bytes_of(one, VIDEO_FIELD, limits, VIDEO) for one in sources.videos)
    mask = None if sources.video_mask is None else bytes_of(sources.video_mask, MASK_FIELD, limits, VIDEO_MASK)
    end_s = limits.decode_end_s()  # one for all clips and their sounds, once they are fetched
    video = read_video(first, VIDEO_FIELD, limits, form, end_s)
    further = tuple(read_video(one, VIDEO_FIELD, limits, lambda _: forms[0], end_s) for one in others)
    pictures = replace(pictures, video=video, further_videos=further)
    if mask is None:
        return pictures
    form_of_mask = replace(forms[0], max_frames=video.num_frames, is_cut=True, frame_multiple=1, min_frames=1)
    form_of_mask = replace(form_of_mask, sound_rate=0)
    return replace(pictures, video_mask=_video_mask(mask, limits, form_of_mask, end_s))


def _video_mask(data: bytes, limits: PictureLimits, form: VideoForm, end_s: float) -> InputVideo:
    """Return the mask of a clip in its ``form``: a clip of that length, or a picture for all frames."""
    from PIL import Image, ImageOps

    kind = VIDEO if is_clip(data) else PICTURE
    check_num_bytes(len(data), MASK_FIELD, max_bytes_of(kind, limits), kind)
    if kind is VIDEO:
        mask = read_video(data, MASK_FIELD, limits, lambda _: form, end_s)
        if mask.num_frames != form.max_frames:
            message = f"mask has {mask.num_frames} frames at {form.fps} fps, and the clip {form.max_frames}"
            raise RequestError(f"{message}: make them as long, or send a picture", MASK_FIELD)
        return mask
    opened = _opened(data, MASK_FIELD)
    _check_heads([(MASK_FIELD, opened)], limits)
    fit = ImageOps.pad if form.is_whole else ImageOps.fit
    picture = _mask(_upright(MASK_FIELD, opened), ()).image().convert("RGB")
    frame = fit(picture, (form.width, form.height), Image.Resampling.LANCZOS).tobytes()
    data = frame * form.max_frames
    return InputVideo(width=form.width, height=form.height, num_frames=form.max_frames, fps=form.fps, data=data)


def _pictures(sources: Sources, limits: PictureLimits) -> InputPictures:
    if not sources.all:
        return NO_PICTURES
    files = [(param, bytes_of(source, param, limits)) for param, source in sources.all]
    waiting = deque((param, _opened(data, param)) for param, data in files)
    _check_heads(waiting, limits)
    # Each leaves the queue before it is converted, so that only one is in memory in two forms.
    pictures = tuple(_coloured(_upright(*waiting.popleft())) for _ in range(len(sources.pictures)))
    control = None if sources.control is None else _coloured(_upright(*waiting.popleft()))
    mask = _mask(_upright(*waiting.popleft()), pictures) if waiting else None
    return InputPictures(pictures=pictures, mask=mask, control=control)


def _opened(data: bytes, param: str) -> Image:
    """Return the picture whose header was read."""
    from PIL import Image

    with _blaming(param):
        return Image.open(io.BytesIO(data), formats=FORMATS)


def _check_heads(opened: Iterable[tuple[str, Image]], limits: PictureLimits) -> None:
    num_pixels = 0
    for param, image in opened:
        width, height = image.size
        if image.format in ANIMATED and getattr(image, "is_animated", False):
            raise RequestError(f"{param} is animated; send a still picture", param, code="bad_picture")
        if max(width, height) > limits.max_picture_aspect * min(width, height):
            allowed = f"no side may be longer than {limits.max_picture_aspect:g} times the other"
            raise RequestError(f"{param} has {width}x{height} pixels; {allowed}", param, code="bad_picture")
        num_pixels += width * height
        if num_pixels > limits.max_picture_pixels:
            raise _too_many_pixels(param, limits.max_picture_pixels, f"{width}x{height} pixels")


def _too_many_pixels(param: str, max_pixels: int | None, size: str) -> RequestError:
    allowed = "" if max_pixels is None else f"; the pictures of a request may have {max_pixels} together"
    return RequestError(f"{param} has {size}{allowed}: make it smaller", param, code="picture_too_large")


def _upright(param: str, image: Image) -> Image:
    """Return the decoded picture in mode "L", "RGB" or "RGBA"."""
    from PIL import ImageOps

    with _blaming(param):
        image.load()
        profile = image.info.get(PROFILE)
        ImageOps.exif_transpose(image, in_place=True)
        return _plain(image if profile is None else _as_srgb(image, profile))


def _as_srgb(image: Image, profile: bytes) -> Image:
    """Return the picture in sRGB, converted from its ICC ``profile``, with its opacity.

    The picture is unchanged if the profile cannot be read, or is for another kind, such as grey in a coloured file.
    """
    from PIL import ImageCms

    if image.mode == "P":
        image = image.convert("RGBA" if image.has_transparency_data else "RGB")
    if image.mode not in COLOURED:
        return image
    opacity = image.getchannel("A") if image.mode == "RGBA" else None
    colours = image.convert("RGB") if opacity is not None else image
    try:
        source = ImageCms.ImageCmsProfile(io.BytesIO(profile))
        converted = ImageCms.profileToProfile(colours, source, ImageCms.createProfile("sRGB"), outputMode="RGB")
    except (ImageCms.PyCMSError, OSError):
        return image
    assert converted is not None
    if opacity is not None:
        converted.putalpha(opacity)
    return converted


def _plain(image: Image) -> Image:
    from PIL import Image

    if image.mode.startswith("I"):  # 16 bits of grey: Pillow's own conversion cuts off at 255
        import numpy as np

        return Image.fromarray((np.asarray(image).astype(np.uint32) >> 8).astype(np.uint8))
    if image.has_transparency_data:
        return _as(image, "RGBA")
    return _as(image, "L" if image.mode in ("1", "L") else "RGB")


def _is_opaque(image: Image) -> bool:
    return image.mode != "RGBA" or image.getchannel("A").getextrema()[0] == OPAQUE


def _coloured(image: Image) -> InputPicture:
    return InputPicture.of(_as(image, "RGB") if _is_opaque(image) else image)


def _as(image: Image, mode: str) -> Image:
    """Return ``image`` itself if it has ``mode``, where Pillow's own conversion would copy it."""
    return image if image.mode == mode else image.convert(mode)


def _mask(image: Image, pictures: Sequence[InputPicture]) -> InputPicture:
    """Return a mask, white where to paint: transparent parts of ``image`` (as OpenAI has it), else white parts."""
    from PIL import ImageChops

    width, height = image.size
    if pictures and (width, height) != (pictures[0].width, pictures[0].height):
        size = f"{pictures[0].width}x{pictures[0].height}"
        raise RequestError(
            f"mask has {width}x{height} pixels; the first picture has {size}: make them the same", "mask"
        )
    mask = image.convert("RGB").convert("L") if _is_opaque(image) else ImageChops.invert(image.getchannel("A"))
    if mask.getextrema()[1] == 0:
        message = "mask marks nothing: what is to be painted must be transparent in it, or white"
        raise RequestError(message, "mask")
    return InputPicture.of(mask)


@contextmanager
def _blaming(param: str) -> Iterator[None]:
    """Turn any exception of Pillow into a sentence about the file."""
    from PIL import Image, UnidentifiedImageError

    try:
        yield
    except MemoryError:
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise _too_many_pixels(param, None, "too many pixels") from None
    except UnidentifiedImageError:
        raise RequestError(f"{param} is no picture that can be read; send {KINDS}", param, code="bad_picture") from None
    except Exception as error:
        message = f"{param} is broken, or a part of it is missing ({error}); send {KINDS} that is whole"
        raise RequestError(message, param, code="bad_picture") from error
