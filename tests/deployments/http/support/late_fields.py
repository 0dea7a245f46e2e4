"""Make applications in half the time: a test calls few of an application's 33 routes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, cached_property
from typing import Any
from unittest.mock import patch

from fastapi._compat.v2 import ModelField
from fastapi.dependencies import utils

ADAPTER = "_type_adapter"
_build_adapter = ModelField.__post_init__


def _late_adapter(field: ModelField) -> Any:
    """Return the validator that FastAPI gives ``field``. From then on it is an attribute of ``field`` itself."""
    _build_adapter(field)
    return vars(field)[ADAPTER]


_attribute = cached_property(_late_adapter)
_attribute.__set_name__(ModelField, ADAPTER)
setattr(ModelField, ADAPTER, _attribute)


@contextmanager
def late_fields() -> Iterator[None]:
    """Make routes whose validators are built on first use, and read each function's signature once.

    An OpenAPI document uses all of them (``test_openapi.py``).
    """
    signatures = patch.object(utils, "_get_signature", cache(utils._get_signature))
    with patch.object(ModelField, "__post_init__", lambda field: None), signatures:
        yield
