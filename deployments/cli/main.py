"""Entry point of the ``troupe`` command. Heavy imports are inside the commands, so that ``--help`` is instant."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from deployments.cli.commands import (
    build_engine,
    calibrate,
    estimate,
    print_version,
    stop,
)
from deployments.cli.errors import errors, terminate
from deployments.cli.request_lines import LogFormat
from deployments.settings import ON_ONE_MACHINE, set_defaults

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="Text-to-image and text-to-video on gangs of GPUs: a server and its clients.",
    pretty_exceptions_enable=False,
)

ConfigOption = Annotated[
    str,
    typer.Option(
        "--config", help="A config file, or the name of a shipped one, instead of a server; laptop if none runs here."
    ),
]
UrlOption = Annotated[
    str, typer.Option("--url", help="A running server; by default the one on this machine, unless --config is given.")
]
KeyOption = Annotated[Path | None, typer.Option("--api-key-file", help="The server's key; else TROUPE_API_KEY.")]
NegativeOption = Annotated[str | None, typer.Option(help="Things to avoid; needs a --true-cfg-scale above 1.")]
MASK_HELP = "Where to paint in --image or --video: transparent, or else white. Some models need it."
GUIDANCE_HELP = (
    "Scale of the model's guidance: distilled, or else classifier-free. With both kinds, it is the distilled one."
)
TRUE_CFG_HELP = (
    "Scale of classifier-free guidance: 1 turns it off, more takes twice the time. --negative-prompt needs it."
)
ImageOption = Annotated[list[Path] | None, typer.Option(help="An input picture; may be repeated.")]
VideoOption = Annotated[
    list[Path] | None, typer.Option(help="A clip to change, to go on from or to refer to; may be repeated.")
]
LoraOption = Annotated[list[str] | None, typer.Option(help="An adapter, NAME or NAME:SCALE; may be repeated.")]
CacheOption = Annotated[
    Literal["off", "conservative", "fast"] | None, typer.Option(help="Skip forwards of steps that hardly differ.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON document instead of a table.")]
RunningOption = Annotated[str, typer.Option("--url", help="A running server; by default the one on this machine.")]


@app.callback()
def troupe(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=print_version, is_eager=True)
    ] = False,
) -> None:
    pass


@app.command()
def generate(
    prompt: str,
    out: Annotated[Path, typer.Option(help="PNG, JPEG, WebP or MP4, by its extension.")],
    model: Annotated[str | None, typer.Option(help="Served model; by default the first that fits --out.")] = None,
    size: Annotated[str | None, typer.Option(help="WIDTHxHEIGHT in pixels.")] = None,
    steps: Annotated[int | None, typer.Option(help="Denoising steps.")] = None,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same bytes.")] = None,
    n: Annotated[int | None, typer.Option("--n", help="Number of pictures, in numbered files.")] = None,
    frames: Annotated[int | None, typer.Option(help="Frames of a clip.")] = None,
    fps: Annotated[int | None, typer.Option(help="Frames per second of a clip.")] = None,
    sound: Annotated[bool | None, typer.Option(help="Sound of a clip, if the model makes it.")] = None,
    enhance_prompt: Annotated[bool | None, typer.Option(help="Let a language model rewrite the prompt.")] = None,
    negative_prompt: NegativeOption = None,
    guidance_scale: Annotated[float | None, typer.Option(help=GUIDANCE_HELP)] = None,
    true_cfg_scale: Annotated[float | None, typer.Option(help=TRUE_CFG_HELP)] = None,
    lora: LoraOption = None,
    recipe: Annotated[str | None, typer.Option(help="Recipe of the model, by its name in /v1/models.")] = None,
    cache: CacheOption = None,
    image: ImageOption = None,
    mask: Annotated[Path | None, typer.Option(help=MASK_HELP)] = None,
    control_image: Annotated[Path | None, typer.Option(help="A picture to follow: edges, depths, a pose.")] = None,
    control_scale: Annotated[float | None, typer.Option(help="Weight of --control-image.")] = None,
    video: VideoOption = None,
    keep_audio: Annotated[bool | None, typer.Option(help="Keep the sound of --video.")] = None,
    strength: Annotated[float | None, typer.Option(help="Share of the picture or clip to repaint, up to 1.")] = None,
    layers: Annotated[int | None, typer.Option(help="Layers to split a picture into, in numbered files.")] = None,
    config: ConfigOption = "",
    url: UrlOption = "",
    api_key_file: KeyOption = None,
) -> None:
    """Make a picture or a clip from a prompt, with or without input files."""
    words = {"model": model, "size": size, "negative_prompt": negative_prompt, "lora": lora or None, "cache": cache}
    counts = {"num_inference_steps": steps, "seed": seed, "n": n, "num_frames": frames, "fps": fps, "layers": layers}
    others = {"enhance_prompt": enhance_prompt, "recipe": recipe, "strength": strength, "generate_sound": sound}
    scales = {"guidance_scale": guidance_scale, "true_cfg_scale": true_cfg_scale, "control_scale": control_scale}
    given = {"keep_audio": keep_audio, **words, **counts, **others, **scales}
    options = {name: value for name, value in given.items() if value is not None}
    files = {"images": image or (), "mask": mask, "control_image": control_image, "videos": video or ()}
    _generate((config, url, api_key_file), prompt, out, options, files)


def _generate(
    place: tuple[str, str, Path | None], prompt: str, out: Path, options: dict[str, Any], files: dict[str, Any]
) -> None:
    """Run the command on the server at ``place``; ``files`` are the fields of ``Inputs``."""
    from deployments.cli import generate as generating

    with errors():
        generating.check_out(out)
    inputs = generating.Inputs(**files)
    with _client(*place) as client:
        generating.generate(client, prompt, out, options, inputs)


@app.command()
def serve(
    config: Annotated[
        str, typer.Argument(help="A config file, the name of a shipped one, or a model: folder, file@base, hub id.")
    ] = "laptop",
    num_ranks: Annotated[int | None, typer.Option("--ranks", help="Ranks of a model's gang; all GPUs.")] = None,
    memory: Annotated[float | None, typer.Option(help="GiB of each GPU, which the model is made to fit.")] = None,
    allow_quantization: Annotated[
        bool, typer.Option("--allow-quantization", help="It may be quantised for --memory, if nothing lossless helps.")
    ] = False,
    host: Annotated[str | None, typer.Option(help="Address to bind; 127.0.0.1 unless the config says else.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to bind.")] = None,
    metrics_port: Annotated[int | None, typer.Option(help="Port of /metrics; 0 for none.")] = None,
    log_format: Annotated[LogFormat, typer.Option(help="Format of the line for each request.")] = LogFormat.plain,
    print_config: Annotated[bool, typer.Option("--print-config", help="Print the YAML and exit.")] = False,
) -> None:
    """Serve until Ctrl-C or SIGTERM; running requests then have door.drain_s of the configuration to finish."""
    from deployments.cli.configuration import config_for, to_yaml
    from deployments.cli.operation import announce
    from deployments.cli.preflight import warnings, with_metrics_port
    from deployments.cli.progress import console, started
    from deployments.cli.request_lines import logs_folder, show_requests

    chosen: dict[str, Any] = {name: value for name, value in (("host", host), ("port", port)) if value is not None}
    with errors():
        settings = config_for(config, num_ranks, memory, allow_quantization=allow_quantization).with_http(**chosen)
        if metrics_port is not None:
            settings = settings.with_metrics(metrics_port or None)
        if print_config:
            typer.echo(to_yaml(settings), nl=False)
            return
        settings = with_metrics_port(settings)
        for warning in warnings(settings):
            typer.echo(f"troupe: warning: {warning}", err=True)
        with started(settings, lambda url: announce(url, settings.app.metrics.url)) as url:
            console.print(f"Metrics: {settings.app.metrics.url or 'none'}")
            console.print(f"Serving at {url} (docs at {url}/docs). Ctrl-C ends it.")
            console.print(f"Logs of its processes: {logs_folder()}")
            show_requests(logs_folder(), log_format, typer.echo)
            signal.pause()


@app.command()
def door(
    to: Annotated[str, typer.Option("--to", help="HOST:PORT of the Serve proxy behind the door.")],
    host: Annotated[str, typer.Option(help="Address to bind.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to bind.")] = 8080,
    config: Annotated[str, typer.Option(help="The config of the application, or the name of a shipped one.")] = "",
) -> None:
    """Put limits and timeouts in front of an application of `serve deploy`; `troupe serve` has them already."""
    from deployments.cli.door import run_door

    with errors():
        run_door(to, host, port, config)


@app.command()
def models(
    url: UrlOption = "",
    api_key_file: KeyOption = None,
    config: ConfigOption = "",
    as_json: JsonOption = False,
) -> None:
    """List models with their defaults: those of a running server, or of a config."""
    from deployments.cli.show import print_models
    from deployments.settings import Settings

    with errors():
        url, config = _target(url, config)
        print_models(url, Settings().own_key(api_key_file), config, as_json=as_json)


@app.command()
def status(
    url: RunningOption = "",
    api_key_file: KeyOption = None,
    metrics_url: Annotated[str, typer.Option(help="Its metrics, unless `troupe serve` started it here.")] = "",
    as_json: JsonOption = False,
) -> None:
    """Show whether a running server is ready, with its models, gangs, and running and waiting jobs."""
    from deployments.cli.operation import print_status
    from deployments.settings import Settings

    with errors():
        is_ready = print_status(url, Settings().own_key(api_key_file), metrics_url, as_json=as_json)
    raise typer.Exit(0 if is_ready else 1)


@app.command()
def clips(
    url: RunningOption = "",
    api_key_file: KeyOption = None,
    limit: Annotated[int, typer.Option(help="Maximum number, the newest first.")] = 20,
    delete: Annotated[list[str] | None, typer.Option(help="Delete the clip with this id, even a running one.")] = None,
    download: Annotated[str, typer.Option(help="Download the clip with this id to --out.")] = "",
    out: Annotated[Path | None, typer.Option(help="The file; ID.mp4 by default.")] = None,
    as_json: JsonOption = False,
) -> None:
    """List the clips of a running server, download one, or delete some."""
    from deployments.cli.operation import delete_clips, download_clip, print_clips
    from deployments.settings import Settings

    with errors():
        api_key = Settings().own_key(api_key_file)
        if delete:
            delete_clips(url, api_key, delete)
        if download:
            download_clip(url, api_key, download, out or Path(f"{download}.mp4"))
        if not delete and not download:
            print_clips(url, api_key, limit, as_json=as_json)


@app.command()
def show(
    files: Annotated[list[Path], typer.Argument(help="PNG, JPEG, WebP or MP4.")], as_json: JsonOption = False
) -> None:
    """Show the settings that pictures and clips were made with. Exit code 1 if a file has none."""
    from deployments.cli.show import show as run

    with errors():
        all_have_some = run(files, as_json=as_json)
    raise typer.Exit(0 if all_have_some else 1)


@app.command()
def doctor(
    tensorrt: Annotated[
        bool, typer.Option("--tensorrt", help="Prove what TensorRT engines can do on this host.")
    ] = False,
    model: Annotated[
        str | None, typer.Option(help="With --tensorrt: the model to try; the config's first by default.")
    ] = None,
    config: Annotated[
        str | None, typer.Option("--config", help="A config to check: a file, or the name of a shipped one.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Report installed packages, devices and NCCL, and what can run here or why not."""
    from deployments.cli.doctor import first_model, print_proofs, print_report

    with errors():
        if tensorrt and as_json:
            raise ValueError("--json is for the report, not for --tensorrt: leave one of them out")
        source = model or first_model(config or "laptop") if tensorrt else ""
        fine = print_proofs(source) if tensorrt else print_report(config, as_json=as_json)
    raise typer.Exit(0 if fine else 1)


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Directory of the pictures, the edit and the clip.")] = Path("out"),
) -> None:
    """Make a picture, the same by a recipe, an edit and a clip through a real server, with the shipped models."""
    from deployments.cli.demo import demo as run

    with errors():
        run(out)


for _command in (build_engine, calibrate, estimate, stop):
    app.command()(_command)


def _target(url: str, config: str) -> tuple[str, str]:
    """Return a server's URL, or "" and a config: the given one, else the server that runs here, else laptop."""
    from deployments.cli.operation import servers, the_server

    if not url and not config and servers():
        url = the_server().url
    return url, config or "laptop"


@contextmanager
def _client(config: str, url: str, api_key_file: Path | None) -> Iterator[Any]:
    from deployments.cli.client import Client

    with errors():
        url, config = _target(url, config)
        if url:  # a client only, which starts without Ray and torch
            from deployments.settings import Settings

            with Client(url, Settings().own_key(api_key_file)) as client:
                yield client
        else:
            from deployments.cli.progress import started_temporarily
            from deployments.cli.serving import load_config

            with started_temporarily(load_config(config)) as own_url, Client(own_url) as client:
                yield client


def main() -> None:
    """Run the command line. SIGTERM ends it like Ctrl-C; its clusters listen on this machine only."""
    signal.signal(signal.SIGTERM, terminate)
    set_defaults(ON_ONE_MACHINE)
    app()


if __name__ == "__main__":
    main()
