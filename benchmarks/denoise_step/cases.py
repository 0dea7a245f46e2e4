"""The cases of ``benchmarks.denoise_step``. A name says all of a case: maker, side, number of ranks, options."""

from __future__ import annotations

from dataclasses import dataclass, replace

from engines.core.model import Precision

SGLANG = ("sglang", "sglang-blocks", "sglang-compiled", "sglang-graphs")
VLLM_OMNI = ("vllm-omni", "vllm-omni-eager", "vllm-omni-tensor")
REDUCE_OVERHEAD = "diffusers-reduce-overhead"
PEERS_OF_SEVERAL = ("diffusers-ulysses", "diffusers-ring", "xdit", *SGLANG, *VLLM_OMNI)


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One step of FLUX.1-dev."""

    maker: str
    """"fast" (Troupe's hand-ordered step), "blocks" (the module with compiled blocks), "eager" (the module), a peer."""
    side: int
    """Pixels of the square picture's side."""
    num_ranks: int
    strategy: str = "ulysses"
    precision: Precision = "native"
    batch: int = 1
    peer_memory: bool = False
    """Ranks write into each other's memory where that works. Without it they exchange by NCCL."""
    graph: bool = True
    """The step is captured whole in a CUDA graph. Without it peers may have graphs of their own."""
    default: bool = True
    """Runs when no case is named."""
    repeats: int = 20

    @property
    def name(self) -> str:
        options: list[str] = [self.precision if self.precision != "native" else "bf16"]
        options += [self.strategy] if self.num_ranks > 1 else []
        options += [f"batch{self.batch}"] if self.batch > 1 else []
        options += [] if self.graph else ["uncaptured"]
        options += ["peer"] if self.num_ranks > 1 and self.peer_memory else []
        return "/".join((self.maker, str(self.side), f"w{self.num_ranks}", *options))

    def can_run(self, world: int) -> bool:
        """Return whether ``world`` ranks can run it. Peers take all ranks."""
        return self.num_ranks == world if self.is_peer else self.num_ranks <= world

    @property
    def is_peer(self) -> bool:
        return self.maker in (*PEERS_OF_SEVERAL, REDUCE_OVERHEAD)


NATIVE: Precision = "native"
FP8: Precision = "fp8"

GOALS = tuple(
    Case(maker="fast", side=side, num_ranks=num_ranks, precision=precision, batch=batch, peer_memory=True)
    for side, num_ranks, precision, batch in (
        (1024, 1, NATIVE, 1),
        (1024, 2, NATIVE, 1),
        (1024, 4, NATIVE, 1),
        (2048, 4, NATIVE, 1),
        (512, 4, NATIVE, 1),
        (1024, 1, FP8, 1),
        (1024, 4, FP8, 1),
        (512, 1, NATIVE, 1),
        (512, 1, NATIVE, 2),
    )
)
"""Troupe's step as its engine runs it."""

BY_NCCL = tuple(
    Case(maker="fast", side=side, num_ranks=num_ranks, strategy=strategy, precision=precision, default=False)
    for side, num_ranks, strategy, precision in (
        (1024, 2, "ulysses", NATIVE),
        (1024, 4, "ulysses", NATIVE),
        (2048, 4, "ulysses", NATIVE),
        (512, 4, "ulysses", NATIVE),
        (1024, 4, "ulysses", FP8),
        *((1024, num_ranks, strategy, NATIVE) for strategy in ("allgather_kv", "ring") for num_ranks in (2, 4)),
        (1024, 4, "hybrid", NATIVE),
    )
)

SINGLE_RANK = (
    Case(maker="fast", side=2048, num_ranks=1, default=False, repeats=6),
    Case(maker="fast", side=1024, num_ranks=1, graph=False, default=False),
    Case(maker="eager", side=1024, num_ranks=1, graph=False, default=False, repeats=6),
    Case(maker="blocks", side=1024, num_ranks=1, default=False),
    Case(maker="blocks", side=1024, num_ranks=1, graph=False, default=False),
    Case(maker="blocks", side=2048, num_ranks=1, graph=False, default=False, repeats=6),
    Case(maker="blocks", side=2048, num_ranks=1, default=False, repeats=6),
    Case(maker="eager", side=1024, num_ranks=1, default=False, repeats=6),
    Case(maker=REDUCE_OVERHEAD, side=1024, num_ranks=1, graph=False, default=False),
)

PEERS = tuple(
    Case(maker=maker, side=side, num_ranks=num_ranks, graph=False, default=False)
    for maker in PEERS_OF_SEVERAL
    for side, num_ranks in ((1024, 2), (2048, 2), (1024, 4), (2048, 4), (512, 4))
) + tuple(
    Case(maker=maker, side=side, num_ranks=1, graph=False, default=False, repeats=6 if side > 1024 else 20)
    for maker in (*SGLANG, *VLLM_OMNI[:2])
    for side in (1024, 2048)
)
FP8_PEERS = tuple(
    Case(maker=maker, side=side, num_ranks=num_ranks, precision=FP8, graph=False, default=False, repeats=repeats)
    for maker in (*SGLANG[:2], "sglang-graphs", *VLLM_OMNI)
    for num_ranks in (1, 2, 4)
    for side, repeats in ((1024, 20), (2048, 6))
)
CAPTURED_PEERS = tuple(
    replace(case, graph=True) for case in PEERS + FP8_PEERS if case.maker != "sglang-graphs" and case.side >= 1024
)
"""The same peers, captured whole."""
BESIDE_PEERS = (
    Case(maker="fast", side=2048, num_ranks=2, peer_memory=True, default=False),
    *(
        Case(maker="fast", side=side, num_ranks=num_ranks, precision=FP8, peer_memory=True, default=False, repeats=10)
        for side, num_ranks in ((2048, 1), (1024, 2), (2048, 2), (2048, 4))
    ),
)

CASES = GOALS + BY_NCCL + SINGLE_RANK + BESIDE_PEERS + PEERS + FP8_PEERS + CAPTURED_PEERS
