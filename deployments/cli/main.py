"""Entry point of the ``troupe`` command. Heavy imports happen inside the commands, so that ``--help`` is instant."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from deployments.cli.ending import terminate
from deployments.cli.errors import errors
from deployments.cli.renamed import rename_command, renamed_option
from deployments.settings import ON_ONE_MACHINE, set_defaults

app = typer.Typer(no_args_is_help=True, add_completion=False, help=__doc__, pretty_exceptions_enable=False)

ConfigOption = Annotated[str, typer.Option("--config", help="A config file, or the name of a shipped one.")]
UrlOption = Annotated[str, typer.Option("--url", help="A running server; without it one is started for the purpose.")]
RanksOption = Annotated[int, typer.Option("--ranks", help="Ranks that work on one step.")]
KeyOption = Annotated[Path | None, typer.Option("--api-key-file", help="The server's key; else TROUPE_API_KEY.")]
OldKeyOption = Annotated[str | None, renamed_option("--api-key", "--api-key-file, or TROUPE_API_KEY outside,")]


@app.command()
def generate(
    prompt: str,
    out: Annotated[Path, typer.Option(help="PNG, JPEG, WebP or MP4 by its ending.")],
    model: Annotated[str | None, typer.Option(help="Served model; the first one by default.")] = None,
    size: Annotated[str | None, typer.Option(help="WIDTHxHEIGHT in pixels.")] = None,
    steps: Annotated[int | None, typer.Option(help="Denoising steps.")] = None,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same bytes.")] = None,
    negative_prompt: Annotated[
        str | None, typer.Option(help="What to keep out; needs a --true-cfg-scale above 1.")
    ] = None,
    guidance_scale: Annotated[float | None, typer.Option(help="Distilled guidance, of models that have it.")] = None,
    true_cfg_scale: Annotated[float | None, typer.Option(help="Classifier-free guidance; 1 turns it off.")] = None,
    config: ConfigOption = "laptop",
    url: UrlOption = "",
    api_key_file: KeyOption = None,
    api_key: OldKeyOption = None,
) -> None:
    """A picture or a clip from words."""
    from deployments.cli.generate import generate as run

    given = {
        "model": model,
        "size": size,
        "num_inference_steps": steps,
        "seed": seed,
        "negative_prompt": negative_prompt,
        "guidance_scale": guidance_scale,
        "true_cfg_scale": true_cfg_scale,
    }
    options = {name: value for name, value in given.items() if value is not None}
    with _client(config, url, api_key_file) as client:
        run(client, prompt, out, options)


@app.command()
def serve(
    config: Annotated[str, typer.Argument(help="A config file, or the name of a shipped one.")] = "laptop",
    host: Annotated[str | None, typer.Option(help="Address to bind; 127.0.0.1 unless the config says else.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to bind.")] = None,
) -> None:
    """Serve until Ctrl-C or SIGTERM; then what is under way has a while to end (the configuration's door.drain_s)."""
    from deployments.cli.progress import console, started
    from deployments.cli.serving import load_config

    chosen: dict[str, Any] = {name: value for name, value in (("host", host), ("port", port)) if value is not None}
    with errors(), started(load_config(config).with_http(**chosen)) as url:
        console.print(f"Serving at {url} (docs at {url}/docs). Ctrl-C ends it.", highlight=False)
        signal.pause()


@app.command()
def door(
    to: Annotated[str, typer.Option("--to", help="HOST:PORT of the Serve proxy that it stands in front of.")],
    host: Annotated[str, typer.Option(help="Address to bind.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to bind.")] = 8080,
    config: ConfigOption = "laptop",
) -> None:
    """Limits and time-outs in front of an application that `serve deploy` started; `troupe serve` has them already."""
    from deployments.cli.door import stand

    with errors():
        stand(to, host, port, config)


@app.command()
def models(
    url: UrlOption = "",
    api_key_file: KeyOption = None,
    api_key: OldKeyOption = None,
    config: ConfigOption = "laptop",
) -> None:
    """Served models with their defaults: of a running server, or those a config would serve."""
    from deployments.cli.models import print_models
    from deployments.settings import Settings

    with errors():
        print_models(url, Settings().own_key(api_key_file), config)


@app.command()
def doctor(
    tensorrt: Annotated[
        bool, typer.Option("--tensorrt", help="Prove what TensorRT engines can do on this host.")
    ] = False,
    model: Annotated[
        str | None, typer.Option(help="With --tensorrt: whose engine is tried; the config's first by default.")
    ] = None,
    config: Annotated[
        str | None, typer.Option("--config", help="Whether this one can run here: a file, or a shipped one's name.")
    ] = None,
) -> None:
    """What is installed, which devices and which NCCL there are, what can run here and what cannot and why."""
    from deployments.cli.doctor import first_model, print_proofs, print_report

    with errors():
        fine = print_proofs(model or first_model(config or "laptop")) if tensorrt else print_report(config)
    raise typer.Exit(0 if fine else 1)


@app.command()
def build_engine(
    model: Annotated[
        str, typer.Option(help="A shipped model, a diffusers directory, a hub id, or a published model's name.")
    ],
    num_ranks: RanksOption = 1,
    strategy: Annotated[
        str, typer.Option(help="How they divide it: ulysses, allgather_kv, hybrid, tensor ...")
    ] = "auto",
    precision: Annotated[str, typer.Option(help="Of the linears: native, fp8-static or int8-static.")] = "auto",
    target: Annotated[str, typer.Option(help="Compute capability, such as sm90; auto is this machine's GPU.")] = "auto",
    size: Annotated[list[str] | None, typer.Option(help="WIDTHxHEIGHT[xFRAMES]; several share an engine file.")] = None,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16: as the model will be loaded.")] = "auto",
    weights: Annotated[str, typer.Option(help="inputs (one file for all fine-tunes) or constants.")] = "inputs",
    cache_dir: Annotated[Path | None, typer.Option(help="Folder of engine files; ~/.cache/troupe/engines.")] = None,
    calibrate: Annotated[bool, typer.Option("--calibrate", help="First measure activations.")] = False,
    prompts: Annotated[Path | None, typer.Option(help="Prompts to calibrate with, one a line.")] = None,
    weight_streaming: Annotated[bool, typer.Option("--weight-streaming", help="Weights may stay on the host.")] = False,
    strip_weights: Annotated[bool, typer.Option("--strip-weights", help="An engine file without its weights.")] = False,
    width: Annotated[str | None, renamed_option("--width", "--ranks")] = None,
) -> None:
    """TensorRT engine files ahead of time; says what they hold."""
    from deployments.cli.build_engine import Order, build

    with errors():
        build(
            Order(
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


@app.command()
def calibrate(
    model: Annotated[str, typer.Option(help="A shipped model, a diffusers directory, or a hub id.")],
    out: Annotated[Path, typer.Option(help="The file of scales to write (JSON).")],
    prompts: Annotated[Path | None, typer.Option(help="Prompts to calibrate with, one a line.")] = None,
    size: Annotated[str | None, typer.Option(help="WIDTHxHEIGHT[xFRAMES]; the model's default.")] = None,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
) -> None:
    """Fixed scales for the torch engine's fp8-static and int8-static, from all steps of some prompts."""
    from deployments.cli.calibrate import calibrate as run

    with errors():
        run(model, out, prompts, size, dtype)


@app.command()
def estimate(
    model: Annotated[str, typer.Option(help="A shipped model, a folder, a published model's name, or a hub id.")],
    num_ranks: RanksOption = 1,
    size: Annotated[str | None, typer.Option(help="WIDTHxHEIGHT in pixels; the model's default.")] = None,
    frames: Annotated[int | None, typer.Option(help="Frames of a clip; the model's default.")] = None,
    guidance: Annotated[
        bool | None, typer.Option("--guidance/--no-guidance", help="True guidance: two branches a step.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    precision: Annotated[str, typer.Option(help="Of the linears: native, fp8 or int8.")] = "native",
    machine: Annotated[str | None, typer.Option(help="A known machine, or a file that --measure left.")] = None,
    measure: Annotated[bool, typer.Option("--measure", help="Measure this machine now, and keep the figures.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document instead of a table.")] = False,
    gpus: Annotated[str | None, renamed_option("--gpus", "--ranks")] = None,
) -> None:
    """Each way to divide a step over some ranks, with predicted time and memory, and which is chosen and why."""
    from deployments.cli.estimate import EstimateOptions, print_estimate

    with errors():
        options = EstimateOptions(
            model=model,
            num_ranks=num_ranks,
            size=size,
            num_frames=frames,
            guided=guidance,
            dtype=dtype,
            precision=precision,
            machine=machine,
            measure=measure,
        )
        print_estimate(options, as_json=as_json)


@app.command()
def demo(out: Annotated[Path, typer.Option(help="Directory for picture.png and clip.mp4.")] = Path("out")) -> None:
    """A picture and a clip through the real HTTP server, with the shipped models."""
    from deployments.cli.demo import demo as run

    with errors():
        run(out)


rename_command(app, "plan", "estimate")


@contextmanager
def _client(config: str, url: str, api_key_file: Path | None) -> Iterator[Any]:
    from deployments.cli.client import Client

    with errors():
        if url:  # a client alone: it starts without Ray and torch
            from deployments.settings import Settings

            with Client(url, Settings().own_key(api_key_file)) as client:
                yield client
        else:
            from deployments.cli.progress import started_for_itself
            from deployments.cli.serving import load_config

            with started_for_itself(load_config(config)) as own_url, Client(own_url) as client:
                yield client


def main() -> None:
    """SIGTERM ends like Ctrl-C, so that everything started is ended. Clusters that are started are this machine's."""
    signal.signal(signal.SIGTERM, terminate)
    set_defaults(ON_ONE_MACHINE)
    app()


if __name__ == "__main__":
    main()
