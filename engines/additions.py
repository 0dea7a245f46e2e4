"""Weights plus low-rank products (LoRA), computed in float32 and rounded once.

Weights change in place from job to job, so captured graphs and views stay valid. Quantised layers are quantised again.
The result equals a load of merged weights. On most GPUs one kernel computes the sums of many weights
(``fast.weight_sums``).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from engines.core.host_copy import NUM_THREADS, RegisteredMemory, TouchedMemory
from engines.core.model import (
    Addition,
    DenoiserModel,
    LowRank,
    LowRanks,
    Mix,
    WeightSource,
    Writers,
    WriteWeight,
    normal_mix,
)
from engines.core.resources import rank_resources
from engines.fast.records import EACH, Kind, Products
from engines.fast.weight_sums import HALF_DTYPES, WeightSums, fits, new_sum, prepared, warm_up
from engines.quantization.linear import compute_device


def add_products(base: Tensor, amounts: Products) -> Tensor:
    """Return ``base`` plus the products, float32, in its shape."""
    sum_NK = base.reshape(base.shape[0], -1)
    for amount, low_rank in amounts:
        sum_NK = torch.add(sum_NK, _product(low_rank, base.device), alpha=amount * low_rank.scale)
    return sum_NK.float().view(base.shape)


def _product(low_rank: LowRank, device: torch.device) -> Tensor:
    """Return ``up @ down``, float32. GPUs need no conversion: products of two bfloat16 are exact in float32."""
    up_NR, down_RK = low_rank.up_NR.to(device), low_rank.down_RK.to(device)
    if device.type == "cuda" and up_NR.dtype == down_RK.dtype and up_NR.dtype in HALF_DTYPES:
        return torch.mm(up_NR, down_RK, out_dtype=torch.float32)
    return up_NR.float() @ down_RK.float()


def slice_low_rank(low_rank: LowRank, slices: Mapping[str, Any], name: str) -> LowRank:
    """Return the product for a rank's share of a parameter; see ``parallel.weight_files`` for ``slices``."""
    share = slices.get(name)
    if share is None or not share.ranges:
        return low_rank
    up_NR, down_RK = low_rank.up_NR, low_rank.down_RK
    if share.dim == 0:
        up_NR = torch.cat([up_NR[start:stop] for start, stop in share.ranges])
    else:
        down_RK = torch.cat([down_RK[:, start:stop] for start, stop in share.ranges], dim=1)
    return LowRank(up_NR=up_NR, down_RK=down_RK, scale=low_rank.scale)


def whole_parameter(slices: Mapping[str, Any], name: str) -> str:
    """Return the name that a parameter, or a share of it, has in the whole module."""
    return str(slices[name].name) if name in slices else name


def changed_parameters(
    module: nn.Module, model: DenoiserModel, name: str, slices: Mapping[str, Any] = MappingProxyType({})
) -> list[nn.Parameter]:
    """Return the parameters of ``module``, a share of the module ``name``, that some addition changes.

    If additions come after the start, all may change but those of ``DenoiserModel.unchanged``.
    """
    changed = {whole for addition in model.additions.values() for whole in addition.get(name, {})}
    fixed = tuple(f"{submodule}." for submodule in model.unchanged)
    named = ((whole_parameter(slices, own), each) for own, each in module.named_parameters())
    may_change = model.additions_change
    return [each for whole, each in named if whole in changed or (may_change and not whole.startswith(fixed))]


@torch.no_grad()
def merge(module: nn.Module, amounts: Iterable[tuple[float, LowRanks]], slices: Mapping[str, Any]) -> None:
    """Add to the weights of ``module``, whole or a rank's share, permanently; absent parameters are skipped."""
    ranks = [(amount, low_ranks) for amount, low_ranks in amounts if amount]
    for name, parameter in module.named_parameters():
        whole = whole_parameter(slices, name)
        products = [(amount, slice_low_rank(ones[whole], slices, name)) for amount, ones in ranks if whole in ones]
        if products and not parameter.is_meta:
            device = compute_device(parameter)
            base, products = parameter.to(device), [(amount, prepared(one, device)) for amount, one in products]
            add = new_sum if fits(base, products, device) else add_products
            parameter.copy_(add(base, products))


