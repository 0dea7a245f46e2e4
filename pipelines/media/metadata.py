"""The settings of a request inside its file, as texts by keyword.

PNG has them as text chunks (https://www.w3.org/TR/png-3/#11textinfo), JPEG and WebP in EXIF (CIPA DC-008), MP4 as tags
of its container. ``parameters`` has the form of AUTOMATIC1111's web UI, which Civitai and most viewers read; ``troupe``
is JSON with the fields of the API. Neither has a time: equal requests give equal bytes.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from PIL import ExifTags, Image, UnidentifiedImageError
from PIL.PngImagePlugin import PngInfo

from pipelines.request import Lora, MediaRequest, MetadataLevel, SecondStage

Texts = Mapping[str, str]
NO_TEXTS: Texts = MappingProxyType({})

PARAMETERS, TROUPE = "parameters", "troupe"
TAGS = {PARAMETERS: "comment", TROUPE: "description"}
"""Text to a tag of an MP4 that every player supports."""
UNICODE, ASCII = b"UNICODE\0", b"ASCII\0\0\0"
"""Prefixes of the EXIF tag UserComment."""
MAX_JPEG_EXIF_BYTES = 65533 - 6
"""Size limit of a JPEG's APP1 segment, less its length and ``Exif\\0\\0``."""
SEED_FIELDS = ("software", "model", "seed")
NAMES = {
    "num_inference_steps": "Steps",
    "sampler": "Sampler",
    "true_cfg_scale": "CFG scale",
    "guidance_scale": "Distilled CFG Scale",
    "seed": "Seed",
    "size": "Size",
    "model": "Model",
    "strength": "Denoising strength",
    "num_frames": "Frames",
    "fps": "FPS",
    "software": "Version",
}
"""Field to its name in ``parameters``, in order."""
QUOTED = re.compile(r"[,:\n]")

logger = logging.getLogger("troupe.media")


@dataclass(frozen=True, kw_only=True, slots=True)
class MetadataWriter:
    level: MetadataLevel
    """All settings, model and seed alone, or nothing."""
    software: str
    """Name and version."""
    sampler: str = ""
    """Class of the model's scheduler."""

    def texts(self, request: MediaRequest, layer: int | None = None) -> Texts:
        """Return the texts of a file of ``request``, or of its ``layer``."""
        if self.level == "none":
            return NO_TEXTS
        fields = {"software": self.software, **_fields(request, layer)}
        if self.level == "seed":
            fields = {name: fields[name] for name in SEED_FIELDS}
        elif self.sampler:
            fields["sampler"] = fields.get("scheduler", self.sampler)
        return {PARAMETERS: parameters(fields), TROUPE: json.dumps(fields)}


def _fields(request: MediaRequest, layer: int | None) -> dict[str, Any]:
    """Return the fields that reproduce the file, under their names in the API."""
    is_clip = request.kind == "video"
    fields = {
        "model": request.model,
        "prompt": request.prompt,
        "enhance_prompt": None if request.enhance_prompt is None else False,  # this is the prompt that was used
        "negative_prompt": request.negative_prompt,
        "seed": request.seed,
        "size": f"{request.width}x{request.height}",
        "num_frames": request.num_frames if is_clip else None,
        "fps": request.fps if is_clip else None,
        "num_inference_steps": request.num_inference_steps,
        "guidance_scale": request.guidance_scale or None,
        "true_cfg_scale": request.true_cfg_scale,
        "lora": _named(request.loras),
        "cache": None if request.cache == "off" else request.cache,
        "attention": request.attention,
        **{name: value for name, value in asdict(request.solver).items() if value not in ("", ())},
        **_second_stage(request.second_stage),
        "strength": request.strength,
        "generate_sound": request.sound,
        "num_pictures": request.num_pictures or None,
        "frame_indices": list(request.frame_indices) or None,
        "has_mask": request.has_mask or None,
        "num_video_frames": request.num_video_frames or None,
        "further_video_frames": list(request.further_video_frames) or None,
        "keep_audio": bool(request.sound_samples) or None,
        "has_control": request.has_control or None,
        "control_scale": request.control_scale,
        "control_guidance_start": request.control_guidance_start,
        "control_guidance_end": request.control_guidance_end,
        "layers": request.num_layers or None,
        "layer": layer,
    }
    return {name: value for name, value in fields.items() if value is not None}


def _named(loras: tuple[Lora, ...]) -> list[dict[str, Any]] | None:
    return [{"name": lora.name, "scale": lora.scale} for lora in loras] or None


def _second_stage(second: SecondStage | None) -> dict[str, Any]:
    return {} if second is None else {"second_stage_sigmas": second.sigmas, "second_stage_lora": _named(second.loras)}


