"""``troupe generate``: one prompt to one file, through a running or a temporary server."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from deployments.cli.client import NO_FILES, Client, Files, Result
from deployments.cli.progress import console, follow, timings_line
from deployments.places import file_refusal
from deployments.requests.model_choice import Needs, choose_card, fitting_cards
from deployments.service.interface import ModelCard, Progress
from pipelines.defaults import Defaults
from pipelines.request import MediaKind

IMAGE_FORMATS = {".png": "png", ".jpg": "jpeg", ".jpeg": "jpeg", ".webp": "webp"}
ENDINGS: Mapping[MediaKind, tuple[str, ...]] = {"video": (".mp4",), "image": tuple(IMAGE_FORMATS)}
"""File name extensions by kind."""
WORDS = {"video": "clips", "image": "pictures"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Inputs:
    """Files that go with a prompt."""

    images: Sequence[Path] = ()
    """Input pictures."""
    mask: Path | None = None
    """Picture or clip that is white where to paint."""
    control_image: Path | None = None
    """Picture of edges, depths or a pose to follow."""
    videos: Sequence[Path] = ()
    """Clips to change, to go on from, or to refer to."""

    def read(self) -> list[tuple[str, tuple[str, bytes]]]:
        """Return their contents with their form fields. OSError if one cannot be read."""
        others = (("mask", self.mask), ("control_image", self.control_image))
        named = [("image", path) for path in self.images] + [(name, path) for name, path in others if path is not None]
        named += [("video", path) for path in self.videos]
        return [(name, (path.name, path.read_bytes())) for name, path in named]

    def needs(self, options: Mapping[str, Any]) -> Needs:
        """Return what these and ``options`` ask of a model."""
        return Needs(
            num_pictures=len(self.images),
            has_mask=self.mask is not None,
            strength=options.get("strength"),
            num_layers=options.get("layers"),
            has_video=bool(self.videos),
            num_videos=len(self.videos),
            keeps_audio=bool(options.get("keep_audio")),
            has_control=self.control_image is not None,
        )


NO_INPUTS = Inputs()


def generate(client: Client, prompt: str, out: Path, options: dict[str, Any], inputs: Inputs = NO_INPUTS) -> None:
    """Generate ``prompt``, show progress, and write ``out``, whose extension selects the kind.

    ``inputs`` are uploaded. ``options`` are fields of the API, with ``lora`` as NAME or NAME:SCALE.
    Several pictures (``n``) or layers are written to numbered files.
    """
    files = inputs.read()
    if written := options.get("lora"):
        options = {**options, "lora": [_parse_lora(one) for one in written]}
    model = _model(client, options.get("model"), out, inputs.needs(options))
    kind = _kind(model, out)
    if kind == "image":
        _check_mask(model, inputs)
    elif inputs.mask is not None:
        _check_mask_of_clip(model, inputs)
    body = {"prompt": prompt, **options, "model": model["id"]}
    console.print(f"{model['id']}: {prompt}")
    num_layers = options.get("layers", model["defaults"].get("num_layers", 0))
    num_results = options.get("n", 1) * max(1, num_layers)
    results = follow(kind, _events(client, kind, body, out, files), num_results)
    out.parent.mkdir(parents=True, exist_ok=True)
    for number, result in enumerate(sorted(results, key=lambda result: (result.index, result.layer)), 1):
        file = out if num_results == 1 else out.with_stem(f"{out.stem}-{number}")
        file.write_bytes(result.data)
        console.print(f"{file}  seed {result.seed}  {timings_line(result)}")


def _parse_lora(written: str) -> dict[str, Any]:
    """Return the API's form of NAME or NAME:SCALE. ValueError if the scale is no number."""
    name, colon, scale = written.partition(":")
    if not colon:
        return {"name": name}
    try:
        return {"name": name, "scale": float(scale)}
    except ValueError:
        raise ValueError(f"--lora {written}: {scale!r} is no number; write NAME:SCALE") from None


