"""What stages hand to each other: small records around references. Tensors stay in the object store."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ray


@dataclass(frozen=True, kw_only=True, slots=True)
class Encoded:
    """Conditioning, left in the object store by a text encoder, and the seconds it took."""

    conditioning: ray.ObjectRef[Any]
    encode_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Decoded:
    """Finished bytes from a decoder; ``thumbnail`` is empty for pictures."""

    data: bytes
    thumbnail: bytes
    decode_s: float
