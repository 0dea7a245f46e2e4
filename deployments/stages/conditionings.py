"""What an encoder made of earlier requests, kept for those that say the same."""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import Self

from deployments.stages.common import Encoded
from deployments.stages.pictures import SentPicture, SentPictures
from pipelines.request import MediaRequest

MIB = 2**20
OVERHEAD_BYTES = 1024
"""Of an entry, beside the bytes of its tensors and its skeleton: its names, its shapes, its place."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Names:
    """Digests of all that conditioning may depend on: without the seed, and with it.

    Only what cannot matter is left out, so that a field that requests gain counts from its first day. The key of a
    client stays in: how long an encoder takes tells nobody what others have asked for.
    """

    unseeded: bytes
    seeded: bytes

    @classmethod
    def of(cls, request: MediaRequest, pictures: SentPictures) -> Self:
        told = replace(request, request_id="", preview_steps=())
        told = replace(told, service_tier="default", deadline_s=None, waited_s=0.0, weight=1.0)
        shown = _digest(pictures)
        texts = (repr(replace(told, seed=0)), repr(told))
        unseeded, seeded = (hashlib.sha256(text.encode() + shown).digest() for text in texts)
        return cls(unseeded=b"unseeded" + unseeded, seeded=b"seeded" + seeded)


def _digest(pictures: SentPictures) -> bytes:
    """Of how many there are, whether the last is a mask, and every one's form and pixels, which are not copied."""
    mask: tuple[SentPicture, ...] = () if pictures.mask is None else (pictures.mask,)
    sent = (*pictures.pictures, *mask)
    forms = [(one.width, one.height, one.mode, one.pixels.nbytes) for one in sent]
    digest = hashlib.sha256(repr((len(mask), forms)).encode())
    for one in sent:
        digest.update(one.pixels.data)
    return digest.digest()


class Conditionings:
    """At most ``max_bytes`` of them; the one that nobody asked for the longest goes first. With 0 bytes, none.

    What is kept is the parcel itself, which nobody changes: who opens one copies its bytes. Threads may share it.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes, self._num_bytes = max_bytes, 0
        self._kept: OrderedDict[bytes, Encoded] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def num_bytes(self) -> int:
        """What is kept takes so many."""
        return self._num_bytes

    def names(self, request: MediaRequest, pictures: SentPictures) -> Names | None:
        """By these it is found and kept. None where nothing is."""
        return Names.of(request, pictures) if self._max_bytes else None

    def find(self, names: Names | None) -> Encoded | None:
        if names is None:
            return None
        with self._lock:
            name = next((name for name in (names.unseeded, names.seeded) if name in self._kept), None)
            if name is None:
                return None
            self._kept.move_to_end(name)
            return replace(self._kept[name], was_kept=True)

    def keep(self, names: Names | None, encoded: Encoded, *, drew_noise: bool) -> None:
        """``drew_noise``: the encoder drew from the request's generator, so another seed gives something else."""
        if names is None or (size := _num_bytes(encoded)) > self._max_bytes:
            return
        name = names.seeded if drew_noise else names.unseeded
        with self._lock:
            if name in self._kept:
                self._num_bytes -= _num_bytes(self._kept.pop(name))
            self._kept[name] = encoded
            self._num_bytes += size
            while self._num_bytes > self._max_bytes:
                _, oldest = self._kept.popitem(last=False)
                self._num_bytes -= _num_bytes(oldest)


def _num_bytes(encoded: Encoded) -> int:
    return encoded.message.nbytes + len(encoded.skeleton) + OVERHEAD_BYTES
