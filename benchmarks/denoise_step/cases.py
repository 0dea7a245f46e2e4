"""The table of cases. A name says everything: who, picture side, number of ranks, options."""

from __future__ import annotations

from dataclasses import dataclass, replace

from engines.core.fast_model import Precision
from engines.torch_engine.fast_step import DEFAULT_OVERLAP, Overlap

ENGINE_MAKERS = ("engine", "switch", "always8", "elastic8")
PLAIN = Overlap(mlp_lane=False, num_parts=1, peer_memory=False, streams_apart=False)
"""What a case's name says nothing about: NCCL, one lane more for the second stream."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """``maker``: "fast" (ours), "blocks" (the module, blocks compiled), "eager"; the others' names are the peers'.
    "engine": ours as a gang calls it; "switch": the same, on one rank and then on ``num_ranks``, both in one time;
    "always8": 8 pictures of ``num_steps``, each on all ranks, one after the other; "elastic8": the same, the
    ranks shared out among them.
    "wan" is Wan2.1-14B (``side`` its height) by the engine, blocks compiled; the others FLUX.1-dev.

    ``exchange``: "nccl"; "nccl-8": at most so many thread blocks; "nccl-low": on a stream of usual priority; "none":
    left out, to see what computing alone costs. ``num_blocks``: of the model's, where all would take too long (0: all).
    """

    maker: str
    side: int
    num_ranks: int
    strategy: str = "ulysses"
    precision: Precision = "native"
    batch: int = 1
    overlap: Overlap = PLAIN
    exchange: str = "nccl"
    graph: bool = True
    default: bool = True
    repeats: int = 20
    num_branches: int = 1
    num_blocks: int = 0
    num_steps: int = 1

    @property
    def name(self) -> str:
        options: list[str] = [self.precision if self.precision != "native" else "bf16"]
        options += [self.strategy] if self.num_ranks > 1 else []
        options += [f"branches{self.num_branches}"] if self.num_branches > 1 else []
        options += [f"blocks{self.num_blocks}"] if self.num_blocks else []
        options += [f"batch{self.batch}"] if self.batch > 1 else []
        options += [f"steps{self.num_steps}"] if self.num_steps > 1 else []
        options += [self.exchange] if self.num_ranks > 1 and self.exchange != "nccl" else []
        options += [] if self.graph else ["uncaptured"]
        options += self._overlaps() if self.maker in ("fast", *ENGINE_MAKERS) else []
        options += self._module_overlaps() if self.maker == "wan" and self.num_ranks > 1 else []
        return "/".join((self.maker, str(self.side), f"w{self.num_ranks}", *options))

    def can_run(self, world: int) -> bool:
        """Without its exchange, a rank's share of a team of any size can be timed alone; peers take all ranks."""
        if self.is_peer:
            return self.num_ranks == world
        return self.num_ranks <= world or self.exchange == "none"

    @property
    def is_peer(self) -> bool:
        return self.maker.startswith(("diffusers", "xdit", "sglang", "vllm-omni"))

    def _overlaps(self) -> list[str]:
        options = [] if self.overlap.stream_lane == PLAIN.stream_lane else ["one-stream"]
        options += ["apart"] if self.overlap.streams_apart else []
        if self.num_ranks == 1:
            return options  # nothing is exchanged
        options += ["mlp-lane"] if self.overlap.mlp_lane else []
        options += [f"parts{self.overlap.num_parts}"] if self.overlap.num_parts > 1 else []
        options += ["peer"] if self.overlap.peer_memory else []
        return options + ([] if self.overlap.peer_copies else ["push"])

    def _module_overlaps(self) -> list[str]:
        return ["peer"] if self.overlap.peer_memory else [f"parts{self.overlap.module_parts}"]


PEER, LANE, TWO = (replace(PLAIN, **change) for change in ({"peer_memory": True}, {"mlp_lane": True}, {"num_parts": 2}))
PEER_LANE, PEER_TWO, PUSH = replace(PEER, mlp_lane=True), replace(PEER, num_parts=2), replace(PEER, peer_copies=False)
PEER_LANE_TWO = replace(PEER_LANE, num_parts=2)
APART, PEER_APART, PEER_LANE_APART = (replace(overlap, streams_apart=True) for overlap in (PLAIN, PEER, PEER_LANE))

NATIVE: Precision = "native"
FP8: Precision = "fp8"

