"""A pytest plugin for ``make test-unit`` (``-p tests.support.without_torch``): an import of torch is an error."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


class TorchRefusal(MetaPathFinder):
    """A finder that refuses torch. Its error is no ``ImportError``, which a fallback would catch and hide."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Raise ``RuntimeError`` for torch itself. Every other name goes on to the next finder."""
        if fullname == "torch":
            raise RuntimeError("a test of tests/unit.txt imports torch: mend the test, or take its file off that list")
        return None


assert "torch" not in sys.modules, "torch was imported before this plugin"
sys.meta_path.insert(0, TorchRefusal())
