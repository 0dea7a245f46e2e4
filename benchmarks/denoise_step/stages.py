"""What ``benchmarks.denoise_step.gpu`` runs, in order of importance."""

from __future__ import annotations

from dataclasses import dataclass

STEP = "benchmarks.denoise_step"
PROFILE = "benchmarks.denoise_step.profile"
QUALITY = "benchmarks.precision_quality"


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """``module`` with ``arguments``: on all GPUs, on ``gpus`` (a rank each), or on one.

    ``own_caches``: compiled kernels and Python's bytecode are not those of other runs, but of runs that say the same,
    and there are none at first.
    """

    name: str
    module: str = STEP
    arguments: tuple[str, ...] = ()
    all_gpus: bool = True
    gpus: tuple[int, ...] = ()
    writes_json: bool = True
    own_caches: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """Runs that start at the same time, stopped after ``limit_s``; ``takes_turns``: only one is timed at a time."""

    name: str
    runs: tuple[Run, ...]
    limit_s: int
    min_gpus: int = 1
    takes_turns: bool = False


def alone(name: str, *arguments: str, limit_s: int, min_gpus: int = 1, **options: object) -> Stage:
    """A stage of one run of its own name."""
    run = Run(name=name, arguments=arguments, **options)  # type: ignore[arg-type]
    return Stage(name=name, runs=(run,), limit_s=limit_s, min_gpus=min_gpus)


def case_name(maker: str, side: int, gpus: tuple[int, ...], option: str) -> str:
    several = ("ulysses", option) if len(gpus) > 1 else (option,) * (option != DEFAULT)
    return "/".join((maker, str(side), f"w{len(gpus)}", "bf16", *several))


def peer(name: str, maker: str, gpus: tuple[int, ...], *sides: int) -> Run:
    cases = [case_name(maker, side, gpus, "uncaptured") for side in sides]
    return Run(name=f"peer_{name}", arguments=("--only", *cases), gpus=gpus)


DEFAULT = "peer"
FOUR, FIRST, LAST, ONE = (0, 1, 2, 3), (0, 1), (2, 3), (0,)


def ours(name: str, gpus: tuple[int, ...], *sides: int) -> Run:
    """What stands beside peers on these GPUs."""
    cases = [case_name("fast", side, gpus, DEFAULT) for side in sides or (1024,)]
    return Run(name=name, arguments=("--only", *cases), gpus=gpus)


def beside(name: str, *runs: Run, limit_s: int) -> Stage:
    """Peers on the same GPUs, timed one after the other."""
    num_gpus = 1 + max(gpu for run in runs for gpu in run.gpus)
    return Stage(name=name, runs=runs, limit_s=limit_s, min_gpus=num_gpus, takes_turns=True)


# In two stages: each run holds the whole model on its GPUs, and three of them are what fits. On four the goals' own
# stage is what they stand beside; on 2 ranks their GPUs are cooler than there, so Troupe takes its turn with them.
PEERS = (
    beside(
        "peers",
        peer("ulysses4", "diffusers-ulysses", FOUR, 1024, 2048),
        peer("ring4", "diffusers-ring", FOUR, 1024, 2048),
        peer("xdit4", "xdit", FOUR, 1024, 2048),
        limit_s=130,
    ),
    beside(
        "peers_of_two",
        peer("ulysses2", "diffusers-ulysses", FIRST, 1024),
        peer("ring2", "diffusers-ring", LAST, 1024),
        peer("xdit2", "xdit", FIRST, 1024),
        ours("ours2", LAST),
        limit_s=100,
    ),
)
# Minutes each: SGLang compiles its transformer whole, with trials of every product; vLLM-Omni compiles in one thread,
# copies the weights, and its tensor parallelism wants a process of its own.
SLOW_PEERS = (
    beside(
        "sglang",
        peer("sglang4", "sglang", FOUR, 1024, 2048),
        peer("sglang_compiled4", "sglang-compiled", FOUR, 1024),
        ours("ours4", FOUR),
        limit_s=400,
    ),
    beside(
        "sglang_of_two",
        peer("sglang2", "sglang", FIRST, 1024),
        peer("sglang_compiled2", "sglang-compiled", LAST, 1024),
        ours("beside_sglang2", FIRST),
        limit_s=400,
    ),
    beside(
        "vllm_omni",
        peer("vllm_omni4", "vllm-omni", FOUR, 1024, 2048),
        peer("vllm_omni_tensor4", "vllm-omni-tensor", FOUR, 1024),
        limit_s=350,
    ),
    beside(
        "vllm_omni_of_two",
        peer("vllm_omni2", "vllm-omni", FIRST, 1024),
        peer("vllm_omni_tensor2", "vllm-omni-tensor", LAST, 1024),
        ours("beside_vllm_omni2", FIRST),
        limit_s=350,
    ),
)
# The same for a host of two GPUs, by importance: a gang that is not ready in time costs its whole stage.
PEERS_OF_A_PAIR = (
    beside(
        "sglang_pair",
        peer("pair_sglang", "sglang", FIRST, 1024, 2048),
        peer("pair_sglang_blocks", "sglang-blocks", FIRST, 1024, 2048),
        ours("pair_beside_sglang", FIRST, 1024, 2048),
        limit_s=240,
    ),
    beside(
        "vllm_omni_pair",
        peer("pair_vllm_omni", "vllm-omni", FIRST, 1024, 2048),
        peer("pair_vllm_omni_tensor", "vllm-omni-tensor", FIRST, 1024, 2048),
        ours("pair_beside_vllm_omni", FIRST, 1024, 2048),
        limit_s=200,
    ),
    beside(
        "sglang_compiled_pair",
        peer("pair_sglang_compiled", "sglang-compiled", FIRST, 1024),
        ours("pair_beside_sglang_compiled", FIRST),
        limit_s=400,
    ),
    beside(
        "peers_of_one",
        peer("one_sglang", "sglang", ONE, 1024, 2048),
        peer("one_vllm_omni", "vllm-omni", ONE, 1024, 2048),
        ours("one_beside_peers", ONE, 1024, 2048),
        limit_s=200,
    ),
    beside(
        "diffusers_pair",
        peer("pair_ulysses", "diffusers-ulysses", FIRST, 1024, 2048),
        peer("pair_ring", "diffusers-ring", FIRST, 1024, 2048),
        ours("pair_beside_diffusers", FIRST, 1024, 2048),
        limit_s=130,
    ),
)

