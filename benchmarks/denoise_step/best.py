"""Stages of ``benchmarks.denoise_step.gpu`` on a host of four GPUs: Troupe beside peers at their best setting.

Most important first. ``BEST`` fits nine minutes, the checks of ``benchmarks.peers.run`` included. ``BEST_REST`` takes
fifteen: name its stages in two calls. In each process what may hang comes last: steps of peers that are captured whole.
"""

from __future__ import annotations

from collections.abc import Iterable

from benchmarks.denoise_step.stage import (
    BF16,
    DEFAULT,
    FIRST,
    FOUR,
    FP8,
    LAST,
    MODEL_STEP,
    Run,
    Stage,
    at_once,
    case_name,
)  # fmt: skip

KLEIN, Z_IMAGE, QWEN, FLUX3 = "FLUX.2-klein-4B", "Z-Image-Turbo", "Qwen-Image", "flux-3-image-klein"
OURS, EAGER, CAPTURED = DEFAULT, "uncaptured", ""
"""Options of cases."""
HEAT_S = "2"
OF_SGLANG = ("sglang", "sglang-graphs", "sglang-captured")
OF_VLLM_OMNI = ("vllm-omni", "vllm-omni-captured")
OF_DIFFUSERS = ("diffusers", "diffusers-captured")
ALL = (*OF_DIFFUSERS, "ours", *OF_SGLANG, *OF_VLLM_OMNI)


def beside_sglang(sides: Iterable[int], gpus: tuple[int, ...], precision: str = BF16) -> list[str]:
    """Return the cases of Troupe, then of SGLang: as it ships, with its graphs, captured whole."""
    makers = (("fast", OURS), ("sglang", EAGER), ("sglang-graphs", EAGER), ("sglang", CAPTURED))
    return [case_name(maker, side, gpus, option, precision) for maker, option in makers for side in sides]


def both(maker: str, sides: Iterable[int], gpus: tuple[int, ...], precision: str = BF16) -> list[str]:
    """Return the cases of a peer: as it ships, and captured whole."""
    return [case_name(maker, side, gpus, option, precision) for option in (EAGER, CAPTURED) for side in sides]


def flux(name: str, gpus: tuple[int, ...], *cases: str) -> Run:
    return Run(name=f"best_{name}", arguments=("--only", *cases), gpus=gpus)


def models(name: str, gpus: tuple[int, ...], *words: str, makers: Iterable[str]) -> Run:
    arguments = (*words, "--heat-s", HEAT_S, "--makers", *makers)
    return Run(name=f"best_{name}", module=MODEL_STEP, arguments=arguments, gpus=gpus)


def stage(*runs: Run, likely_s: int, limit_s: int) -> Stage:
    """Return a stage with the name of its first run."""
    return at_once(runs[0].name, *runs, likely_s=likely_s, limit_s=limit_s)


GUIDED = ("--branches", "2", "--strategies", "guidance")
BOTH_SIDES = (1024, 2048)
BEST = (
    stage(flux("quad", FOUR, *beside_sglang(BOTH_SIDES, FOUR)), likely_s=100, limit_s=160),
    stage(flux("quad_diffusers", FOUR, *both("diffusers-ulysses", BOTH_SIDES, FOUR)), likely_s=60, limit_s=100),
    stage(models("quad_models", FOUR, KLEIN, Z_IMAGE, makers=("ours", *OF_SGLANG)), likely_s=75, limit_s=130),
    stage(models("quad_qwen", FOUR, QWEN, *GUIDED, makers=("ours", *OF_SGLANG)), likely_s=60, limit_s=110),
    stage(
        flux("pair", FIRST, *beside_sglang(BOTH_SIDES, FIRST)),
        models("pair_models", LAST, KLEIN, Z_IMAGE, makers=("ours", *OF_SGLANG)),
        likely_s=85,
        limit_s=140,
    ),
    stage(
        flux(
            "one",
            (0,),
            *beside_sglang(BOTH_SIDES, (0,)),
            *beside_sglang((1024,), (0,), FP8),
            *both("blocks", (1024,), (0,)),
        ),
        models("one_klein", (1,), KLEIN, makers=ALL),
        models("one_z_image", (2,), Z_IMAGE, makers=ALL),
        models("one_qwen", (3,), QWEN, "--branches", "2", makers=("ours", *OF_SGLANG)),
        likely_s=130,
        limit_s=190,
    ),
)
BEST_REST = (
    stage(models("quad_flux3", FOUR, FLUX3, makers=("ours", *OF_SGLANG)), likely_s=55, limit_s=110),
    stage(flux("quad_fp8", FOUR, *beside_sglang(BOTH_SIDES, FOUR, FP8)), likely_s=95, limit_s=160),
    stage(flux("quad_vllm_omni", FOUR, *both("vllm-omni", BOTH_SIDES, FOUR)), likely_s=80, limit_s=140),
    stage(
        flux("pair_fp8", FIRST, *beside_sglang(BOTH_SIDES, FIRST, FP8)),
        models("pair_qwen", LAST, QWEN, *GUIDED, makers=("ours", *OF_SGLANG)),
        likely_s=95,
        limit_s=150,
    ),
    stage(
        flux("pair_diffusers", FIRST, *both("diffusers-ulysses", BOTH_SIDES, FIRST)),
        flux("pair_vllm_omni", LAST, *both("vllm-omni", BOTH_SIDES, LAST)),
        likely_s=80,
        limit_s=130,
    ),
    stage(
        models("pair_flux3", FIRST, FLUX3, makers=("ours", *OF_SGLANG)),
        models("pair_models_vllm_omni", LAST, KLEIN, Z_IMAGE, makers=OF_VLLM_OMNI),
        likely_s=80,
        limit_s=130,
    ),
    stage(
        models("quad_models_vllm_omni", FOUR, KLEIN, Z_IMAGE, makers=OF_VLLM_OMNI),
        likely_s=75,
        limit_s=130,
    ),
    stage(
        models("one_flux3", (0,), FLUX3, makers=(*OF_DIFFUSERS, "ours", *OF_SGLANG)),
        flux("one_reduced", (1,), case_name("diffusers-reduce-overhead", 1024, (1,), EAGER)),
        flux("one_vllm_omni", (2,), *both("vllm-omni", BOTH_SIDES, (2,))),
        flux("one_vllm_omni_fp8", (3,), *both("vllm-omni", BOTH_SIDES, (3,), FP8)),
        likely_s=120,
        limit_s=180,
    ),
    stage(
        flux("quad_sglang_blocks", FOUR, *both("sglang-blocks", (1024,), FOUR)),
        likely_s=220,
        limit_s=350,
    ),
)
