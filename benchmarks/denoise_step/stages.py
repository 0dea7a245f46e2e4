"""Stages of ``benchmarks.denoise_step.gpu``, most important first: Troupe alone, beside peers, published models."""

from __future__ import annotations

from collections.abc import Iterable

from benchmarks.denoise_step.best import BEST, BEST_REST
from benchmarks.denoise_step.stage import (
    BF16,
    DEFAULT,
    FIRST,
    FOUR,
    FP8,
    LAST,
    MODEL_STEP,
    ONE,
    Run,
    Stage,
    alone,
    beside,
    ours,
    peer,
)  # fmt: skip

PROJECTS = ("sglang", "vllm-omni", "xdit", "diffusers")
KERNEL_CHECK = "tests.engines.fast.support.triton_check"
PROFILED = ("fast/1024/w1/bf16", f"fast/1024/w4/bf16/ulysses/{DEFAULT}", f"fast/2048/w4/bf16/ulysses/{DEFAULT}")

# 80 GB have room for two runs, which hold the whole model each: diffusers' ring on four GPUs has its own stage below.
# On four GPUs these stand beside the goals. On two, GPUs are cooler than there, so Troupe takes its turn.
PEERS = (
    beside(
        "peers",
        peer("ulysses4", "diffusers-ulysses", FOUR, 1024, 2048),
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


def peers_on(word: str, gpus: tuple[int, ...]) -> tuple[Stage, ...]:
    """Return a stage for each peer, most important first.

    A stage holds three copies of the model, of which vLLM-Omni takes two for a while. That is what GPUs of 80 GB have
    room for.
    """
    return tuple(
        beside(
            f"{maker.replace('-', '_')}{'_fp8' * (precision == FP8)}{_of_size(sides)}_{word}",
            peer(f"{word}_{maker}_{precision}{_of_size(sides)}", maker, gpus, *sides, precision=precision),
            ours(f"{word}_beside_{maker}_{precision}{_of_size(sides)}", gpus, *sides, precision=precision),
            limit_s=limit_s,
        )
        for limit_s, maker, precision, *sides in (
            (200, "sglang", BF16, 1024, 2048),  # on a new host it reads its many modules for the first time
            (150, "vllm-omni", BF16, 1024, 2048),
            (120, "sglang", FP8, 1024, 2048),
            (150, "vllm-omni", FP8, 1024, 2048),
            (100, "diffusers-ulysses", BF16, 1024, 2048),
            (150, "vllm-omni-tensor", BF16, 1024, 2048),
            (350, "sglang-blocks", BF16, 1024),  # ready within 200 s on four H100s, and with both sizes not after 266
            (350, "sglang-blocks", BF16, 2048),
            (100, "diffusers-ring", BF16, 1024, 2048),
            (400, "sglang-compiled", BF16, 1024),
        )
    )


def _of_size(sides: list[int]) -> str:
    """Return what names carry if 1024 is not among ``sides``."""
    return "" if 1024 in sides else f"_{sides[0]}"


PEERS_OF_A_PAIR, PEERS_OF_FOUR = peers_on("pair", FIRST), peers_on("quad", FOUR)
# The first stage has what is certain to be ready: SGLang as it ships, and what compiles in half a minute. SGLang's
# compilation tries many kernels for every product, and takes minutes.
PEERS_OF_ONE = (
    beside(
        "peers_of_one",
        peer("one_sglang", "sglang", ONE, 1024, 2048),
        peer("one_vllm_omni", "vllm-omni", ONE, 1024, 2048),
        ours("one_beside_peers", ONE, 1024, 2048),
        limit_s=200,
    ),
    beside(
        "peers_of_one_other_way",
        peer("one_sglang_blocks", "sglang-blocks", ONE, 1024, 2048),
        peer("one_vllm_omni_eager", "vllm-omni-eager", ONE, 1024, 2048),
        ours("one_beside_the_other_way", ONE, 1024, 2048),
        limit_s=260,
    ),
    beside(
        "diffusers_of_one",
        peer("one_diffusers", "blocks", ONE, 1024, 2048),
        ours("one_beside_diffusers", ONE, 1024, 2048),
        limit_s=100,
    ),
    beside(  # each in the float8 that it offers, and in the form that is ready soonest
        "fp8_of_one",
        peer("fp8_of_one_sglang", "sglang", ONE, 1024, 2048, precision=FP8),
        peer("fp8_of_one_vllm-omni", "vllm-omni", ONE, 1024, 2048, precision=FP8),
        ours("beside_fp8_of_one", ONE, 1024, 2048, precision=FP8),
        limit_s=200,
    ),
    beside(
        "sglang_compiled_of_one",
        peer("one_sglang_compiled", "sglang-compiled", ONE, 1024),
        ours("one_beside_sglang_compiled", ONE),
        limit_s=400,
    ),
)

MAKERS = ("vllm-omni", "sglang", "ours")
MODELS = (
    (150, "klein", "FLUX.2-klein-4B"),
    (150, "z_image", "Z-Image-Turbo"),
    (150, "qwen", "Qwen-Image", "--branches", "2"),
    (240, "wan", "Wan2.2-I2V-A14B", "--repeats", "7"),
    (330, "cosmos", "Cosmos3-Nano", "--repeats", "7"),
    (300, "flux2", "FLUX.2-dev"),
)
"""Models that peers have too. On GPUs of 80 GB a large module waits in the host's memory while vLLM-Omni has its turn:
64 GB a GPU for the last."""
A_BRANCH_EACH = "guidance"
FEW_KEY_HEADS = ("Cosmos3-Nano",)
"""Models whose keys and values are small beside their queries."""


def models_on(word: str, gpus: tuple[int, ...], *makers: str) -> tuple[Stage, ...]:
    """Return a stage for each model: one process a GPU, maker by maker."""
    return tuple(
        alone(
            f"peers_of_{name}{word}", model, *options, *_strategies(model, options, len(gpus)), "--makers", *makers,
            module=MODEL_STEP, gpus=gpus, min_gpus=len(gpus), limit_s=limit_s,
        )
        for limit_s, name, model, *options in MODELS
    )  # fmt: skip


def _strategies(model: str, options: list[str], num_gpus: int) -> tuple[str, ...]:
    if num_gpus == 1:
        return ()
    if model in FEW_KEY_HEADS:
        return ("--strategies", "ulysses", "allgather_kv")
    return ("--strategies", "ulysses", A_BRANCH_EACH) if "--branches" in options else ()


def pair(name: str, model: str, maker: str, *options: str) -> Run:
    """Return a run of ``model`` by one maker on the first two GPUs, with a process a GPU."""
    return Run(name=f"pair_{name}", module=MODEL_STEP, arguments=(model, "--makers", maker, *options), gpus=FIRST)


FEW = ("--repeats", "3")
GUIDED = (*FEW, "--branches", "2")
MODELS_OF_ONE = models_on("", ONE, "diffusers", *MAKERS)
MODELS_OF_A_PAIR = (
    beside("flux2_pair", pair("flux2", "FLUX.2-dev", "ours"), limit_s=150),
    beside(
        "wan_pair",
        pair("wan", "Wan2.2-I2V-A14B", "ours", *GUIDED, "--strategies", A_BRANCH_EACH),
        pair("wan_diffusers", "Wan2.2-I2V-A14B", "diffusers", *GUIDED),
        limit_s=240,
    ),
    beside(
        "cosmos_pair",
        pair("cosmos", "Cosmos3-Nano", "ours", *GUIDED, "--strategies", A_BRANCH_EACH),
        pair("ltx2", "LTX-2", "ours"),
        limit_s=240,
    ),
    beside(
        "ltx2_pair",
        pair("ltx2_diffusers", "LTX-2", "diffusers"),
        pair("hunyuan", "HunyuanVideo-1.5-480p_t2v", "ours", *FEW),
        limit_s=240,
    ),
    *models_on("_pair", FIRST, *MAKERS),
)
"""The runs of one stage fit into GPUs of 80 GB together. diffusers has no plan for Cosmos 3 and HunyuanVideo 1.5, and a
process in which it has divided a model can time no other maker."""
MODELS_OF_FOUR = models_on("_quad", FOUR, *MAKERS)

OF_HOST = {
    1: (*PEERS_OF_ONE[:-1], *MODELS_OF_ONE, PEERS_OF_ONE[-1]),
    2: (*PEERS_OF_A_PAIR, *MODELS_OF_A_PAIR, *PEERS_OF_ONE),
    4: (*PEERS_OF_FOUR[:4], *MODELS_OF_FOUR, *PEERS, *PEERS_OF_FOUR[4:], *PEERS_OF_A_PAIR),
}
"""Stages beside peers by the number of GPUs."""


def stages_of_host(num_gpus: int) -> tuple[Stage, ...]:
    """Return the stages beside peers for that many GPUs, most important first. ValueError without any."""
    fitting = [size for size in OF_HOST if size <= num_gpus]
    if not fitting:
        raise ValueError(f"peers need a GPU, and this host has {num_gpus}")
    return OF_HOST[max(fitting)]


STAGES = (
    alone("kernels", "cuda", module=KERNEL_CHECK, gpus=ONE, writes_json=False, limit_s=60),
    alone("goals", limit_s=90),
    *PEERS,
    alone("variants", "bf16/ulysses", "fp8/ulysses", "--skip", "uncaptured", *PROJECTS, limit_s=150, min_gpus=2),
    alone("strategies", "allgather_kv", "/ring", "hybrid", limit_s=60, min_gpus=2),
    alone(
        "exact", "FLUX.1-dev", "--exact", "--size", "496x496", *FEW, "--makers", "eager", "ours compiled", "ours",
        "--strategies", "ulysses", "allgather_kv", "ring", "hybrid", "tensor",
        module=MODEL_STEP, limit_s=150, min_gpus=2,
    ),
    alone("wan", "Wan2.1-T2V-14B", *FEW, "--makers", "ours", module=MODEL_STEP, limit_s=230),
    alone("single", "1024/w1/", "2048/w1", "--skip", *PROJECTS, gpus=ONE, limit_s=130),
    alone("profile", "--profile", "--only", *PROFILED, limit_s=90),
    *PEERS_OF_FOUR,
    *PEERS_OF_A_PAIR,
    *PEERS_OF_ONE,
    *MODELS_OF_ONE,
    *MODELS_OF_A_PAIR,
    *MODELS_OF_FOUR,
    *BEST,
    *BEST_REST,
)  # fmt: skip

NAMED: dict[str, tuple[Stage, ...]] = {
    **{stage.name: (stage,) for stage in STAGES},
    "best": BEST,
    "best_rest": BEST_REST,
}
"""Stages by their names, and by the names of lists."""


def stages_named(names: Iterable[str]) -> list[Stage]:
    return [stage for name in names for stage in NAMED[name]]
