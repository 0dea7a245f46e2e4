"""Savings with which all parts of a model fit into ``memory_gib`` of each GPU, chosen by predicted costs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from deployments.sizing.fit import DECODE_LIMIT_GIB, GIB, ON_CPU, SHARED, TURNS, Fit, RequestTimes
from engines.core.spec import ParallelSpec
from engines.gang.arbiter import LINGER_S

if TYPE_CHECKING:
    from engines.planner.cost_model import Cost

CPU_FLOPS = 5e10
"""FLOP/s of an encoder on one CPU core in float32. Assumed, not measured."""
USUAL_TOKENS = 512
"""Tokens of a prompt whose work is not counted."""
LIMITED_DECODE = 1.0
"""More time of a decode in strips, as a multiple of a whole one. Assumed, not measured."""
OFFLOAD_PARTS = 8
"""Number of candidates for the number of offloaded blocks, in equal steps up to all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Saving:
    """A changed key of a model's configuration, which saves memory."""

    key: str
    """Such as ``decoder.memory_gib``."""
    value: Any
    """Value of the setting."""
    extra_s: float
    """Predicted seconds more for each request; below 0, it is faster."""
    is_lossy: bool = False
    """Results differ: weights are quantised."""

    def __str__(self) -> str:
        return f"{self.key}: {str(self.value).lower() if isinstance(self.value, bool) else self.value}"


