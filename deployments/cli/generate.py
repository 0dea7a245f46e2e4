"""``troupe generate``: one prompt to one file, through a running or a temporary server."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from deployments.cli.client import NO_FILES, Client, Files, Result, kinds_of
from deployments.cli.progress import console, follow, timings_line
from deployments.service.interface import Progress

IMAGE_FORMATS = {".png": "png", ".jpg": "jpeg", ".jpeg": "jpeg", ".webp": "webp"}
ENDINGS = {"video": (".mp4",), "image": tuple(IMAGE_FORMATS)}
"""File name extensions by kind."""
NO_OPTIONS: Mapping[str, Any] = MappingProxyType({})
WORDS = {"video": "clips", "image": "pictures"}


def generate(
    client: Client,
    prompt: str,
    out: Path,
    options: dict[str, Any],
    images: Sequence[Path] = (),
    mask: Path | None = None,
) -> None:
    """Generate ``prompt``, show progress, and write ``out``, whose extension selects the kind.

    ``images`` and ``mask`` are uploaded. ``options`` are fields of the API, with ``lora`` as NAME or NAME:SCALE.
    Several pictures (``n``) or layers are written to numbered files.
    """
    files = _read(images, mask)
    if written := options.get("lora"):
        options = {**options, "lora": [_parse_lora(one) for one in written]}
    model = _model(client, options.get("model"), out, len(images), options | ({} if mask is None else {"mask": mask}))
    kind = _kind(model, out)
    if kind == "image":
        _check_mask(model, images, mask)
    body = {"prompt": prompt, **options, "model": model["id"]}
    console.print(f"{model['id']}: {prompt}")
    num_layers = options.get("layers", model["defaults"].get("num_layers", 0))
    num_results = options.get("n", 1) * max(1, num_layers)
    results = follow(kind, _events(client, kind, body, out, files), num_results)
    out.parent.mkdir(parents=True, exist_ok=True)
    for number, result in enumerate(sorted(results, key=lambda result: (result.index, result.layer)), 1):
        file = out if num_results == 1 else out.with_stem(f"{out.stem}-{number}")
        file.write_bytes(result.data)
        console.print(f"{file}  seed {result.seed}  {timings_line(result)}", soft_wrap=True)


def _parse_lora(written: str) -> dict[str, Any]:
    """Return the API's form of NAME or NAME:SCALE. ValueError if the scale is no number."""
    name, colon, scale = written.partition(":")
    if not colon:
        return {"name": name}
    try:
        return {"name": name, "scale": float(scale)}
    except ValueError:
        raise ValueError(f"--lora {written}: {scale!r} is no number; write NAME:SCALE") from None


def _read(images: Sequence[Path], mask: Path | None) -> Files:
    """Return the files with their form fields. ValueError if one cannot be read."""
    named = [("image", path) for path in images] + ([] if mask is None else [("mask", mask)])
    try:
        return [(name, (path.name, path.read_bytes())) for name, path in named]
    except OSError as error:
        raise ValueError(f"{error.filename} cannot be read: {error.strerror}") from None


def _model(
    client: Client, name: str | None, out: Path, num_pictures: int, options: Mapping[str, Any] = NO_OPTIONS
) -> dict[str, Any]:
    """Return the model ``name``; without a name, the first that fits ``out``, the pictures and ``options``.

    If none fits, return the first model. ValueError for an unknown name.
    """
    models = client.models()
    fitting = [model for model in models if _fits(model, out, num_pictures)]
    if num_pictures:
        fitting.sort(key=lambda model: _is_second_choice(model, num_pictures, options))
    for model in models if name is not None else fitting or models:
        if name is None or name in (model["id"], *model.get("aliases", ())):
            return model
    raise ValueError(f"no model {name}; served: {', '.join(model['id'] for model in models)}")


def _fits(model: dict[str, Any], out: Path, num_pictures: int) -> bool:
    kind = _kind_of(model, out)
    if kind is None:
        return False
    limits = model["defaults"] if kind == kinds_of(model)[0] else model["picture_defaults"]
    if limits.get("needs_video") or limits.get("needs_control"):
        return False  # neither can be sent from here
    return bool(limits.get("max_pictures")) if num_pictures else not limits.get("min_pictures")


def _is_second_choice(model: dict[str, Any], num_pictures: int, options: Mapping[str, Any]) -> bool:
    """Return whether the model suits ``options`` less well, as in the server's ``Needs.rank``."""
    limits = model["defaults"]
    takes_mask = limits.get("takes_mask") if "mask" in options else not limits.get("needs_mask")
    if num_pictures > limits.get("max_pictures", 0) or not takes_mask:
        return True
    if "strength" in options:
        return not limits.get("takes_strength")
    return not (limits.get("max_layers") if "layers" in options else model.get("edits"))


def _check_mask(model: dict[str, Any], images: Sequence[Path], mask: Path | None) -> None:
    """Raise ValueError if the model needs a mask and there is none, or if it takes no mask."""
    limits = model["defaults"]
    if limits.get("needs_mask") and not (images and mask):
        missing = " ".join(("--image FILE",) * (not images) + ("--mask FILE",) * (mask is None))
        raise ValueError(f"{model['id']} paints what a mask marks in a picture: add {missing}")
    if mask is not None and not images:
        raise ValueError("--mask says where to paint in a picture: add --image FILE")
    if mask is not None and not limits.get("takes_mask"):
        raise ValueError(f"{model['id']} takes no mask: leave --mask out, or choose another --model")


def _kind(model: dict[str, Any], out: Path) -> str:
    """Return the kind that the extension of ``out`` selects. ValueError if the model does not make it."""
    if kind := _kind_of(model, out):
        return kind
    kinds = kinds_of(model)
    made = " and ".join(WORDS[kind] for kind in kinds)
    allowed = ", ".join(ending for kind in kinds for ending in ENDINGS[kind])
    raise ValueError(f"{model['id']} makes {made}: --out must end in {allowed}, not {out.suffix.lower() or 'nothing'}")


def _kind_of(model: dict[str, Any], out: Path) -> str | None:
    return next((kind for kind in kinds_of(model) if out.suffix.lower() in ENDINGS[kind]), None)


def _events(
    client: Client, kind: str, body: dict[str, Any], out: Path, files: Files = NO_FILES
) -> Iterator[Progress | Result]:
    if kind == "video":
        if body.get("n", 1) > 1:
            raise ValueError(f"{body['model']} makes clips, one at a time: --n is for pictures")
        if any(name == "mask" for name, _ in files):
            raise ValueError(f"{body['model']} makes clips: --mask is for pictures")
        pictures = [("input_reference", file) for _, file in files]
        return client.clip({name: value for name, value in body.items() if name != "n"}, pictures)
    if not files and "strength" in body:
        raise ValueError("--strength is for input pictures: add --image FILE")
    return client.picture({**body, "output_format": IMAGE_FORMATS[out.suffix.lower()]}, files)
