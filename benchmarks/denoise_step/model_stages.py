"""Published transformers beside other makers' on the same GPUs, for hosts of one, two and four."""

from __future__ import annotations

from benchmarks.denoise_step.stage import FIRST, FOUR, ONE, Run, Stage, alone, beside

MODEL_STEP = "benchmarks.model_step"

PEERS = ("vllm-omni", "sglang", "ours")
BESIDE_PEERS = (
    (150, "klein", "FLUX.2-klein-4B"),
    (150, "z_image", "Z-Image-Turbo"),
    (150, "qwen", "Qwen-Image", "--branches", "2"),
    (240, "wan", "Wan2.2-I2V-A14B", "--repeats", "7"),
    (330, "cosmos", "Cosmos3-Nano", "--repeats", "7"),
    (300, "flux2", "FLUX.2-dev"),
)
"""On GPUs of 80 GB a large module waits in the host's memory while vLLM-Omni has its turn: 64 GB a GPU for the last."""
A_BRANCH_EACH = "guidance"
FEW_KEY_HEADS = ("Cosmos3-Nano",)
"""Their keys and values are little beside their queries."""


def peers_of_models(word: str, gpus: tuple[int, ...], *makers: str) -> tuple[Stage, ...]:
    """Each model in one process a GPU, maker by maker."""
    return tuple(
        alone(
            f"peers_of_{name}{word}", model, *options, *_strategies(model, options, len(gpus)), "--makers", *makers,
            module=MODEL_STEP, gpus=gpus, min_gpus=len(gpus), limit_s=limit_s,
        )
        for limit_s, name, model, *options in BESIDE_PEERS
    )  # fmt: skip


def _strategies(model: str, options: list[str], num_gpus: int) -> tuple[str, ...]:
    if num_gpus == 1:
        return ()
    if model in FEW_KEY_HEADS:
        return ("--strategies", "ulysses", "allgather_kv")
    return ("--strategies", "ulysses", A_BRANCH_EACH) if "--branches" in options else ()


def pair(name: str, model: str, maker: str, *options: str) -> Run:
    """``model`` by one maker on the first two GPUs, in a process a GPU."""
    return Run(name=f"pair_{name}", module=MODEL_STEP, arguments=(model, "--makers", maker, *options), gpus=FIRST)


FEW = ("--repeats", "3")
GUIDED = (*FEW, "--branches", "2")
MODELS_OF_ONE = peers_of_models("", ONE, "diffusers", *PEERS)
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
    *peers_of_models("_pair", FIRST, *PEERS),
)
"""What is in one stage fits into GPUs of 80 GB together; diffusers has no plan for Cosmos 3 and HunyuanVideo 1.5, and a
process that it has divided a model in can time no other maker."""
MODELS_OF_FOUR = peers_of_models("_quad", FOUR, *PEERS)
