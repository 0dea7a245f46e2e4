"""``troupe generate``: one prompt to one file, through a running server or one started for the purpose."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from deployments.cli.client import Client, Result
from deployments.cli.progress import console, follow, timings_line
from deployments.studio.interface import Progress

IMAGE_FORMATS = {".png": "png", ".jpg": "jpeg", ".jpeg": "jpeg", ".webp": "webp"}


def generate(client: Client, prompt: str, out: Path, options: dict[str, Any]) -> Result:
    """Asks ``client`` for ``prompt``, shows its progress, writes ``out``. The model's kind decides the route."""
    model = _model(client, options.get("model"))
    body = {"prompt": prompt, **options, "model": model["id"]}
    console.print(f"{model['id']}: {prompt}", highlight=False)
    result = follow(model["kind"], _events(client, model["kind"], body, out))
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_bytes(result.data)
    console.print(f"{out}  seed {result.seed}  {timings_line(result)}", highlight=False, soft_wrap=True)
    return result


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
        return client.clip(body)
    if suffix not in IMAGE_FORMATS:
        raise ValueError(f"{body['model']} makes pictures: --out must end in {', '.join(IMAGE_FORMATS)}, not {suffix}")
    return client.picture({**body, "output_format": IMAGE_FORMATS[suffix]})
