"""Seconds of a whole picture or clip: prompt, steps and decode, as far as they are known."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engines.planner.machine import Machine
    from pipelines.blocks.footprint import Footprint
    from pipelines.request import MediaRequest

NEVER_COUNTED = ("waiting", "pictures that are encoded", "sound", "the file (PNG, MP4)", "the way to the client")


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestTimes:
    """Seconds of one request on an idle gang. None: unknown before there is a request."""

    num_steps: int
    step_s: float
    encode_s: float | None
    decode_s: float | None

    @classmethod
    def of(
        cls, parts: Footprint, machine: Machine, request: MediaRequest, num_steps: int, step_ms: float
    ) -> RequestTimes:
        """``step_ms`` of a step with all its branches. With guidance there is a negative prompt as well."""
        from engines.planner.cost_model import decode_s, encode_s

        num_prompts = 2 if request.true_cfg_scale > 1 else 1
        prompt, decode = parts.prompt, parts.decode
        return cls(
            num_steps=num_steps,
            step_s=step_ms / 1e3,
            encode_s=num_prompts * encode_s(machine, prompt.flops, prompt.moved_bytes, parts.num_tokens)
            if prompt.flops
            else None,
            decode_s=None if decode is None else decode_s(machine, decode.flops, decode.moved_bytes),
        )

    @property
    def total_s(self) -> float:
        return (self.encode_s or 0.0) + self.num_steps * self.step_s + (self.decode_s or 0.0)

    @property
    def not_counted(self) -> tuple[str, ...]:
        own = {"the prompt, whose encoder or length is not known here": self.encode_s, "the decode": self.decode_s}
        return (*(name for name, value in own.items() if value is None), *NEVER_COUNTED)

    def lines(self, request: MediaRequest) -> list[str]:
        what = "picture" if request.kind == "image" or request.num_frames == 1 else "clip"
        steps = f"{self.num_steps} steps x {1e3 * self.step_s:.1f} ms"
        encode = "" if self.encode_s is None else f"encode {self.encode_s:.2f} s + "
        decode = "" if self.decode_s is None else f" + decode {self.decode_s:.2f} s (within a factor of two)"
        return [
            f"one {what}: {self.total_s:.2f} s = {encode}{steps}{decode}",
            f"not counted: {', '.join(self.not_counted)}",
        ]

    def document(self) -> dict[str, Any]:
        return asdict(self) | {"total_s": self.total_s, "not_counted": list(self.not_counted)}
