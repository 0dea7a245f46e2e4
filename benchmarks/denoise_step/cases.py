"""The table of cases. A name says everything: who, picture side, number of ranks, options."""

from __future__ import annotations

from dataclasses import dataclass

from engines.core.model import Precision

ENGINE_MAKERS = ("engine", "switch", "always8", "elastic8")


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """``maker``: "fast" (ours), "blocks" (the module, blocks compiled), "eager"; the others' names are the peers'.
    "engine": ours as a gang calls it; "switch": the same, on one rank and then on ``num_ranks``, both in one time;
    "always8": 8 pictures of ``num_steps``, each on all ranks, one after the other; "elastic8": the same, the
    ranks shared out among them.
    "wan" is Wan2.1-14B (``side`` its height) by the engine, blocks compiled; the others FLUX.1-dev.

    ``exchange``: "nccl"; "nccl-8": at most so many thread blocks; "nccl-low": on a stream of usual priority; "none":
    left out, to see what computing alone costs. ``peer_memory``: ranks write into each other's memory instead,
    where that works. ``num_blocks``: of the model's, where all would take too long (0: all).
    """

    maker: str
    side: int
    num_ranks: int
    strategy: str = "ulysses"
    precision: Precision = "native"
    batch: int = 1
    peer_memory: bool = False
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
        options += ["peer"] if self.num_ranks > 1 and self.peer_memory else []
        return "/".join((self.maker, str(self.side), f"w{self.num_ranks}", *options))

    def can_run(self, world: int) -> bool:
        """Without its exchange, a rank's share of a team of any size can be timed alone; peers take all ranks."""
        if self.is_peer:
            return self.num_ranks == world
        return self.num_ranks <= world or self.exchange == "none"

    @property
    def is_peer(self) -> bool:
        return self.maker.startswith(("diffusers", "xdit", "sglang", "vllm-omni"))


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
"""As the engine runs them."""

VARIANTS = tuple(
    Case(
        maker="fast",
        side=side,
        num_ranks=num_ranks,
        precision=precision,
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
)
"""By NCCL."""

SINGLE_RANK = (
    Case(maker="fast", side=2048, num_ranks=1, default=False, repeats=6),
    Case(maker="fast", side=1024, num_ranks=1, graph=False, default=False),
    Case(maker="eager", side=1024, num_ranks=1, graph=False, default=False, repeats=6),
    Case(maker="blocks", side=1024, num_ranks=1, default=False),
    Case(maker="blocks", side=1024, num_ranks=1, graph=False, default=False),
    Case(maker="blocks", side=2048, num_ranks=1, graph=False, default=False, repeats=6),
)

EXCHANGES = tuple(
    Case(maker="fast", side=1024, num_ranks=4, exchange=exchange, default=False)
    for exchange in ("none", "nccl-low", "nccl-8", "nccl-16")
) + tuple(
    Case(maker="fast", side=side, num_ranks=num_ranks, precision=precision, exchange="none", default=False)
    for side, num_ranks, precision in ((1024, 2, NATIVE), (512, 4, NATIVE), (2048, 4, NATIVE), (1024, 4, FP8))
)

STRATEGIES = tuple(
    Case(maker="fast", side=1024, num_ranks=num_ranks, strategy=strategy, default=False)
    for strategy, num_ranks in (("allgather_kv", 2), ("allgather_kv", 4), ("ring", 2), ("ring", 4), ("hybrid", 4))
)

SGLANG = ("sglang", "sglang-blocks", "sglang-compiled")
VLLM_OMNI = ("vllm-omni", "vllm-omni-eager", "vllm-omni-tensor")
PEERS = tuple(
    Case(maker=maker, side=side, num_ranks=num_ranks, graph=False, default=False)
    for maker in ("diffusers-ulysses", "diffusers-ring", "xdit", *SGLANG, *VLLM_OMNI)
    for side, num_ranks in ((1024, 2), (2048, 2), (1024, 4), (2048, 4), (512, 4))
) + tuple(
    Case(maker=maker, side=side, num_ranks=1, graph=False, default=False, repeats=6 if side > 1024 else 20)
    for maker in (*SGLANG, *VLLM_OMNI[:2])
    for side in (1024, 2048)
)
FP8_PEERS = tuple(
    Case(maker=maker, side=side, num_ranks=num_ranks, precision=FP8, graph=False, default=False, repeats=repeats)
    for maker in (*SGLANG[:2], *VLLM_OMNI)
    for num_ranks in (1, 2, 4)
    for side, repeats in ((1024, 20), (2048, 6))
)
BESIDE_PEERS = (
    Case(maker="fast", side=2048, num_ranks=2, peer_memory=True, default=False),
    *(
        Case(maker="fast", side=side, num_ranks=num_ranks, precision=FP8, peer_memory=True, default=False, repeats=10)
        for side, num_ranks in ((2048, 1), (1024, 2), (2048, 2), (2048, 4))
    ),
)

ENGINE = (
    Case(maker="engine", side=512, num_ranks=1, peer_memory=True, default=False),
    Case(maker="engine", side=512, num_ranks=4, peer_memory=True, default=False),
    Case(maker="switch", side=512, num_ranks=4, peer_memory=True, default=False),
    *(
        Case(maker=maker, side=512, num_ranks=4, peer_memory=True, num_steps=28, repeats=5, default=False)
        for maker in ("always8", "elastic8")
    ),
)

WAN = (
    *(
        Case(maker="wan", side=480, num_ranks=num_ranks, repeats=4, peer_memory=peer_memory, default=False)
        for num_ranks, peer_memory in ((4, True), (1, True), (2, True), (4, False))
    ),
    *(
        Case(maker="wan", side=480, num_ranks=num_ranks, num_blocks=8, peer_memory=True, repeats=4, default=False)
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
            peer_memory=True,
            default=False,
        )
        for strategy in ("guidance2xulysses2", "ulysses", "allgather_kv", "ring")
    ),
)

CASES = GOALS + VARIANTS + ENGINE + STRATEGIES + SINGLE_RANK + EXCHANGES + PEERS + FP8_PEERS + BESIDE_PEERS + WAN
