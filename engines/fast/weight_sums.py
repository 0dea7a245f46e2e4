"""Weights plus low-rank products on GPUs: which of them one kernel computes, and in which groups.

Dims: N outputs, K inputs, R rank. Products of half-precision factors are exact in float32. Float32 factors are split
into three bfloat16 parts each, which have all of their bits. Sums are float32, and rounded once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional

from engines.core.model import LowRank, WriteWeight
from engines.fast.kernels import write_weights
from engines.fast.records import ALIGNMENT, EACH, MAX_SUMS, Kind, Products, WeightSum
from engines.fast.triton_cache import has_triton

DEVICE_TYPE = "cuda"
"""The type of devices with kernels."""
OLDEST = (8, 0)
"""Compute capability from which GPUs multiply bfloat16, which products of bfloat16 and of float32 factors need."""
HALF_DTYPES = (torch.bfloat16, torch.float16)
MAX_TEMPORARY_BYTES = 2**28
"""Temporary tensors above which pending sums are computed."""


@cache
def has_kernel(device: torch.device) -> bool:
    """Return whether the kernel runs on ``device``: on NVIDIA's GPUs from ``OLDEST`` on, where Triton is installed.

    All others add products one by one (``engines.additions.add_products``).
    """
    if device.type != DEVICE_TYPE or not has_triton():
        return False
    is_cuda = device.type == "cuda"
    return not is_cuda or (torch.version.hip is None and torch.cuda.get_device_capability(device) >= OLDEST)


def prepared(low_rank: LowRank, device: torch.device) -> LowRank:
    """Return ``low_rank`` on ``device``, in a form that the kernel reads where there is one.

    Factors of two dtypes become float32. Zeros fill the rank up to a multiple of ``EACH``.
    """
    up_NR, down_RK = low_rank.up_NR.to(device), low_rank.down_RK.to(device)
    if has_kernel(device):
        if up_NR.dtype != down_RK.dtype or up_NR.dtype not in HALF_DTYPES:
            up_NR, down_RK = up_NR.float(), down_RK.float()
        if missing := -down_RK.shape[0] % EACH:
            up_NR, down_RK = functional.pad(up_NR, (0, missing)), functional.pad(down_RK, (0, 0, 0, missing))
        up_NR, down_RK = _aligned(up_NR), _aligned(down_RK)
    return replace(low_rank, up_NR=up_NR, down_RK=down_RK)


def _aligned(tensor: Tensor) -> Tensor:
    tensor = tensor.contiguous()
    return tensor.clone() if tensor.data_ptr() % ALIGNMENT else tensor


def fits(base: Tensor, products: Products, device: torch.device) -> bool:
    """Return whether the kernel adds ``products``, which are ``prepared``, to ``base`` on ``device``.

    Float32 weights, and products in several dtypes, have no kernel.
    """
    if base.dtype not in HALF_DTYPES or not has_kernel(device):
        return False
    return len({low_rank.up_NR.dtype for _, low_rank in products}) == 1


def matrix(tensor: Tensor) -> Tensor | None:
    """Return a view (N, K) with contiguous rows; None if there is none."""
    if tensor.ndim == 1:
        return tensor[:, None]
    if tensor.ndim > 2:
        return tensor.view(tensor.shape[0], -1) if tensor.is_contiguous() else None
    return tensor if tensor.stride(1) == 1 else None


class WeightSums:
    """Computes sums, as many by one launch as possible. ``flush`` computes those that are pending."""

    def __init__(self) -> None:
        self._pending: dict[Kind, list[WeightSum]] = {}
        self._after: list[tuple[WriteWeight, Tensor]] = []
        self._temporary_bytes = 0

    def add(self, base: Tensor, products: Products, into: Tensor) -> None:
        """Write the sum, in the dtype of ``base``, to ``into``. Both are on a device with kernels."""
        out_NK = matrix(into)
        if out_NK is None or into.dtype != base.dtype:
            self.add_new(base, products, (into.copy_,))
            return
        if (base_NK := matrix(base)) is None:
            base_NK = base.contiguous().flatten(1)
            self._temporary_bytes += base_NK.nbytes
        one = WeightSum(out_NK=out_NK, base_NK=base_NK, products=products)
        kind = one.kind
        pending = self._pending.setdefault(kind, [])
        pending.append(one)
        if len(pending) == MAX_SUMS:
            _launch(self._pending.pop(kind), kind)
        self._flush_if_full()

    def _flush_if_full(self) -> None:
        if self._temporary_bytes > MAX_TEMPORARY_BYTES:
            self.flush()

    def add_new(self, base: Tensor, products: Products, writers: Iterable[WriteWeight]) -> None:
        """Pass the sum, in the shape and dtype of ``base``, to each of ``writers`` in ``flush``, which may be now."""
        out = torch.empty_like(base, memory_format=torch.contiguous_format)
        self._temporary_bytes += out.nbytes
        self._after += [(write, out) for write in writers]
        self.add(base, products, out)

    def write(self, value: Tensor, writers: Iterable[WriteWeight]) -> None:
        """Pass ``value`` to each of ``writers`` in ``flush``, which may be now."""
        self._after += [(write, value) for write in writers]
        self._flush_if_full()

    def copied(self, tensor: Tensor, device: torch.device) -> Tensor:
        """Return ``tensor`` on ``device``. Pending sums are computed early if copies take much memory."""
        if tensor.device == device:
            return tensor
        self._temporary_bytes += tensor.nbytes
        return tensor.to(device, non_blocking=True)

    def flush(self) -> None:
        """Compute all pending sums, and pass new ones to their writers."""
        pending, self._pending = self._pending, {}
        for kind, sums in pending.items():
            _launch(sums, kind)
        after, self._after, self._temporary_bytes = self._after, [], 0
        write_weights(after)


def new_sum(base: Tensor, products: Products) -> Tensor:
    """Return the sum, in the shape and dtype of ``base``, which is on a device with kernels."""
    found: list[Tensor] = []
    sums = WeightSums()
    sums.add_new(base, products, (found.append,))
    sums.flush()
    return found[0]


@cache
def warm_up(kind: Kind, device: torch.device) -> None:
    """Compile the kernel of ``kind``, or load it: half a second, once."""
    if kind.weight not in HALF_DTYPES or not has_kernel(device):
        return
    base = torch.zeros(EACH, kind.each, dtype=kind.weight, device=device)
    up_NR = torch.zeros(EACH, EACH, dtype=kind.factor, device=device)
    products = [(1.0, LowRank(up_NR=up_NR, down_RK=up_NR[:, : kind.each].contiguous()))] * (2 - kind.is_single)
    if fits(base, products, device):
        new_sum(base, products)


def _launch(sums: Sequence[WeightSum], kind: Kind) -> None:
    from engines.fast.triton_weight_sums import launch_sums

    launch_sums(sums, kind)
    # PyTorch does not see what Triton writes.
    torch.autograd.graph.increment_version([one.out_NK for one in sums])
