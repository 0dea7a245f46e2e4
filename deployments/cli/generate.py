"""``troupe generate``: one prompt, with pictures or without, to one file, through a running server or one started for
the purpose."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from deployments.cli.client import NO_FILES, Client, Files, Result
from deployments.cli.progress import console, follow, timings_line
from deployments.studio.interface import Progress

IMAGE_FORMATS = {".png": "png", ".jpg": "jpeg", ".jpeg": "jpeg", ".webp": "webp"}


def generate(
    client: Client,
    prompt: str,
    out: Path,
    options: dict[str, Any],
    images: Sequence[Path] = (),
    mask: Path | None = None,
) -> None:
    """Asks ``client`` for ``prompt``, shows its progress, writes ``out``. The model's kind decides the route.

    ``images`` and ``mask`` are files that go along; of ``options``, ``lora`` is as it was written (NAME, NAME:SCALE).
    Of several pictures (``n``), or layers, each is written to a file of its own, ``out`` with its number at the end of
    the name.
    """
    files = _read(images, mask)
    if written := options.get("lora"):
        options = {**options, "lora": [_asked_lora(one) for one in written]}
    model = _model(client, options.get("model"), len(images))
    body = {"prompt": prompt, **options, "model": model["id"]}
    console.print(f"{model['id']}: {prompt}")
    num_layers = options.get("layers", model["defaults"].get("num_layers", 0))
    num_results = options.get("n", 1) * max(1, num_layers)
    results = follow(model["kind"], _events(client, model["kind"], body, out, files), num_results)
    out.parent.mkdir(parents=True, exist_ok=True)
    for number, result in enumerate(sorted(results, key=lambda result: (result.index, result.layer)), 1):
        file = out if num_results == 1 else out.with_stem(f"{out.stem}-{number}")
        file.write_bytes(result.data)
        console.print(f"{file}  seed {result.seed}  {timings_line(result)}", soft_wrap=True)


def _asked_lora(written: str) -> dict[str, Any]:
    """Returns an adapter that is written as NAME or NAME:SCALE as the API takes it. ValueError for another scale."""
    name, colon, scale = written.partition(":")
    if not colon:
        return {"name": name}
    try:
        return {"name": name, "scale": float(scale)}
    except ValueError:
        raise ValueError(f"--lora {written}: {scale!r} is no number; write NAME:SCALE") from None


def _read(images: Sequence[Path], mask: Path | None) -> Files:
    """Returns the files by the field that they are sent in. ValueError for one that cannot be read."""
    named = [("image", path) for path in images] + ([] if mask is None else [("mask", mask)])
    try:
        return [(name, (path.name, path.read_bytes())) for name, path in named]
    except OSError as error:
        raise ValueError(f"{error.filename} cannot be read: {error.strerror}") from None


def _model(client: Client, name: str | None, num_pictures: int) -> dict[str, Any]:
    """Returns the model of that name; without one the first, or with pictures the first that takes some."""
    models = client.models()
    fitting = [model for model in models if num_pictures and model["defaults"].get("max_pictures", 0)]
    for model in models if name is not None else fitting or models:
        if name is None or name in (model["id"], *model.get("aliases", ())):
            return model
    raise ValueError(f"no model {name}; served: {', '.join(model['id'] for model in models)}")


def _events(
    client: Client, kind: str, body: dict[str, Any], out: Path, files: Files = NO_FILES
) -> Iterator[Progress | Result]:
    suffix = out.suffix.lower()
    if kind == "video":
        if suffix != ".mp4":
            raise ValueError(f"{body['model']} makes clips: --out must end in .mp4, not {suffix or 'nothing'}")
        if body.get("n", 1) > 1:
            raise ValueError(f"{body['model']} makes clips, one at a time: --n is for pictures")
        if any(name == "mask" for name, _ in files):
            raise ValueError(f"{body['model']} makes clips: --mask is for pictures")
        pictures = [("input_reference", file) for _, file in files]
        return client.clip({name: value for name, value in body.items() if name != "n"}, pictures)
    if suffix not in IMAGE_FORMATS:
        raise ValueError(f"{body['model']} makes pictures: --out must end in {', '.join(IMAGE_FORMATS)}, not {suffix}")
    if not files and "strength" in body:
        raise ValueError("--strength is for pictures that go along: --image FILE")
    return client.picture({**body, "output_format": IMAGE_FORMATS[suffix]}, files)