@dataclass(frozen=True, kw_only=True, slots=True)
class MergingSource:
    """A ``WeightSource`` that merges additions into the weights that it reads."""

    source: WeightSource
    """Files of the weights."""
    additions: tuple[tuple[float, Addition], ...]
    """Additions to merge, each with its amount (a factor on its products)."""

    @property
    def device(self) -> torch.device:
        return self.source.device

    def fill(
        self,
        name: str,
        module: nn.Module,
        slices: Mapping[str, Any],
        leave_out: Collection[nn.Module] = (),
        on_host: Collection[str] = (),
    ) -> None:
        self.source.fill(name, module, slices, leave_out, on_host)
        with self.device:
            merge(module, ((amount, addition.get(name, {})) for amount, addition in self.additions), slices)


class SwitchTimes:
    """Times of changes of weights on this rank. Times on a GPU are read later, without a wait for it."""

    def __init__(self) -> None:
        self._host_ms = 0.0
        self._marks: deque[tuple[Any, Any]] = deque()
        """CUDA events around changes that were not read yet."""

    @contextmanager
    def measure(self, device: torch.device | None) -> Iterator[None]:
        """Measure a change of weights on ``device``. None: no weights change, and nothing is measured."""
        if device is None:
            yield
        elif device.type == "cuda":
            new_mark: Callable[[], Any] = partial(torch.cuda.Event, enable_timing=True)
            begin, end = new_mark(), new_mark()
            begin.record()  # reached when all earlier steps have ended
            yield
            end.record()
            self._marks.append((begin, end))
        else:
            begin_s = time.perf_counter()
            yield
            self._host_ms += 1e3 * (time.perf_counter() - begin_s)

    def forget(self) -> None:
        """Forget all changes so far, also those that have not ended."""
        self._host_ms = 0.0
        self._marks.clear()

    def take_ms(self) -> float:
        """Return the sum of all changes that have ended since the last call; 0 without any."""
        sum_ms, self._host_ms = self._host_ms, 0.0
        while self._marks and self._marks[0][1].query():
            begin, end = self._marks.popleft()
            sum_ms += begin.elapsed_time(end)
        return sum_ms


NO_WRITERS: Writers = MappingProxyType({})


