"""Errors of builds, told of the model that was to be one: which it is, and what runs it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from engines.core.model import DenoiserModel
from engines.tensorrt_engine.build.builder import BuildError


@contextmanager
def told_of(model: DenoiserModel, strategy: str) -> Iterator[None]:
    """Names the class of ``model`` in a BuildError, and what works instead; TensorRT's own words are the cause."""
    try:
        yield
    except BuildError as error:
        raise BuildError(
            f"TensorRT cannot build an engine of {model.class_name} with {strategy}: use another strategy, or engine: "
            f"torch. Its own words: {error}"
        ) from error