def _model(client: Client, name: str | None, out: Path, needs: Needs) -> dict[str, Any]:
    """Return the model ``name``; without a name, the one that the server would take for ``out`` and ``needs``.

    If none makes such a file, return the first model. ValueError for an unknown name.
    """
    models = client.models()
    kind: MediaKind | None = next((kind for kind, endings in ENDINGS.items() if out.suffix.lower() in endings), None)
    cards = {model["id"]: _card(model) for model in models if not model.get("parent")}
    if name is None and kind is not None and fitting_cards(cards, kind):
        name = choose_card(cards, None, kind, needs).name
    for model in models:
        if name is None or name in (model["id"], *model["aliases"]):
            return model
    raise ValueError(f"no model {name}; served: {', '.join(model['id'] for model in models)}")


def _card(model: dict[str, Any]) -> ModelCard:
    """Return the part of a model's card that choices depend on, from its answer in ``/v1/models``."""
    defaults = TypeAdapter(Defaults).validate_python(model["defaults"])
    return ModelCard(name=model["id"], family=model["family"], created=model["created"], defaults=defaults)


def _check_mask(model: dict[str, Any], inputs: Inputs) -> None:
    """Raise ValueError if the model needs a mask and there is none, or if it takes no mask."""
    limits, mask = model["defaults"], inputs.mask
    if limits["needs_mask"] and not (inputs.images and mask):
        missing = " ".join(("--image FILE",) * (not inputs.images) + ("--mask FILE",) * (mask is None))
        raise ValueError(f"{model['id']} paints what a mask marks in a picture: add {missing}")
    if mask is not None and not inputs.images:
        raise ValueError("--mask says where to paint in a picture: add --image FILE")
    if mask is not None and not limits["takes_mask"]:
        raise ValueError(f"{model['id']} takes no mask: leave --mask out, or choose another --model")


def _check_mask_of_clip(model: dict[str, Any], inputs: Inputs) -> None:
    """Raise ValueError for a mask without a clip, and if the model takes none."""
    if not model["defaults"].get("masks_video"):
        raise ValueError(f"{model['id']} makes clips without a mask: leave --mask out, or choose another --model")
    if not inputs.videos:
        raise ValueError("--mask says where a clip is made anew: add --video FILE")


def check_out(out: Path) -> None:
    """Raise ValueError for a file that no model writes or that cannot be written, before a server starts."""
    known = [ending for endings in ENDINGS.values() for ending in endings]
    if out.suffix.lower() not in known:
        raise ValueError(f"--out is {out}: it must end in {', '.join(known)}, not {out.suffix.lower() or 'nothing'}")
    if problem := file_refusal(out.absolute()):
        raise ValueError(f"--out: {problem}")


def _kind(model: dict[str, Any], out: Path) -> MediaKind:
    """Return the kind that the extension of ``out`` selects. ValueError if the model does not make it."""
    check_out(out)
    kinds: list[MediaKind] = model["kinds"]
    if kind := next((kind for kind in kinds if out.suffix.lower() in ENDINGS[kind]), None):
        return kind
    made = " and ".join(WORDS[kind] for kind in kinds)
    allowed = ", ".join(ending for kind in kinds for ending in ENDINGS[kind])
    raise ValueError(f"{model['id']} makes {made}: --out must end in {allowed}, not {out.suffix.lower()}")


def _events(
    client: Client, kind: str, body: dict[str, Any], out: Path, files: Files = NO_FILES
) -> Iterator[Progress | Result]:
    if kind == "video":
        if body.get("n", 1) > 1:
            raise ValueError(f"{body['model']} makes clips, one at a time: --n is for pictures")
        if any(name == "control_image" for name, _ in files):
            raise ValueError(f"{body['model']} makes clips: --control-image is for pictures")
        named = [("input_reference" if name == "image" else name, file) for name, file in files]
        return client.clip({name: value for name, value in body.items() if name != "n"}, named)
    if any(name == "video" for name, _ in files):
        raise ValueError(f"{out.name} is a picture: --video is for clips, with --out FILE.mp4")
    if not files and "strength" in body:
        raise ValueError("--strength is for input pictures: add --image FILE")
    return client.picture({**body, "output_format": IMAGE_FORMATS[out.suffix.lower()]}, files)