@dataclass(frozen=True, kw_only=True, slots=True)
class BudgetRules:
    """Limits that a configuration sets on savings."""

    places: tuple[str, ...] = (SHARED, TURNS, ON_CPU)
    """Places of the encoder; the first is the configured one."""
    precisions: tuple[str, ...] = ("native",)
    """Precisions of the linears; the first is the configured one."""
    strategy: str = "auto"
    """The configured one, which savings keep."""
    offloads: bool = True
    """More blocks of the transformer may be in host memory than the ``num_offloaded`` that are configured."""
    num_offloaded: int = 0
    """Blocks of the transformer in host memory, as configured."""
    layers: tuple[bool, ...] = (False, True)
    """True if layers of the text encoder are in host memory; the first is what is configured."""
    originals: tuple[bool, ...] = (False, True)
    """True if loaded values of weights that adapters change are in host memory; the first is what is configured."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    """The memory of one model on its fullest GPU, after the chosen savings."""

    memory_gib: float
    """The limit: memory of a GPU."""
    num_bytes: int
    """Memory of the fullest GPU with ``savings``."""
    host_bytes: int
    """Host memory of all ranks' offloaded blocks, of the encoder's layers, and of weights that sleep."""
    savings: tuple[Saving, ...]
    """Chosen changes, in the order of their choice."""
    unknown: tuple[str, ...] = ()
    """Parts of unknown size, which are not counted."""
    figures: str = ""
    """The machine whose figures predict the costs."""

    @property
    def extra_s(self) -> float:
        return sum(saving.extra_s for saving in self.savings)

    @property
    def is_lossy(self) -> bool:
        return any(saving.is_lossy for saving in self.savings)

    def sentence(self) -> str:
        """Return what was chosen and what it costs."""
        without = f"; not counted: {', '.join(self.unknown)}" if self.unknown else ""
        held = f"{self.num_bytes / GIB:.1f} GiB of {self.memory_gib:g} on the fullest GPU"
        if not self.savings:
            return f"no savings needed: {held}{without}"
        host = f" and {self.host_bytes / GIB:.1f} GiB of host memory" if self.host_bytes else ""
        costs = f"{self.extra_s:+.1f} s a request (predicted for {self.figures})"
        pixels = "other pixels" if self.is_lossy else "no loss"
        return f"{', '.join(map(str, self.savings))}: {held}{host}, {costs}, {pixels}{without}"

    def document(self) -> dict[str, Any]:
        """Return the JSON object of ``troupe estimate`` and ``/v1/models``."""
        return {
            "memory_gib": self.memory_gib,
            "estimated_gib": round(self.num_bytes / GIB, 2),
            "host_gib": round(self.host_bytes / GIB, 2),
            "savings": [str(saving) for saving in self.savings],
            "extra_s": round(self.extra_s, 2),
            "is_lossy": self.is_lossy,
            "figures": self.figures,
            "not_counted": list(self.unknown),
        }


def choose_savings(fit: Fit, times: RequestTimes, memory_gib: float, rules: BudgetRules) -> Budget:
    """Return the savings with the least predicted time with which all parts fit; any lossless ones before lossy ones.

    ValueError, with the missing memory, if none do. ``fit`` is of a machine with ``memory_gib``.
    """
    found = list(_budgets(fit, times, memory_gib, rules))
    fitting = [budget for budget in found if budget.num_bytes <= fit.usable_bytes]
    if fitting:
        return min(fitting, key=_order)
    least = min(found, key=lambda budget: (budget.num_bytes, _order(budget)))
    missing = (least.num_bytes - fit.usable_bytes) / GIB
    savings = f"with {', '.join(map(str, least.savings))}" if least.savings else "without savings"
    lossy = "" if len(rules.precisions) > 1 else ", allow_quantization: true"
    raise ValueError(
        f"memory_gib is {memory_gib:g}, of which {fit.usable_bytes / GIB:.1f} are usable; {savings} the fullest GPU "
        f"holds {least.num_bytes / GIB:.1f} GiB, {missing:.1f} too many: take a larger card, more ranks, a smaller size"
        f"{lossy} or a smaller model"
    )


def extra_s_of(fit: Fit, times: RequestTimes, rules: BudgetRules, savings: Sequence[Saving]) -> float:
    """Return the predicted seconds more of ``times`` with the settings of ``savings``, chosen for another request.

    A limit of decodes costs nothing where the decode is within it.
    """
    wanted = {saving.key: saving.value for saving in savings}
    lacks = [{}, {"decoder.memory_gib": wanted.get("decoder.memory_gib")}]
    for lack in lacks:
        for budget in _budgets(fit, times, 0.0, rules):
            if {saving.key: saving.value for saving in budget.savings} | lack == wanted:
                return budget.extra_s
    raise ValueError(f"{', '.join(map(str, savings)) or 'no savings'} are not among those of this model")


def _order(budget: Budget) -> tuple[Any, ...]:
    return budget.is_lossy, round(budget.extra_s, 3), len(budget.savings), budget.sentence()


def _budgets(fit: Fit, times: RequestTimes, memory_gib: float, rules: BudgetRules) -> Iterator[Budget]:
    rules = replace(rules, num_offloaded=min(rules.num_offloaded, fit.step.counted.num_repeated))
    steps = list(_steps(fit, rules))
    own = _Step(rules.precisions[0], rules.num_offloaded, rules.originals[0])
    base_s = min(_steps_s(fit, times, cost, step) for cost, step in steps if step == own)
    places = rules.places[:1] if fit.unknown else rules.places  # what an unknown encoder costs is not known
    stages = list(_stage_choices(fit, places, rules))
    for cost, step in steps:
        extra_s = _steps_s(fit, times, cost, step) - base_s
        of_step = (*_of_step(cost, step, rules, extra_s), *_originals(fit, step, rules))
        originals = _original_bytes(fit, cost.spec) if step.originals else 0
        for stage in stages:
            host_bytes = fit.parts.layers if stage.offloaded else 0
            host_bytes += fit.asleep_bytes(cost, offloaded=stage.offloaded) if stage.place == TURNS else 0
            yield Budget(
                memory_gib=memory_gib,
                num_bytes=fit.parts.fullest_bytes(
                    cost.needed_bytes, stage.place, limited=stage.limited, offloaded=stage.offloaded
                ),
                host_bytes=fit.num_ranks * (cost.host_bytes + originals) + host_bytes,
                savings=(*_beside(fit, times, cost, stage, rules), *of_step),
                unknown=fit.unknown,
                figures=fit.machine.name,
            )


@dataclass(frozen=True, slots=True)
class _Step:
    """Settings of ranks."""

    precision: str
    """Precision of the linears."""
    blocks: int
    """Blocks of each transformer in host memory."""
    originals: bool
    """Loaded values of weights that adapters change are in host memory."""


@dataclass(frozen=True, slots=True)
class _Stages:
    """Settings of encoder and decoder."""

    place: str
    """Place of the encoder."""
    offloaded: bool
    """Layers of the text encoder are in host memory."""
    limited: bool
    """Decodes stay within ``DECODE_LIMIT_GIB``."""


def _stage_choices(fit: Fit, places: Sequence[str], rules: BudgetRules) -> Iterator[_Stages]:
    limits = (False, True) if fit.parts.limited < fit.parts.decode else (False,)
    saves = fit.parts.buffers < fit.parts.layers
    for place in places:
        for offloaded in rules.layers if saves and place != ON_CPU else rules.layers[:1]:
            for limited in limits:
                yield _Stages(place, offloaded, limited)


def _steps(fit: Fit, rules: BudgetRules) -> Iterator[tuple[Cost, _Step]]:
    """Yield each division of the step with its settings."""
    from engines.planner.cost_model import candidates, predict

    counted, work = fit.step.counted, fit.step.work
    machine = fit.machine.for_ranks(fit.num_ranks)
    specs = candidates(counted, fit.num_ranks, work.num_branches)
    if rules.strategy != "auto":
        given = ParallelSpec.of(rules.strategy, fit.num_ranks)
        specs = [spec for spec in specs if (spec.tensor, spec.pipeline) == (given.tensor, given.pipeline)]
    for precision in rules.precisions:
        for spec in specs:
            for blocks in _numbers_of_blocks(counted.num_repeated, rules) if not spec.divides_weights else (0,):
                for originals in rules.originals if _has_originals(fit) else rules.originals[:1]:
                    held = counted.without_originals if originals else counted
                    cost = predict(held, work, spec, machine, precision, offloaded_blocks=blocks)
                    yield cost, _Step(precision, blocks, originals)


def _steps_s(fit: Fit, times: RequestTimes, cost: Cost, step: _Step) -> float:
    """Return the predicted seconds of all steps; ``cost`` is that of the largest ones, whose division all have."""
    from engines.planner.cost_model import predict

    number, other = times.num_steps + times.second_num_steps, fit.other_pass
    if other is None:
        return number * cost.total_ms / 1e3
    machine, counted = fit.machine.for_ranks(fit.num_ranks), fit.step.counted
    small = predict(counted, other.work, cost.spec, machine, step.precision, offloaded_blocks=step.blocks)
    return ((number - other.num_steps) * cost.total_ms + other.num_steps * small.total_ms) / 1e3


def _has_originals(fit: Fit) -> bool:
    """Return whether loaded values of weights may be in host memory: hand-ordered steps have copies of their own."""
    return fit.step.counted.changed_weight_bytes > 0 and not fit.step.counted.has_fast_path


def _original_bytes(fit: Fit, spec: ParallelSpec) -> int:
    """Return a rank's share of the loaded values of weights that adapters change."""
    return int(fit.step.counted.changed_weight_bytes / spec.tensor / spec.pipeline)