@dataclass(kw_only=True, slots=True)
class _Weight:
    """A parameter that some addition changes."""

    base: Tensor
    """Its values at load."""
    parameter: nn.Parameter
    """The parameter, whose values change unless there are writers."""
    writers: tuple[WriteWeight, ...]
    """Called with new values, perhaps in float32; the parameter stays as loaded then."""
    device: torch.device
    """Device that computes the sums."""
    low_ranks: dict[str, LowRank] = field(default_factory=dict)
    """Products by addition, ``prepared`` and cut to this rank's share."""

    def kinds(self, low_rank: LowRank) -> Iterator[tuple[Kind, torch.device]]:
        """Yield the kinds of sums with ``low_rank``, alone and with others of this weight, and their device."""
        each = 1 if self.base.shape[1:].numel() % EACH else EACH
        for is_single in {True, len(self.low_ranks) == 1}:
            yield Kind(self.base.dtype, low_rank.up_NR.dtype, is_single, each), self.device

    def write(self, mix: Mix, sums: WeightSums) -> None:
        """Set the values at load plus ``mix``, now or when ``sums`` are computed."""
        products = [(amount, self.low_ranks[name]) for name, amount in mix if name in self.low_ranks]
        base = sums.copied(self.base, self.device)
        writers = self.writers or (self.parameter.copy_,)
        if products and fits(base, products, self.device):
            if self.writers or self.parameter.device != base.device:
                sums.add_new(base, products, writers)
            else:
                sums.add(base, products, self.parameter)
        elif products:
            value = add_products(base, products)
            for write in writers:
                write(value)
        else:
            sums.write(base, writers)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Parameters:
    """The parameters of a module, or of a rank's share of it, as they were loaded."""

    name: str
    """The module's name in ``DenoiserModel.modules``."""
    module: nn.Module
    """The module, or a rank's share of it."""
    slices: Mapping[str, Any]
    """Part of a file's tensor that each split parameter is (``parallel.weight_files``)."""
    loaded: Mapping[str, nn.Parameter]
    """Parameters by name, with the values of the start."""
    writers: Writers
    """Writes new values of a parameter where the engine holds copies."""
    device: torch.device | None = None
    """Device that computes the sums; None: the parameters' own."""
    on_host: bool = False
    """Values at load are copied to pinned host memory, those of replaced layers as well."""

    def low_ranks(self, addition: Addition) -> Iterator[tuple[str, LowRank]]:
        """Yield the low-rank products of ``addition`` by the parameters of this share, on their device."""
        ranks = addition.get(self.name, {})
        for own, parameter in self.loaded.items() if ranks else ():
            whole = whole_parameter(self.slices, own)
            if whole in ranks and not parameter.is_meta:
                yield own, prepared(slice_low_rank(ranks[whole], self.slices, own), self.device or parameter.device)

    def weights(self, names: Collection[str]) -> dict[str, _Weight]:
        """Return weights that change through writers, and whose parameters stay as loaded.

        Without writers, a parameter itself changes, and its values, which must be those at load, are copied.
        """
        found = {own: self.loaded[own] for own in names}
        writers = {own: self._writers(own) for own in found}
        bases = {own: each.detach() for own, each in found.items()}
        copied = [own for own in found if self.on_host or not writers[own]]
        copies = _copies([bases[own] for own in copied], on_host=self.on_host)
        bases |= dict(zip(copied, copies, strict=True))
        return {
            own: _Weight(base=bases[own], parameter=each, writers=writers[own], device=self.device or each.device)
            for own, each in found.items()
        }

    def _writers(self, own: str) -> tuple[WriteWeight, ...]:
        parameter = self.loaded[own]
        return self.writers.get(parameter) or _layer_writers(self.module, own, parameter)


class _Share:
    """A module's weights, or a rank's share of them. ``mix`` is their current addition; None: undefined."""

    def __init__(self, parameters: _Parameters) -> None:
        self._parameters: _Parameters | None = parameters
        self._weights: dict[str, _Weight] = {}
        self.mix: Mix | None = ()

    @property
    def device(self) -> torch.device | None:
        """Device that computes the sums; None if no addition changes these weights."""
        return next((weight.device for weight in self._weights.values()), None)

    def write(self, mix: Mix) -> None:
        changed = None if self.mix is None else {name for name, _ in (*self.mix, *mix)}
        self.mix = None  # in case a write fails
        sums = WeightSums()
        for weight in self._weights.values():
            if changed is None or not changed.isdisjoint(weight.low_ranks):
                weight.write(mix, sums)
        sums.flush()
        self.mix = mix

    def take(self, additions: Mapping[str, Addition]) -> None:
        """Take further additions. A parameter that no known addition changes is as loaded in every mix."""
        parameters = self._parameters
        assert parameters is not None
        found = [(name, *each) for name, addition in additions.items() for each in parameters.low_ranks(addition)]
        self._weights |= parameters.weights(dict.fromkeys(own for _, own, _ in found if own not in self._weights))
        for name, own, low_rank in found:
            self._weights[own].low_ranks[name] = low_rank
        for kind, device in {one for _, own, low_rank in found for one in self._weights[own].kinds(low_rank)}:
            warm_up(kind, device)

    def forget(self, names: Collection[str]) -> None:
        """Release additions that no share has in its weights, and the copies of weights that no other one changes."""
        for own, weight in list(self._weights.items()):
            for name in names:
                weight.low_ranks.pop(name, None)
            if not weight.low_ranks:
                del self._weights[own]

    def may_have(self, names: Collection[str]) -> bool:
        """Return whether the weights may have one of these additions now."""
        return self.mix is None or any(name in names for name, _ in self.mix)

    def close(self) -> None:
        """Take no more additions: parameters whose layers were replaced are released."""
        self._parameters = None


