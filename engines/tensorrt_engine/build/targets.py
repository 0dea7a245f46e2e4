"""GPU generations by compute capability, and what TensorRT can do on each."""

from __future__ import annotations

from dataclasses import dataclass

_MULTI_DEVICE = (8, 0)
_FP8 = (8, 9)
_NATIVE_RING = (10, 0)


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class Target:
    """The GPU an engine file is built for, e.g. ``Target.parse("sm89")``. It runs on no other."""

    major: int
    minor: int

    def __post_init__(self) -> None:
        if (self.major, self.minor) < _MULTI_DEVICE:
            raise ValueError(f"target {self.name}: multi-device engines need compute capability 8.0 or later")

    @classmethod
    def parse(cls, text: str) -> Target:
        """Reads "sm89", "SM120", "8.9" or "12.0"."""
        digits = text.lower().removeprefix("sm").replace(".", "")
        if not (digits.isdecimal() and 2 <= len(digits) <= 3):
            raise ValueError(f"target {text!r} is no compute capability: write it as sm80, sm89, sm90, sm100 or sm120")
        return cls(major=int(digits[:-1]), minor=int(digits[-1]))

    @property
    def name(self) -> str:
        return f"sm{self.major}{self.minor}"

    @property
    def has_fp8(self) -> bool:
        return (self.major, self.minor) >= _FP8

    @property
    def has_native_ring(self) -> bool:
        """Whether attention may span devices inside the engine (``IAttention.num_ranks``, in TensorRT 11)."""
        return (self.major, self.minor) >= _NATIVE_RING
