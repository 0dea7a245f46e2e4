"""Memory of all parts of a model on one GPU, and seconds of a whole picture or clip."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engines.planner.cost_model import Cost, Workload
    from engines.planner.forecast import StepForecast
    from engines.planner.machine import Machine
    from pipelines.blocks.footprint import Footprint
    from pipelines.request import MediaRequest


GIB = 2**30
PROCESS_BYTES = GIB
"""GPU memory of a process beside what is counted: CUDA context, kernels, libraries' workspaces, unused cached memory.

A context alone takes 0.6 GiB (an H100, ``gpu_gib.before`` in benchmarks/reports/sweep.jsonl). The rest is an allowance.
The three processes of FLUX.1-dev held 3.3 GiB beside what is counted on a card of 24 GB. On one of 16 they held 2.7,
since allocators had to release unused memory (an H200, benchmarks/reports/cards.jsonl).
"""
DECODE_LIMIT_GIB = 2
"""The proposed ``decoder.memory_gib``."""
SHARED, APART, ON_CPU, TURNS = "shared", "apart", "on_cpu", "turns"
"""Places of encoder and decoder.

``SHARED``: on the first rank's GPU. ``APART``: on a GPU of their own. ``ON_CPU``: the encoder on CPU cores, the decoder
on the first rank's GPU. ``TURNS``: as ``SHARED``, but either the encoder or the other parts are asleep."""
MAX_RANKS = 8
"""Most proposed ranks, those of a usual host."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StageMemory:
    """Bytes of encoder and decoder beside the ranks."""

    encoder: int
    """Weights of the encoder."""
    decoder: int
    """Weights of the decoder."""
    decode: int
    """One decode, beside weights."""
    limited: int
    """One decode within ``DECODE_LIMIT_GIB``, if the decoder supports a limit."""
    whole: int = 0
    """One decode without a limit."""
    compiled: int = 0
    """Bytes that ``decoder.compile`` adds to the decoder's weights on a GPU; 0 if it shrinks them, after loading."""
    layers: int = 0
    """Layers of the text encoders, which ``text_encoder.offloads_layers`` keeps in host memory."""
    buffers: int = 0
    """Memory in which these layers take turns."""
    prompt: int = 0
    """Layers that are copied for a prompt."""
    rank: int = 0
    """Weights on each rank beside the transformers."""
    rank_decode: int = 0
    """One decode by each rank, between segments of a clip."""

    @classmethod
    def of(cls, found: Footprint, *, limits: bool, usual_limit_gib: int) -> StageMemory:
        """Return the memory of ``found``. ``limits``: the decoder supports ``memory_gib``."""
        decode = found.decode_bytes or 0
        return cls(
            encoder=sum(size or 0 for size in found.encoder.values()),
            decoder=sum(size or 0 for size in found.decoder.values()),
            decode=min(decode, usual_limit_gib * GIB) if limits else decode,
            limited=min(decode, DECODE_LIMIT_GIB * GIB) if limits else decode,
            whole=decode,
            compiled=max(found.compiled_bytes, 0),
            layers=found.layers.layers,
            buffers=found.layers.buffers,
            prompt=found.layers.prompt,
            rank=sum(size or 0 for size in found.ranks.values()),
            rank_decode=found.rank_decode_bytes,
        )

    def encoder_bytes(self, *, offloaded: bool) -> int:
        """Return the device memory of the encoder's weights."""
        return self.encoder - self.layers + self.buffers if offloaded else self.encoder

    def weight_bytes(self, *, offloaded: bool = False) -> int:
        """Return the device memory of all weights of encoder and decoder."""
        return self.encoder_bytes(offloaded=offloaded) + self.decoder + self.compiled

    def fullest_bytes(
        self, rank_bytes: int, place: str = SHARED, *, limited: bool = False, offloaded: bool = False
    ) -> int:
        """Return the bytes on the fullest GPU, with ``rank_bytes`` for each rank.

        ``offloaded``: the layers of text encoders are in host memory.
        """
        rank_bytes += self.rank + self.rank_decode
        decode = self.decoder + self.compiled + (self.limited if limited else self.decode) + PROCESS_BYTES
        encoder = self.encoder_bytes(offloaded=offloaded)
        rank, encode = rank_bytes + PROCESS_BYTES, encoder + PROCESS_BYTES
        if place == APART:
            return max(rank, encode + decode)
        if place == TURNS:
            return max(encoder, rank_bytes + decode - PROCESS_BYTES) + 3 * PROCESS_BYTES
        return rank + decode + (encode if place == SHARED else 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """Something that makes a model fit."""

    words: tuple[str, ...]
    """Keys or options to set."""
    num_gpus: int
    """GPUs that it takes."""
    num_bytes: int
    """Memory of the fullest of them then."""

    def __str__(self) -> str:
        gpus = "1 GPU" if self.num_gpus == 1 else f"{self.num_gpus} GPUs"
        return f"{' and '.join(self.words)} ({self.num_bytes / GIB:.1f} GiB on the fullest of {gpus})"


@dataclass(frozen=True, kw_only=True, slots=True)
class OtherPass:
    """Steps of a pass over the latents beside the one with the largest steps."""

    work: Workload
    """One step."""
    num_steps: int
    """Number of its steps."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fit:
    """Memory of the fullest GPU, which holds a rank, the encoder and the decoder."""

    step: StepForecast
    """Costs of a step."""
    num_ranks: int
    """Ranks of the gang."""
    parts: StageMemory
    """Memory of encoder and decoder."""
    unknown: tuple[str, ...]
    """Parts of unknown size, which are not counted."""
    other_pass: OtherPass | None = None
    """The pass over the latents with the smaller steps; ``step`` is of the one with the larger ones."""

    @property
    def machine(self) -> Machine:
        return self.step.machine

    @property
    def usable_bytes(self) -> int:
        from engines.planner.cost_model import USABLE

        return int(USABLE * self.machine.memory_bytes)

    @property
    def total_bytes(self) -> int:
        return self.parts.fullest_bytes(self.step.chosen.needed_bytes)

    @property
    def fits(self) -> bool:
        return self.total_bytes <= self.usable_bytes

    @property
    def host_bytes(self) -> int:
        """Host memory of all weights while the model is asleep (``share``)."""
        return self.asleep_bytes(self.step.chosen)

    def asleep_bytes(self, cost: Cost, *, offloaded: bool = False) -> int:
        """Return the host memory of all weights while ranks with ``cost`` and the other parts are asleep."""
        ranks = self.num_ranks * (cost.weight_bytes + self.parts.rank)
        return ranks + self.parts.weight_bytes(offloaded=offloaded)

    @property
    def wake_s(self) -> float:
        """Seconds of a wake-up, the fullest GPU's."""
        weight_bytes = self.step.chosen.weight_bytes + self.parts.rank + self.parts.weight_bytes()
        return weight_bytes / self.machine.host_bytes_per_s

    def changes(self) -> list[Change]:
        """Return changes with which all parts fit, one for each number of GPUs, fewest first."""
        found: dict[int, Change] = {}
        for change in self._candidates():
            if change.num_bytes <= self.usable_bytes:
                found.setdefault(change.num_gpus, change)
        return [found[number] for number in sorted(found)]

    def _candidates(self) -> Iterator[Change]:
        """Yield changes with as many GPUs and with more, the smallest changes first."""
        numbers = (self.num_ranks, *(n for n in (2, 4, MAX_RANKS) if n > self.num_ranks))
        for place in (SHARED, APART, ON_CPU):
            for num_ranks in numbers:
                for precision in (self.step.precision, *self._other_precisions()):
                    for limited in (False, True):
                        yield from self._changes(num_ranks, precision, place, limited=limited)

    def _other_precisions(self) -> tuple[str, ...]:
        return tuple(name for name in self.machine.quantised if name != self.step.precision)

    def _changes(self, num_ranks: int, precision: str, place: str, *, limited: bool) -> Iterator[Change]:
        if limited and self.parts.limited == self.parts.decode:
            return
        ranks = [f"--ranks {num_ranks}"] if num_ranks != self.num_ranks else []
        words = [f"denoiser.precision: {precision}"] if precision != self.step.precision else []
        words += ["text_encoder and decoder on a GPU of their own"] if place == APART else []
        words += ["text_encoder.num_gpus: 0, on slow CPU cores"] if place == ON_CPU else []
        words += [f"decoder.memory_gib: {DECODE_LIMIT_GIB}"] if limited else []
        for cost in self._costs(num_ranks, precision):
            own = [f"denoiser.strategy: {cost.spec.name}"] if cost.spec.divides_weights else []
            yield Change(
                words=(*ranks, *own, *words),
                num_gpus=num_ranks + (place == APART),
                num_bytes=self.parts.fullest_bytes(cost.needed_bytes, place, limited=limited),
            )

    def _costs(self, num_ranks: int, precision: str) -> list[Cost]:
        """Return the costs of strategies, whole weights before divided ones, fastest first."""
        from engines.planner.forecast import forecast

        if num_ranks == self.num_ranks and precision == self.step.precision:
            costs = self.step.costs
        else:
            machine = self.machine.for_ranks(num_ranks)
            try:
                step = forecast(self.step.counted, self.step.work, num_ranks, machine, precision, must_fit=False)
            except ValueError:  # the machine was measured with one rank, without exchanges
                return []
            costs = step.costs
        return sorted(costs, key=lambda cost: (cost.spec.divides_weights, cost.total_ms))

    def sentence(self) -> str:
        room = f"{self.machine.memory_bytes / GIB:.1f} GiB a GPU ({self.usable_bytes / GIB:.1f} of them usable)"
        without = f"; not counted: {', '.join(self.unknown)}" if self.unknown else ""
        if self.fits:
            return f"fits {room}: {self.total_bytes / GIB:.1f} GiB on the fullest{without}"
        needs = f"does not fit {room}: {self.total_bytes / GIB:.1f} GiB on the fullest"
        changes = self.changes()
        if not changes:
            return f"{needs}, and no division of up to {MAX_RANKS} ranks does: ask for a smaller size or model{without}"
        return f"{needs}; fits with {'; or with '.join(map(str, changes[:2]))}{without}"

    def gib(self, found: Footprint) -> dict[str, float | None]:
        """Return GiB by part, on the fullest GPU."""
        chosen, parts = self.step.chosen, self.parts
        sizes: dict[str, int | None] = {
            "transformer": chosen.weight_bytes,
            "steps": chosen.needed_bytes - chosen.weight_bytes,
            **{f"rank: {name}": size for name, size in found.ranks.items()},
            **({"rank: decode": parts.rank_decode} if parts.rank_decode else {}),
            **{f"encoder: {name}": size for name, size in found.encoder.items()},
            **{f"decoder: {name}": size for name, size in found.decoder.items()},
            **({"decoder: compile": parts.compiled} if parts.compiled else {}),
            "decode": parts.decode if found.decode_bytes is not None else None,
            "processes": 3 * PROCESS_BYTES,
        }
        return {name: None if size is None else size / GIB for name, size in sizes.items()}

    def document(self, found: Footprint) -> dict[str, Any]:
        return {
            "fits": self.fits,
            "gib": self.gib(found),
            "total_gib": self.total_bytes / GIB,
            "usable_gib": self.usable_bytes / GIB,
            "not_counted": list(self.unknown),
            "asleep": {"host_gib": self.host_bytes / GIB, "wake_s": self.wake_s},
            "sentence": self.sentence(),
            "changes": [
                {"words": list(one.words), "num_gpus": one.num_gpus, "gib": one.num_bytes / GIB}
                for one in (() if self.fits else self.changes())
            ],
        }


def usual_limit_gib(num_ranks: int) -> int:
    """Return the default ``decoder.memory_gib`` for ``num_ranks``; with several, two GPUs decode together."""
    return 6 if num_ranks == 1 else 4


def with_memory(machine: Machine, memory_gib: float | None) -> Machine:
    """Return ``machine`` with another size of memory. ValueError for a size that is not positive."""
    if memory_gib is None:
        return machine
    if not memory_gib > 0:
        raise ValueError(f"--memory is {memory_gib:g}; it must be above 0, in GiB a GPU")
    return replace(machine, memory_bytes=int(memory_gib * GIB))


NEVER_COUNTED = ("waiting", "pictures that are encoded", "sound", "the file (PNG, MP4)", "the way to the client")


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestTimes:
    """Seconds of one request on an idle gang; None if unknown before a request."""

    num_steps: int
    """Steps of the sampler (``Defaults.num_steps_of``), of two passes those of the first."""
    step_s: float
    """One of them."""
    encode_s: float | None
    """All prompts; None: unknown."""
    decode_s: float | None
    """Latents to pixels; None: unknown."""
    encode_flops: float = 0.0
    """Floating-point operations of the encoder for one prompt."""
    num_prompts: int = 1
    """Prompts that are encoded one after the other, a negative one included."""
    second_num_steps: int = 0
    """Steps of the second pass; 0: there is one pass."""
    second_step_s: float = 0.0
    """One of them."""

    @classmethod
    def of(
        cls,
        parts: Footprint,
        machine: Machine,
        request: MediaRequest,
        num_steps: Sequence[int],
        step_ms: Sequence[float],
    ) -> RequestTimes:
        """Return the times for steps of ``step_ms``, all branches included; guidance adds a negative prompt.

        ``num_steps`` and ``step_ms`` are by pass over the latents, at most two.
        """
        from engines.planner.cost_model import decode_s, encode_s

        num_prompts = 2 if request.true_cfg_scale > 1 else 1
        prompt, decode = parts.prompt, parts.decode
        return cls(
            num_steps=num_steps[0],
            step_s=step_ms[0] / 1e3,
            second_num_steps=sum(num_steps[1:]),
            second_step_s=sum(step_ms[1:]) / 1e3,
            encode_s=num_prompts * encode_s(machine, prompt.flops, prompt.moved_bytes, parts.num_tokens)
            if prompt.flops
            else None,
            decode_s=None if decode is None else decode_s(machine, decode.flops, decode.moved_bytes),
            encode_flops=num_prompts * prompt.flops,
            num_prompts=num_prompts,
        )

    @property
    def total_s(self) -> float:
        steps_s = self.num_steps * self.step_s + self.second_num_steps * self.second_step_s
        return (self.encode_s or 0.0) + steps_s + (self.decode_s or 0.0)

    @property
    def not_counted(self) -> tuple[str, ...]:
        own = {"the prompt (its encoder or length is unknown)": self.encode_s, "the decode": self.decode_s}
        return (*(name for name, value in own.items() if value is None), *NEVER_COUNTED)

    def document(self) -> dict[str, Any]:
        return asdict(self) | {"total_s": self.total_s, "not_counted": list(self.not_counted)}