class WeightSwitch:
    """Applies the additions that a branch names to the modules of a model.

    Weights that some addition changes are stored as loaded, and each change starts from the stored values. Earlier
    additions leave no trace. Shares of one module may be views of the same memory.

    ``grows``: additions come to the mapping and leave it, perhaps on other threads, and ``items()`` returns a snapshot.
    Shares then keep the loaded parameters of all replaced layers. All shares know the same additions, since a share
    must be able to undo in common memory what another one did.

    ``device``: sums are computed there, for parameters that may be in host memory. ``on_host``: loaded values of
    weights that change are stored in pinned host memory.
    """

    def __init__(
        self,
        additions: Mapping[str, Addition],
        *,
        grows: bool = False,
        device: torch.device | None = None,
        on_host: bool = False,
    ) -> None:
        self._additions, self._grows, self._device, self._on_host = additions, grows, device, on_host
        self._known = set(dict(additions.items()))
        self._shares: dict[str, dict[Hashable, _Share]] = {}

    def hold(
        self,
        name: str,
        share: Hashable,
        module: nn.Module,
        slices: Mapping[str, Any],
        *,
        loaded: Mapping[str, nn.Parameter],
        writers: Writers = NO_WRITERS,
    ) -> None:
        """Register ``module``, a share of the module ``name``, whose weights have no additions yet.

        ``slices`` are its parts of the whole module's parameters. ``loaded`` are its parameters by name, before layers
        were replaced; the ``write_weight`` of a replacing layer takes their new values. Parameters in ``writers`` are
        not written themselves, only through these functions.
        """
        current = dict(self._additions.items())
        if gone := self._known - current.keys():
            self._change({}, gone)
        how: dict[str, Any] = {"device": self._device, "on_host": self._on_host}
        new = _Share(_Parameters(name=name, module=module, slices=slices, loaded=loaded, writers=writers, **how))
        new.take({known: current[known] for known in self._known})
        if self._grows:
            for dtype, device in {(each.dtype, self._device or each.device) for each in loaded.values()}:
                for factor, is_single in product((dtype, torch.float32), (True, False)):
                    warm_up(Kind(dtype, factor, is_single, EACH), device)
        else:
            new.close()
        self._shares.setdefault(name, {})[share] = new

    def is_behind(self, mix: Mix) -> bool:
        """Return whether shares lack an addition of ``mix``, or have one that has left the mapping."""
        if not self._grows:
            return False
        wanted = {name for name, _ in mix}
        return not (wanted <= self._known and self._known <= wanted | dict(self._additions.items()).keys())

    @torch.no_grad()
    def catch_up(self, mix: Mix) -> None:
        """Take the additions of ``mix`` that are new, and release those that have left the mapping."""
        wanted = {name for name, _ in mix}
        found = {name: self._additions.get(name) for name in wanted - self._known}
        new = {name: addition for name, addition in found.items() if addition is not None}
        self._change(new, self._gone(mix))

    @torch.no_grad()
    def reset_before(self, mix: Mix) -> None:
        """Restore the loaded weights if ``catch_up`` has to, which may allocate other tensors than weights."""
        self._reset_those_with(self._gone(mix))

    def _gone(self, mix: Mix) -> set[str]:
        return self._known - {name for name, _ in mix} - dict(self._additions.items()).keys()

    def _reset_those_with(self, names: Collection[str]) -> None:
        """Restore the loaded weights everywhere if a share may have one of these additions now."""
        shares = (share for by_key in self._shares.values() for share in by_key.values())
        if names and any(share.may_have(names) for share in shares):
            self.reset_all()

    def _change(self, new: Mapping[str, Addition], gone: Collection[str]) -> None:
        shares = [share for by_key in self._shares.values() for share in by_key.values()]
        self._reset_those_with(gone)
        if gone:
            self._wait_for_copies()
        try:
            for share in shares:
                share.forget(gone)
                share.take(new)
        except BaseException:  # such as no memory: none has it then
            for share in shares:
                share.forget(new)
            raise
        finally:
            self._known -= set(gone)
        self._known |= set(new)

    @torch.no_grad()
    def set(self, name: str, share: Hashable, mix: Mix) -> None:
        """Set the weights of a share to the loaded ones plus ``mix``. ValueError for unknown names."""
        mix, shares = normal_mix(mix), self._shares[name]
        if unknown := [addition for addition, _ in mix if addition not in self._known]:
            known = ", ".join(sorted(self._known)) or "none"
            raise ValueError(f"unknown additions to the weights: {', '.join(unknown)}; known: {known}")
        if shares[share].mix == mix:
            return
        for key, other in shares.items():  # before the write, which may fail halfway
            # Others may be views of this share, with sums that round differently; only base values are equal in all.
            if key != share and not (mix == () == other.mix):
                other.mix = None
        with rank_resources().get(SwitchTimes).measure(shares[share].device):
            shares[share].write(mix)

    @torch.no_grad()
    def reset(self, name: str) -> None:
        """Restore the loaded weights in all shares of a module."""
        for share in self._shares.get(name, {}).values():
            if share.mix != ():
                share.write(())

    def reset_all(self) -> None:
        """Restore the loaded weights in all modules."""
        for name in self._shares:
            self.reset(name)

    def clear(self) -> None:
        """Restore the loaded weights in all modules, and forget them."""
        self.reset_all()
        self._wait_for_copies()
        self._shares.clear()

    def _wait_for_copies(self) -> None:
        """Wait for copies from host memory, before that is released: torch records no events for it."""
        if self._on_host and torch.cuda.is_available():
            torch.cuda.synchronize()


