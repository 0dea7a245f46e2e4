"""Which extra of the package brings a module that is not installed."""

from __future__ import annotations

from collections.abc import Mapping

EXTRAS: Mapping[str, tuple[str, ...]] = {
    "export": ("onnx", "onnx_ir", "onnxscript", "onnxruntime", "filelock", "sympy"),
    "gpu": ("tensorrt",),
    "rtx": ("tensorrt_rtx_bindings",),
    "postgres": ("asyncpg",),
    "provenance": ("c2pa", "cryptography"),
    "train": ("matplotlib", "scipy"),
}
"""Extra to the modules that are imported of what it installs."""


def install_hint(extra: str) -> str:
    """Return the command for the root of a clone: the package is on no index."""
    return f"pip install '.[{extra}]'"


def hint_for(module: str) -> str | None:
    """Return the command that installs ``module``, or None if no extra has it."""
    package = module.split(".")[0]
    return next((install_hint(extra) for extra, modules in EXTRAS.items() if package in modules), None)