KERNEL_CHECK = "tests.engines.fast.support.triton_check"
SINGLE = ("1024/w1/", "2048/w1")
TURNS = ("fast/1024/w1/bf16", "fast/1024/w1/bf16/uncaptured")
PROFILED = ("fast/1024/w1/bf16", f"fast/1024/w4/bf16/ulysses/{DEFAULT}", f"fast/2048/w4/bf16/ulysses/{DEFAULT}")
PROFILED_WAN = ("wan/480/w1/bf16/blocks8", "wan/480/w4/bf16/ulysses/blocks8/peer")

STAGES = (
    alone(
        "kernels", "cuda", module=KERNEL_CHECK, all_gpus=False, writes_json=False, limit_s=60
    ),
    alone("goals", limit_s=90),
    *PEERS,
    alone("elastic", "engine/", "switch/", "always8", "elastic8", limit_s=90),
    alone("variants", "bf16/ulysses", "fp8/ulysses", "--skip", "uncaptured", "none", "wan", "nccl-", "engine", "switch",
          "8/512", limit_s=150, min_gpus=2),
    alone("strategies", "allgather_kv", "/ring", "hybrid", "--skip", "wan", "diffusers", limit_s=60, min_gpus=2),
    alone("exact", module="benchmarks.denoise_step.exact", limit_s=100, min_gpus=2),
    alone("wan", "wan/", "--skip", "w1/bf16/blocks8", "ulysses/blocks8", limit_s=230),
    alone("start_cold", module="benchmarks.denoise_step.start", own_caches=True, limit_s=60),
    alone("start_warm", module="benchmarks.denoise_step.start", own_caches=True, limit_s=60),
    alone("teams_flux", module=QUALITY, limit_s=60, min_gpus=2),
    alone("teams_wan", "--model", "wan-shapes", module=QUALITY, limit_s=60, min_gpus=2),
    Stage(
        name="singles",
        runs=(
            Run(name="quality_flux", module=QUALITY, gpus=(0,)),
            Run(name="quality_wan", module=QUALITY, arguments=("--model", "wan-shapes"), gpus=(1,)),
            Run(name="turns", arguments=("--rounds", "8", "--only", *TURNS), gpus=(2,)),
            Run(name="single", arguments=SINGLE, gpus=(3,)),
        ),
        limit_s=130,
        min_gpus=4,
    ),
    alone("machine", module="benchmarks.planner.machine", all_gpus=False, limit_s=60),
    alone("profile", *PROFILED, module=PROFILE, writes_json=False, limit_s=60),
    alone("profile_wan", *PROFILED_WAN, module=PROFILE, writes_json=False, limit_s=90, min_gpus=4),
    alone("exchange_speed", module="benchmarks.denoise_step.exchange", writes_json=False, limit_s=60, min_gpus=2),
    alone("parts", module="benchmarks.denoise_step.parts", all_gpus=False, limit_s=60),
    alone("exchanges", "none", "nccl-", limit_s=60, min_gpus=4),
    *SLOW_PEERS,
    *PEERS_OF_A_PAIR,
)  # fmt: skip
