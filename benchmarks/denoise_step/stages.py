"""What ``benchmarks.denoise_step.gpu`` runs, in order of importance."""

from __future__ import annotations

from benchmarks.denoise_step.model_stages import MODELS_OF_A_PAIR, MODELS_OF_FOUR, MODELS_OF_ONE
from benchmarks.denoise_step.peer_stages import ATTENTION, PEERS, PEERS_OF_A_PAIR, PEERS_OF_FOUR, PEERS_OF_ONE
from benchmarks.denoise_step.stage import DEFAULT, Run, Stage, alone

PROFILE = "benchmarks.denoise_step.profile"
QUALITY = "benchmarks.precision_quality"
KERNEL_CHECK = "tests.engines.fast.support.triton_check"
SINGLE = ("1024/w1/", "2048/w1", "--skip", "sglang", "vllm-omni")
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
    ATTENTION,
    alone("exchanges", "none", "nccl-", limit_s=60, min_gpus=4),
    *PEERS_OF_FOUR,
    *PEERS_OF_A_PAIR,
    *PEERS_OF_ONE,
    *MODELS_OF_ONE,
    *MODELS_OF_A_PAIR,
    *MODELS_OF_FOUR,
)  # fmt: skip