def parameters(fields: Mapping[str, Any]) -> str:
    """Return ``fields`` in the form of AUTOMATIC1111: prompt, negative prompt, and a line of all other fields.

    Adapters are in the prompt there, as ``<lora:NAME:SCALE>``.
    """
    adapters = "".join(f" <lora:{lora['name']}:{lora['scale']:g}>" for lora in fields.get("lora", ()))
    lines = [f"{fields['prompt']}{adapters}"] if "prompt" in fields else []
    if "negative_prompt" in fields:
        lines.append(f"Negative prompt: {fields['negative_prompt']}")
    named = ((name, fields[field]) for field, name in NAMES.items() if field in fields)
    lines.append(", ".join(f"{name}: {_quoted(value)}" for name, value in named))
    return _plain("\n".join(lines))


def _quoted(value: object) -> str:
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return json.dumps(text, ensure_ascii=False) if QUOTED.search(text) else text


def _plain(text: str) -> str:
    """Return ``text`` without NUL, which ends a text, and with lone surrogates replaced."""
    return text.replace("\0", "").encode(errors="replace").decode()


def png_chunks(texts: Texts) -> list[tuple[bytes, bytes]]:
    """Return (type, content) of each text chunk: tEXt for Latin-1, iTXt for all else."""
    info = PngInfo()
    for keyword, text in texts.items():
        info.add_text(keyword, text)
    return [(chunk[0], chunk[1]) for chunk in info.chunks]


def exif_of(texts: Texts, max_bytes: float = float("inf")) -> bytes:
    """Return the EXIF block of a JPEG or WebP; empty without ``texts``.

    Above ``max_bytes``, return the JSON alone if it fits, else ``parameters`` alone if they fit, else nothing.
    """
    for keywords in ((PARAMETERS, TROUPE), (TROUPE,), (PARAMETERS,)):
        exif = _exif({keyword: texts[keyword] for keyword in keywords if keyword in texts})
        if len(exif) <= max_bytes:
            return exif
    logger.warning("settings are left out of a JPEG: they exceed its EXIF limit", extra={"max_bytes": max_bytes})
    return b""


def _exif(texts: Texts) -> bytes:
    if not texts:
        return b""
    exif = Image.Exif()
    exif.endian = ">"  # as in UserComment: some readers apply one byte order to both
    tags = exif.get_ifd(ExifTags.IFD.Exif)
    if PARAMETERS in texts:
        tags[ExifTags.Base.UserComment] = UNICODE + texts[PARAMETERS].encode("utf-16-be")
    if TROUPE in texts:
        tags[ExifTags.Base.MakerNote] = texts[TROUPE].encode()
    return exif.tobytes()


def tags_of(texts: Texts) -> dict[str, str]:
    """Return the tags of an MP4."""
    return {TAGS[keyword]: text for keyword, text in texts.items()}


def read_texts(file: Path) -> Texts:
    """Return the texts of a PNG, JPEG, WebP or MP4, by keyword: Troupe's, and those of other programs.

    ValueError for a file of another kind, OSError for one that cannot be read.
    """
    try:
        with Image.open(file, formats=("PNG", "JPEG", "WEBP")) as image:
            texts = dict(getattr(image, "text", {}))
            return texts | _exif_texts(image.getexif().get_ifd(ExifTags.IFD.Exif))
    except UnidentifiedImageError:
        return _mp4_texts(file)


def settings_in(texts: Texts) -> dict[str, Any] | None:
    """Return the fields that ``MetadataWriter`` wrote; None if it did not."""
    with suppress(ValueError):
        fields = json.loads(texts.get(TROUPE, ""))
        if isinstance(fields, dict) and set(SEED_FIELDS) <= set(fields):
            return fields
    return None


def _exif_texts(tags: Mapping[int, Any]) -> dict[str, str]:
    comment, note = tags.get(ExifTags.Base.UserComment), tags.get(ExifTags.Base.MakerNote)
    texts = {PARAMETERS: _user_comment(comment)} if isinstance(comment, bytes) else {}
    if isinstance(note, bytes) and note.startswith(b"{"):  # unlike a camera's
        texts[TROUPE] = note.decode(errors="replace")
    return {keyword: text for keyword, text in texts.items() if text}


def _user_comment(comment: bytes) -> str:
    """Return the text of a UserComment. Programs disagree on the byte order of its UTF-16."""
    code, text = comment[:8], comment[8:]
    if code != UNICODE:
        return (text if code == ASCII else comment).decode(errors="replace").strip("\0 ")
    is_big = text[::2].count(0) >= text[1::2].count(0)
    return text.decode("utf-16-be" if is_big else "utf-16-le", errors="replace")


def _mp4_texts(file: Path) -> dict[str, str]:
    import av  # not needed for pictures

    try:
        with av.open(str(file), format="mp4") as container:
            tags = dict(container.metadata)
    except (av.FFmpegError, EOFError):
        raise ValueError(f"{file} is no PNG, JPEG, WebP or MP4") from None
    return {keyword: tags[tag] for keyword, tag in TAGS.items() if tag in tags}
