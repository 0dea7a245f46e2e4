"""Peers beside Troupe on the same GPUs, for hosts of one, two and four."""

from __future__ import annotations

from benchmarks.denoise_step.model_stages import MODELS_OF_A_PAIR, MODELS_OF_FOUR, MODELS_OF_ONE
from benchmarks.denoise_step.stage import BF16, FIRST, FOUR, FP8, LAST, ONE, Stage, alone, beside, ours, peer

# Each run holds the whole model on its GPUs, and two of them are what 80 GB have room for: diffusers' ring on four has
# a stage of its own below. On four the goals' own stage is what these stand beside; on 2 ranks their GPUs are cooler
# than there, so Troupe takes its turn with them.
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
    """By importance. Each peer has a stage of its own: three copies of the model, of which vLLM-Omni takes two for a
    while, are what GPUs of 80 GB have room for."""
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
    """What names carry that 1024 is not in."""
    return "" if 1024 in sides else f"_{sides[0]}"


PEERS_OF_A_PAIR, PEERS_OF_FOUR = peers_on("pair", FIRST), peers_on("quad", FOUR)
# The first has what is certain to be ready: SGLang as it ships, and what compiles in half a minute. SGLang's
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
    beside(  # each in the float8 that it offers, and in the form that takes it least time to be ready
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
ATTENTION = alone("attention", module="benchmarks.denoise_step.attention", gpus=ONE, limit_s=100)
OF_HOST = {
    1: (*PEERS_OF_ONE[:-1], *MODELS_OF_ONE, ATTENTION, PEERS_OF_ONE[-1]),
    2: (*PEERS_OF_A_PAIR, *MODELS_OF_A_PAIR, *PEERS_OF_ONE, ATTENTION),
    4: (*PEERS_OF_FOUR[:4], *MODELS_OF_FOUR, *PEERS, *PEERS_OF_FOUR[4:], *PEERS_OF_A_PAIR, ATTENTION),
}
"""By the number of GPUs."""


def stages_of_host(num_gpus: int) -> tuple[Stage, ...]:
    """Returns what a host of so many GPUs is asked for, most important first; ValueError for one without any."""
    fitting = [size for size in OF_HOST if size <= num_gpus]
    if not fitting:
        raise ValueError(f"peers need a GPU, and this host has {num_gpus}")
    return OF_HOST[max(fitting)]
