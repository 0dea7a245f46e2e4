"""Provide the real builder, for graphs with quantised layers."""

from tests.engines.tensorrt_engine.conftest import build_file, translations

__all__ = ["build_file", "translations"]