GOALS = tuple(
    Case(maker="fast", side=side, num_ranks=num_ranks, precision=precision, batch=batch, overlap=DEFAULT_OVERLAP)
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
"""As the engine runs them."""

VARIANTS = tuple(
    Case(
        maker="fast",
        side=side,
        num_ranks=num_ranks,
        precision=precision,
        overlap=overlap,
        repeats=10 if side > 1024 else 20,
        default=False,
    )
    for side, num_ranks, precision in (
        (1024, 2, NATIVE),
        (1024, 4, NATIVE),
        (2048, 4, NATIVE),
        (512, 4, NATIVE),
        (1024, 4, FP8),
    )
    for overlap in (PEER_APART, PEER_LANE_APART, PEER_LANE, PEER, PEER_TWO, PEER_LANE_TWO, PUSH, PLAIN, LANE, APART)
    if overlap != DEFAULT_OVERLAP
)

SINGLE_RANK = (
    *(
        Case(
            maker="fast",
            side=side,
            num_ranks=1,
            precision=precision,
            overlap=overlap,
            default=False,
        )
        for side, precision in ((1024, NATIVE), (1024, FP8), (512, NATIVE))
        for overlap in (PLAIN, replace(PLAIN, stream_lane=False))
    ),
    Case(maker="fast", side=2048, num_ranks=1, default=False, repeats=6),
    Case(maker="fast", side=1024, num_ranks=1, graph=False, default=False),
    Case(maker="eager", side=1024, num_ranks=1, graph=False, default=False, repeats=6),
    Case(maker="blocks", side=1024, num_ranks=1, default=False),
)

EXCHANGES = tuple(
    Case(maker="fast", side=1024, num_ranks=4, exchange=exchange, overlap=overlap, default=False)
    for exchange in ("none", "nccl-low", "nccl-8", "nccl-16")
    for overlap in (PLAIN, LANE)
) + tuple(
    Case(maker="fast", side=side, num_ranks=num_ranks, precision=precision, exchange="none", default=False)
    for side, num_ranks, precision in ((1024, 2, NATIVE), (512, 4, NATIVE), (2048, 4, NATIVE), (1024, 4, FP8))
)

STRATEGIES = tuple(
    Case(maker="fast", side=1024, num_ranks=num_ranks, strategy=strategy, default=False)
    for strategy, num_ranks in (("allgather_kv", 2), ("allgather_kv", 4), ("ring", 2), ("ring", 4), ("hybrid", 4))
)

VLLM_OMNI = ("vllm-omni", "vllm-omni-eager", "vllm-omni-tensor")
PEERS = tuple(
    Case(maker=maker, side=side, num_ranks=num_ranks, graph=False, default=False)
    for maker in ("diffusers-ulysses", "diffusers-ring", "xdit", "sglang", "sglang-compiled", *VLLM_OMNI)
    for side, num_ranks in ((1024, 2), (1024, 4), (2048, 4), (512, 4))
)

ENGINE = (
    Case(maker="engine", side=512, num_ranks=1, overlap=DEFAULT_OVERLAP, default=False),
    Case(maker="engine", side=512, num_ranks=4, overlap=DEFAULT_OVERLAP, default=False),
    Case(maker="switch", side=512, num_ranks=4, overlap=DEFAULT_OVERLAP, default=False),
    *(
        Case(maker=maker, side=512, num_ranks=4, overlap=DEFAULT_OVERLAP, num_steps=28, repeats=5, default=False)
        for maker in ("always8", "elastic8")
    ),
)

WAN = (
    *(
        Case(maker="wan", side=480, num_ranks=num_ranks, repeats=4, overlap=overlap, default=False)
        for num_ranks, overlap in (
            (4, DEFAULT_OVERLAP),
            (1, DEFAULT_OVERLAP),
            (2, DEFAULT_OVERLAP),
            (4, replace(DEFAULT_OVERLAP, peer_memory=False)),
            (4, replace(DEFAULT_OVERLAP, peer_memory=False, module_parts=1)),
        )
    ),
    *(
        Case(
            maker="wan", side=480, num_ranks=num_ranks, num_blocks=8, overlap=DEFAULT_OVERLAP, repeats=4, default=False
        )
        for num_ranks in (4, 1)  # to be profiled
    ),
    *(
        Case(
            maker="wan",
            side=720,
            num_ranks=4,
            strategy=strategy,
            num_branches=2,
            num_blocks=8,
            repeats=2,
            graph=False,
            overlap=DEFAULT_OVERLAP,
            default=False,
        )
        for strategy in ("guidance2xulysses2", "ulysses", "allgather_kv", "ring")
    ),
)

CASES = GOALS + VARIANTS + ENGINE + STRATEGIES + SINGLE_RANK + EXCHANGES + PEERS + WAN
