"""What an algorithm is chosen for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Epilogue = Literal["none", "bias", "gelu", "add"]
"""What the product's own kernel does last: nothing; adds a bias; adds it and applies GELU (tanh form); adds the product
to what is there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """``out_RN = epilogue(x_RK @ weight_NK.T)`` in bfloat16, accumulated in float32; all rows contiguous."""

    rows: int
    features: int
    inner: int
    epilogue: Epilogue = "none"

    @property
    def flop(self) -> float:
        return 2.0 * self.rows * self.features * self.inner