def _numbers_of_blocks(num_blocks: int, rules: BudgetRules) -> list[int]:
    own = rules.num_offloaded
    parts = range(OFFLOAD_PARTS + 1) if rules.offloads else ()
    return sorted({own, *(number for part in parts if (number := -(-num_blocks * part // OFFLOAD_PARTS)) > own)})


def _originals(fit: Fit, step: _Step, rules: BudgetRules) -> Iterator[Saving]:
    """Yield the saving of loaded values in host memory. All of them are copied for each request, as if all differed."""
    if step.originals and not rules.originals[0]:
        extra_s = fit.step.counted.changed_weight_bytes / fit.machine.host_bytes_per_s
        yield Saving(key="denoiser.torch.originals_on_host", value=True, extra_s=extra_s)


def _of_step(cost: Cost, step: _Step, rules: BudgetRules, extra_s: float) -> Iterator[Saving]:
    """Yield the savings of ranks; all their time counts as that of the last."""
    found: list[Saving] = []
    if rules.strategy == "auto" and cost.spec.num_ranks > 1 and (cost.spec.divides_weights or step.blocks):
        found.append(Saving(key="denoiser.strategy", value=cost.spec.name, extra_s=0.0))
    if step.precision != rules.precisions[0]:
        found.append(Saving(key="denoiser.precision", value=step.precision, extra_s=0.0, is_lossy=True))
    if step.blocks != rules.num_offloaded:
        found.append(Saving(key="denoiser.torch.offloaded_blocks", value=step.blocks, extra_s=0.0))
    if found:
        found[-1] = replace(found[-1], extra_s=extra_s)
    yield from found


def _beside(fit: Fit, times: RequestTimes, cost: Cost, stage: _Stages, rules: BudgetRules) -> Iterator[Saving]:
    """Yield the savings of encoder and decoder."""
    if stage.place == TURNS and rules.places[0] != TURNS:
        moved = fit.parts.weight_bytes(offloaded=stage.offloaded) + cost.weight_bytes
        extra_s = LINGER_S + moved / fit.machine.host_bytes_per_s
        yield Saving(key="text_encoder.takes_turns", value=True, extra_s=extra_s)
    if stage.offloaded and not rules.layers[0]:
        copies_s = times.num_prompts * fit.parts.prompt / fit.machine.host_bytes_per_s
        yield Saving(
            key="text_encoder.offloads_layers", value=True, extra_s=max(0.0, copies_s - (times.encode_s or 0.0))
        )
    if stage.place == ON_CPU and rules.places[0] != ON_CPU:
        flops = times.encode_flops or USUAL_TOKENS * fit.parts.encoder  # two for each weight of two bytes
        extra_s = max(0.0, flops / CPU_FLOPS - (times.encode_s or 0.0))
        yield Saving(key="text_encoder.num_gpus", value=0, extra_s=extra_s)
    if stage.limited:
        extra_s = LIMITED_DECODE * (times.decode_s or 0.0)
        yield Saving(key="decoder.memory_gib", value=DECODE_LIMIT_GIB, extra_s=extra_s)
