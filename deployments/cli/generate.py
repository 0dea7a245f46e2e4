"""``troupe generate``: one prompt to one file, through a running server or one started for the purpose."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from deployments.cli.client import Client, Result
from deployments.cli.progress import console, follow, timings_line
from deployments.studio.interface import Progress

IMAGE_FORMATS = {".png": "png", ".jpg": "jpeg", ".jpeg": "jpeg", ".webp": "webp"}


def generate(client: Client, prompt: str, out: Path, options: dict[str, Any]) -> None:
    """Asks ``client`` for ``prompt``, shows its progress, writes ``out``. The model's kind decides the route.

    Of several pictures (``n``) each is written to a file of its own, ``out`` with its number at the end of the name.
    """
    model = _model(client, options.get("model"))
    body = {"prompt": prompt, **options, "model": model["id"]}
    console.print(f"{model['id']}: {prompt}", highlight=False)
    num_results = options.get("n", 1)
    results = follow(model["kind"], _events(client, model["kind"], body, out), num_results)
    out.parent.mkdir(parents=True, exist_ok=True)
    for result in sorted(results, key=lambda result: result.index):
        file = out if num_results == 1 else out.with_stem(f"{out.stem}-{result.index + 1}")
        file.write_bytes(result.data)
        console.print(f"{file}  seed {result.seed}  {timings_line(result)}", highlight=False, soft_wrap=True)


def _model(client: Client, name: str | None) -> dict[str, Any]:
    models = client.models()
    for model in models:
        if name is None or model["id"] == name:
            return model
    raise ValueError(f"no model {name}; served: {', '.join(model['id'] for model in models)}")


def _events(client: Client, kind: str, body: dict[str, Any], out: Path) -> Iterator[Progress | Result]:
    suffix = out.suffix.lower()
    if kind == "video":
        if suffix != ".mp4":
            raise ValueError(f"{body['model']} makes clips: --out must end in .mp4, not {suffix or 'nothing'}")
        if body.get("n", 1) > 1:
            raise ValueError(f"{body['model']} makes clips, one at a time: --n is for pictures")
        return client.clip({name: value for name, value in body.items() if name != "n"})
    if suffix not in IMAGE_FORMATS:
        raise ValueError(f"{body['model']} makes pictures: --out must end in {', '.join(IMAGE_FORMATS)}, not {suffix}")
    return client.picture({**body, "output_format": IMAGE_FORMATS[suffix]})
