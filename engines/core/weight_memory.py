"""Weights that sleep: on the device while their model is awake, else on the host, at the same addresses afterwards.

Captured graphs, communicators and everything else of the process stay. One copy over PCIe wakes it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from engines.core.host_copy import HostCopy
from engines.core.resources import MemoryUse
from engines.core.tensors import device_with_index
from engines.core.weight_spans import CpuSpans, CudaSpans, WeightSpans

logger = logging.getLogger(__name__)


class WeightMemory:
    """A rank's resource (``core.resources``), without effect until ``open``.

    The copy on the host is made at the first ``sleep`` and kept. It is made again only if weights were added since, or
    memory among them was freed, into which CUDA copies no more. Functions of ``before_sleep`` undo what changes weights
    in place, so the copy stays right.
    """

    def __init__(self) -> None:
        self._spans: WeightSpans | None = None
        self._host: HostCopy | None = None
        self._found: list[Tensor] = []
        self._is_copied = False
        self._undo: list[Callable[[], None]] = []
        self._pinned_limit: int | None = None
        self._most_bytes = self._num_regions = 0
        """Most memory of the allocator outside regions, up to the last one; regions that are open."""
        self.is_asleep = False
        self.num_copies = 0
        """Copies to the host so far."""

    def open(self, device: torch.device | str, folder: Path) -> None:
        """Let weights on ``device`` sleep. ``folder`` is for what is not pinned.

        Call it before weights are loaded. ValueError if a GPU host lacks the package.
        """
        assert self._spans is None, "weights may have been loaded already"
        device = device_with_index(torch.device(device))
        self._spans = CudaSpans(device) if device.type == "cuda" else CpuSpans()
        self._host, self._device = HostCopy(device, folder), device

    @property
    def is_open(self) -> bool:
        """True if weights can sleep."""
        return self._spans is not None

    @contextmanager
    def region(self) -> Iterator[None]:
        """Allocate weights inside the block, on this thread. Other tensors cost memory for as long as they live.

        Temporary memory of loading does not count as ``MemoryUse.peak``.
        """
        if self._spans is None:
            yield
            return
        assert not self.is_asleep, "new weights while the others are asleep"
        self._is_copied = False
        if not self._num_regions:
            self._most_bytes = self._most()
        self._num_regions += 1
        try:
            with self._spans.region():
                yield
        finally:
            self._num_regions -= 1
            if self._device.type == "cuda" and not self._num_regions:
                torch.cuda.reset_peak_memory_stats(self._device)

    def hold(self, module: nn.Module) -> None:
        """Add a module with its final weights. Call it after its region."""
        if self._spans is not None:
            self._is_copied = False
            self._spans.hold(module)

    def before_sleep(self, undo: Callable[[], None]) -> None:
        """Call ``undo`` before weights sleep: it restores their loaded values, or frees what a step makes again."""
        self._undo.append(undo)

    def forget(self, undo: Callable[[], None]) -> None:
        """Take back ``before_sleep``."""
        self._undo = [other for other in self._undo if other != undo]

    def use(self) -> MemoryUse:
        """Return the memory in use now. Waits for memory that is being pinned."""
        if self._spans is None or self._host is None:
            return MemoryUse()
        weights = _num_bytes(self._found if self.is_asleep else self._spans.find())
        pinned = self._host.pinned_bytes
        if self._device.type != "cuda":
            return MemoryUse(device="cpu", weights=weights, pinned=pinned)
        properties = torch.cuda.get_device_properties(self._device)
        sizes = {"device_bytes": properties.total_memory, "weights": weights, "beside": self._beside(weights)}
        peak = max(0, self._most() - weights)
        return MemoryUse(device=str(properties.uuid), **sizes, peak=peak, pinned=pinned)

    def _most(self) -> int:
        """Return the most memory that the allocator has held outside regions."""
        is_cuda = self._device.type == "cuda"
        return max(self._most_bytes, torch.cuda.max_memory_reserved(self._device) if is_cuda else 0)

    def _beside(self, weights: int) -> int:
        """Return what the allocator holds beside ``weights``, which it counts while they are asleep, too."""
        return max(0, torch.cuda.memory_reserved(self._device) - weights) if self._device.type == "cuda" else 0

    def prepare(self, pinned_bytes: int | None = None) -> None:
        """Begin to touch the host memory of the weights so far, at most ``pinned_bytes`` of it. Returns at once.

        ``reserve`` then takes a fraction of its time. It calls CUDA, which may not happen while a graph is captured.
        """
        if self._spans is not None and self._host is not None:
            self._host.prepare(_num_bytes(self._spans.find()), pinned_bytes=pinned_bytes)

    def reserve(self, pinned_bytes: int | None = None) -> None:
        """Begin to allocate host memory for the copy, at most ``pinned_bytes`` of it pinned. Returns at once."""
        self._pinned_limit = pinned_bytes
        if self._spans is not None and self._host is not None:
            self._host.reserve(_num_bytes(self._spans.find()), pinned_bytes=pinned_bytes)

    def sleep(self) -> float:
        """Move the weights to the host. Return the seconds that it took; 0 without effect (not open, or asleep)."""
        if self._spans is None or self._host is None or self.is_asleep:
            return 0.0
        begun_s = time.monotonic()
        for undo in self._undo:
            undo()
        found = self._spans.find()
        if not self._is_copied or _places(found) != _places(self._found):
            self._found, self._is_copied = found, False
            self._host.reserve(_num_bytes(self._found), pinned_bytes=self._pinned_limit)
            self._host.copy(self._found)
            self._is_copied = True
            self.num_copies += 1
        self._spans.release(self._found)
        self.is_asleep = True
        return self._took("weights are asleep", begun_s)

    def wake(self) -> float:
        """Move the weights back. Return the seconds that it took; 0 without effect."""
        if self._spans is None or self._host is None or not self.is_asleep:
            return 0.0
        begun_s = time.monotonic()
        self._spans.restore(self._found)
        self._host.fill(self._found, gone=self._spans.gone(self._found))
        self.is_asleep = False
        return self._took("weights are awake", begun_s)

    def _took(self, message: str, begun_s: float) -> float:
        took_s = time.monotonic() - begun_s
        num_bytes = _num_bytes(self._found)
        fields = {"took_s": round(took_s, 3), "num_bytes": num_bytes, "beside_bytes": self._beside(num_bytes)}
        logger.info(message, extra=fields)
        return took_s


def _places(spans: Sequence[Tensor]) -> list[tuple[int, int]]:
    return [(span_B.data_ptr(), span_B.nbytes) for span_B in spans]


def _num_bytes(spans: Sequence[Tensor]) -> int:
    return sum(span_B.nbytes for span_B in spans)
