"""Commands without a server's key: build-engine, calibrate, estimate, stop."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from deployments.cli.errors import errors
from deployments.names import own_version

RanksOption = Annotated[int, typer.Option("--ranks", help="Ranks that work on one step.")]

SecondStageOption = Annotated[
    str, typer.Option(help="Noise levels of a second pass, such as 0.9,0.7,0.4 (models with a latent upsampler).")
]


def build_engine(
    model: Annotated[
        str, typer.Option(help="A shipped model, a diffusers directory, a hub id, or a published model's name.")
    ],
    num_ranks: RanksOption = 1,
    strategy: Annotated[
        str, typer.Option(help="How a step is divided: ulysses, allgather_kv, hybrid, tensor ...")
    ] = "auto",
    precision: Annotated[str, typer.Option(help="Precision of linears: native, fp8-static or int8-static.")] = "auto",
    target: Annotated[str, typer.Option(help="Compute capability, such as sm90; auto is this machine's GPU.")] = "auto",
    size: Annotated[list[str] | None, typer.Option(help="WIDTHxHEIGHT[xFRAMES]; several share an engine file.")] = None,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16, as in the configuration.")] = "auto",
    weights: Annotated[str, typer.Option(help="inputs (one file for all fine-tunes) or constants.")] = "inputs",
    cache_dir: Annotated[Path | None, typer.Option(help="Folder of engine files; ~/.cache/troupe/engines.")] = None,
    calibrate: Annotated[bool, typer.Option("--calibrate", help="First measure activations.")] = False,
    prompts: Annotated[Path | None, typer.Option(help="Prompts to calibrate with, one per line.")] = None,
    weight_streaming: Annotated[bool, typer.Option("--weight-streaming", help="Weights may stay on the host.")] = False,
    strip_weights: Annotated[bool, typer.Option("--strip-weights", help="An engine file without its weights.")] = False,
) -> None:
    """Build TensorRT engine files ahead of time, and report their contents."""
    from deployments.cli.build import EngineBuildOptions, build

    with errors():
        build(
            EngineBuildOptions(
                model=model,
                strategy=strategy,
                num_ranks=num_ranks,
                precision=precision,
                target=target,
                sizes=tuple(size or ()),
                dtype=dtype,
                weights=weights,
                cache_dir=cache_dir,
                calibrate=calibrate,
                prompts=prompts,
                weight_streaming=weight_streaming,
                strip_weights=strip_weights,
            )
        )


def calibrate(
    model: Annotated[str, typer.Option(help="A shipped model, a diffusers directory, or a hub id.")],
    out: Annotated[Path, typer.Option(help="The file of scales to write (JSON).")],
    prompts: Annotated[Path | None, typer.Option(help="Prompts to calibrate with, one per line.")] = None,
    size: Annotated[str | None, typer.Option(help="WIDTHxHEIGHT[xFRAMES]; the model's default.")] = None,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
) -> None:
    """Measure fixed scales for the torch engine's fp8-static and int8-static, over all steps of some prompts."""
    from deployments.cli.build import calibrate as run

    with errors():
        run(model, out, prompts, size, dtype)


def estimate(
    model: Annotated[str, typer.Option(help="A shipped model, a folder, a published model's name, or a hub id.")],
    num_ranks: RanksOption = 1,
    size: Annotated[str | None, typer.Option(help="WIDTHxHEIGHT in pixels; the model's default.")] = None,
    frames: Annotated[int | None, typer.Option(help="Frames of a clip; the model's default.")] = None,
    steps: Annotated[int | None, typer.Option(help="Denoising steps; the model's default.")] = None,
    guidance: Annotated[
        bool | None, typer.Option("--guidance/--no-guidance", help="True guidance: two branches a step.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    precision: Annotated[str, typer.Option(help="Precision of linears: native, fp8 or int8.")] = "native",
    attention: Annotated[str, typer.Option(help="Precision of attention: auto or fp8.")] = "auto",
    machine: Annotated[str | None, typer.Option(help="h200, h100, l40s, rtx-4090 ..., or a file of --measure.")] = None,
    memory: Annotated[float | None, typer.Option(help="GiB of each GPU; the machine's.")] = None,
    second_stage_sigmas: SecondStageOption = "",
    measure: Annotated[bool, typer.Option("--measure", help="Measure this machine now, and save the figures.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document instead of a table.")] = False,
) -> None:
    """Estimate the seconds of a picture or clip, memory of all parts, and each strategy for a step."""
    from deployments.cli.estimate import print_estimate
    from deployments.sizing.estimate import EstimateOptions

    with errors():
        options = EstimateOptions(
            model=model,
            num_ranks=num_ranks,
            size=size,
            num_frames=frames,
            guided=guidance,
            dtype=dtype,
            precision=precision,
            attention=attention,
            machine=machine,
            measure=measure,
            num_steps=steps,
            memory_gib=memory,
            second_stage_sigmas=tuple(map(float, filter(None, second_stage_sigmas.split(",")))),
        )
        print_estimate(options, as_json=as_json)


def print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"troupe {own_version()}")
        raise typer.Exit


def stop(
    port: Annotated[int | None, typer.Option(help="Port of the server, if several run here.")] = None,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for its end.")] = 120.0,
) -> None:
    """Stop a server that `troupe serve` started here; running requests have door.drain_s to finish."""
    from deployments.cli.operation import stop as run

    with errors():
        run(port, timeout)