def touch_copies(model: DenoiserModel) -> None:
    """Begin to touch host memory for loaded values of weights that known additions change. Returns at once.

    Touching is most of the time of copies: 28 GB on each of two ranks took 11 s of a start.
    """
    memory, known = rank_resources().get(TouchedMemory), replace(model, additions_change=False)
    for name, module in model.modules.items():
        for parameter in changed_parameters(module, known, name):
            memory.prepare(parameter.nbytes)


def _copies(tensors: Sequence[Tensor], *, on_host: bool) -> list[Tensor]:
    """Return contiguous copies, on the tensors' devices or in pinned host memory."""
    if not on_host:
        return [each.clone(memory_format=torch.contiguous_format) for each in tensors]
    memory = rank_resources().get(TouchedMemory)
    with ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="pinning") as pool:
        return list(pool.map(_host_copy, tensors, [memory.take(tensor.nbytes) for tensor in tensors]))


@torch.no_grad()
def _host_copy(tensor: Tensor, touched: Future[RegisteredMemory]) -> Tensor:
    host_B = touched.result().pinned(tensor.device).bytes_B
    return host_B.view(tensor.dtype).view(tensor.shape).copy_(tensor)


def _layer_writers(module: nn.Module, name: str, parameter: nn.Parameter) -> tuple[WriteWeight, ...]:
    """Return the ``write_weight`` of the layer that replaced the parameter's; empty if ``module`` still has it."""
    owner, _, leaf = name.rpartition(".")
    layer: Any = module.get_submodule(owner)
    return () if getattr(layer, leaf, None) is parameter else (layer.write_weight,)
