"""Published transformers beside other makers' on the same GPUs, for hosts of one and two."""

from __future__ import annotations

from benchmarks.denoise_step.stage import FIRST, ONE, Run, alone, beside

MODEL_STEP = "benchmarks.model_step"

PEERS = ("vllm-omni", "sglang", "ours")
BESIDE_PEERS = (
    (150, "klein", "FLUX.2-klein-4B"),
    (150, "z_image", "Z-Image-Turbo"),
    (150, "qwen", "Qwen-Image", "--branches", "2"),
    (150, "wan", "Wan2.2-I2V-A14B", "--repeats", "3"),
    (300, "cosmos", "Cosmos3-Nano", "--repeats", "2"),
    (300, "flux2", "FLUX.2-dev", "--repeats", "5"),
)
"""The last wants a GPU of 141 GB: a peer's copy is made beside the 64 GB of the module."""
MODELS_OF_ONE = tuple(
    alone(
        f"peers_of_{name}", model, *options, "--makers", "diffusers", *PEERS,
        module=MODEL_STEP, gpus=ONE, limit_s=limit_s,
    )
    for limit_s, name, model, *options in BESIDE_PEERS
)  # fmt: skip
"""Each in one process, maker by maker."""


def pair(name: str, model: str, maker: str, *options: str) -> Run:
    """``model`` by one maker on the first two GPUs, in a process a GPU."""
    return Run(name=f"pair_{name}", module=MODEL_STEP, arguments=(model, "--makers", maker, *options), gpus=FIRST)


FEW = ("--repeats", "3")
GUIDED = (*FEW, "--branches", "2")
A_BRANCH_EACH = (*GUIDED, "--strategy", "guidance")
MODELS_OF_A_PAIR = (
    beside("flux2_pair", pair("flux2", "FLUX.2-dev", "ours"), limit_s=150),
    beside(
        "wan_pair",
        pair("wan", "Wan2.2-I2V-A14B", "ours", *A_BRANCH_EACH),
        pair("wan_diffusers", "Wan2.2-I2V-A14B", "diffusers", *GUIDED),
        limit_s=240,
    ),
    beside(
        "cosmos_pair",
        pair("cosmos", "Cosmos3-Nano", "ours", *A_BRANCH_EACH),
        pair("ltx2", "LTX-2", "ours"),
        limit_s=240,
    ),
    beside(
        "ltx2_pair",
        pair("ltx2_diffusers", "LTX-2", "diffusers"),
        pair("hunyuan", "HunyuanVideo-1.5-480p_t2v", "ours", *FEW),
        limit_s=240,
    ),
    *(
        alone(
            f"peers_of_{name}_pair", model, *options, "--makers", *PEERS,
            module=MODEL_STEP, gpus=FIRST, min_gpus=2, limit_s=limit_s,
        )
        for limit_s, name, model, *options in BESIDE_PEERS
    ),
)  # fmt: skip
"""What is in one stage fits into GPUs of 80 GB together; diffusers has no plan for Cosmos 3 and HunyuanVideo 1.5, and a
process that it has divided a model in can time no other maker."""
