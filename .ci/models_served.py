"""What models make of what, by their defaults, and what the blocks of their pipelines declare beyond that."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from pipelines.defaults import Defaults

SERVED: Mapping[str, Callable[[Defaults], bool]] = {
    "text to picture": lambda one: one.kind == "image" and not one.min_pictures,
    "picture to picture": lambda one: one.kind == "image" and one.max_pictures > 0,
    "inpainting": lambda one: one.kind == "image" and one.takes_mask,
    "layers": lambda one: one.max_layers > 0,
    "text to clip": lambda one: one.kind == "video" and not one.min_pictures,
    "picture to clip": lambda one: one.kind == "video" and one.max_pictures > 0,
    "sound": lambda one: one.kind == "video" and one.make_sound,
}
WORDS = {
    "text to picture": ("text2image",),
    "picture to picture": ("image2image", "img2img", "image_conditioned"),
    "inpainting": ("inpaint",),
    "text to clip": ("text2video", "t2va"),
    "picture to clip": ("image2video", "flf2v", "fl2va"),
    "sound": ("sound", "t2va"),
}
"""What the names of workflows mean."""
NOT_SERVED = ("controlnet", "ip_adapter", "video2video", "action", "ref2", "in_context")
"""Marks of workflows for which no request brings what they want."""


def served(models: Iterable[Defaults]) -> list[str]:
    """Returns what requests may ask of some of ``models``, in the order of ``SERVED``."""
    made = [one.of(kind) for one in models for kind in one.kinds]
    return [word for word, asks in SERVED.items() if any(map(asks, made))]


def beyond(declared: Iterable[str], words: Iterable[str]) -> list[str]:
    """Returns the workflows that are declared and not served. Those with one mark count as one, ``controlnet_…``."""
    known = set(words)
    rest = [_brief(flow) for flow in declared if not _meant(flow) <= known or not _meant(flow) or _is_marked(flow)]
    return list(dict.fromkeys(rest))


def _meant(flow: str) -> set[str]:
    return {word for word, marks in WORDS.items() if any(mark in flow for mark in marks)}


def _is_marked(flow: str) -> bool:
    return any(mark in flow for mark in NOT_SERVED)


def _brief(flow: str) -> str:
    return next((f"{mark}_…" for mark in ("ip_adapter", "controlnet") if flow.startswith(mark)), flow)
