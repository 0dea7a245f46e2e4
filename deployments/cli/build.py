"""``troupe build-engine`` and ``troupe calibrate``: TensorRT engine files and fixed scales, ahead of time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from deployments.cli.progress import console
from deployments.places import file_refusal, read_text
from engines.core.spec import is_static
from pipelines.wording import counted

if TYPE_CHECKING:
    import torch

    from engines.core.model import Branch, DenoiserModel
    from engines.tensorrt_engine.build.report import EngineReport
    from pipelines.checkpoint import Checkpoint
    from pipelines.request import InputPictures, MediaRequest


PROMPTS = (
    "a large red circle in the centre on a white background",
    "a small blue square above a green triangle on a black background",
    "a yellow star moves from left to right on a grey background",
    "a photograph of a lighthouse on a cliff at dusk, long exposure",
    "portrait of an old fisherman in the rain, black and white",
    "a bowl of ripe fruit on a wooden table, oil on canvas",
    "a crowded night market seen from above, neon signs, wet asphalt",
    "the words 'open late' painted on a shop window, reflections of trees",
)
"""Default prompts."""


def calibrate(source: str, out: Path, prompts_file: Path | None, size: str | None, dtype_name: str) -> None:
    """Write the largest magnitude of each linear's input, over all steps of the prompts, to ``out``.

    ValueError if the model, the size or the file of prompts is invalid, or ``out`` cannot be written.
    """
    if problem := file_refusal(out):
        raise ValueError(f"--out: {problem}")
    from engines.quantization.calibration import recording_all, save_calibration
    from pipelines.checkpoint import Checkpoint

    prompts = read_prompts(prompts_file)
    model, run = model_over(prompts, Checkpoint.open(source, find_device(), dtype_name), size)
    with recording_all(model) as records:
        run()
    save_calibration(records, out)
    console.print(f"{out}  scales of {source} over {counted(len(prompts), 'prompt', 'prompts')}")


def model_over(
    prompts: Sequence[str], checkpoint: Checkpoint, size: str | None
) -> tuple[DenoiserModel, Callable[[], None]]:
    """Return a model and a function that runs it over all steps of the prompts on one rank.

    ``size`` None is the model's default. Input pictures, if the model needs any, are noise.
    """
    from rich.progress import track

    from pipelines.run import PlainEngine, load_pipeline
    from pipelines.size import Size

    wanted = Size.parse(size) if size else None
    unguided = partial(checkpoint.defaults.request, wanted, true_cfg_scale=1.0)
    requests = [unguided(prompt=prompt, seed=seed) for seed, prompt in enumerate(prompts)]
    pictures = noisy_pictures(requests[0])
    model = checkpoint.denoiser()
    pipeline = load_pipeline(checkpoint, PlainEngine(model=model))

    def run() -> None:
        for request in track(requests, "Calibrating", console=console, transient=True):
            pipeline.denoise(request, pictures)

    return model, run


def noisy_pictures(request: MediaRequest) -> InputPictures:
    """Return the number of pictures that ``request`` has, in its size; seeded noise, equal at every call."""
    from numpy.random import default_rng

    from pipelines.request import InputPicture, InputPictures

    draw, (width, height) = default_rng(0), (request.width, request.height)
    pictures = (
        InputPicture(width=width, height=height, mode="RGB", data=draw.bytes(3 * width * height))
        for _ in range(request.num_pictures)
    )
    return InputPictures(pictures=tuple(pictures))


def read_prompts(file: Path | None) -> tuple[str, ...]:
    """Return the prompts of ``file``, one per line. ValueError if there are none."""
    if file is None:
        return PROMPTS
    prompts = tuple(line.strip() for line in read_text(file).splitlines() if line.strip())
    if not prompts:
        raise ValueError(f"{file} holds no prompt: write one per line")
    return prompts


def find_device() -> torch.device:
    import torch

    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineBuildOptions:
    """Options of ``troupe build-engine``."""

    model: str
    """A model with weights; a published model's name is enough unless ``needs_weights``."""
    strategy: str
    """How ranks divide a step; "auto" as in ``TensorRTConfig``."""
    num_ranks: int
    """Ranks of the gang."""
    precision: str
    """Precision of the linears; "auto" is the model's dtype."""
    target: str
    """Compute capability, such as "sm90"; "auto" is this machine's GPU."""
    sizes: tuple[str, ...] = ()
    """WIDTHxHEIGHT or WIDTHxHEIGHTxFRAMES, which share an engine file; empty: the model's default size."""
    dtype: str = "auto"
    """``auto`` is bfloat16."""
    weights: str = "inputs"
    """"inputs": one file for all fine-tunes, or "constants"."""
    cache_dir: Path | None = None
    """Folder of engine files; None: the engine's default."""
    weight_streaming: bool = False
    """Weights may stay on the host."""
    strip_weights: bool = False
    """Leave weights out of the file."""
    calibrate: bool = False
    """First measure activations, for static scales."""
    prompts: Path | None = None
    """File of prompts to calibrate with, one a line; None: some of our own."""

    @property
    def needs_weights(self) -> bool:
        """True if the build reads values of weights."""
        return self.calibrate or self.weights == "constants" or is_static(self.precision)


def build(options: EngineBuildOptions) -> None:
    """Build the engine files, or find them in the cache, and print a report of each. Errors: ``engine_reports``."""
    for report in engine_reports(options):
        console.print("\n".join(report.lines()))


def engine_reports(options: EngineBuildOptions) -> list[EngineReport]:
    """Return reports of the engine files, which are built unless cached.

    ValueError if TensorRT does not support the options, BuildError if a build fails, KeyboardInterrupt after Ctrl-C.
    """
    from engines.tensorrt_engine import rules
    from engines.tensorrt_engine.build.builder import check_target
    from engines.tensorrt_engine.build.report import build_engine
    from engines.tensorrt_engine.config import TensorRTConfig
    from pipelines.checkpoint import Checkpoint

    section = rules.TensorRTOptions(weights=cast(Any, options.weights), cache_dir=options.cache_dir)
    division: dict[str, Any] = {"strategy": options.strategy, "precision": options.precision}
    rules.check_options(**division, weights=section.weights, num_ranks=options.num_ranks)
    config, target = TensorRTConfig(**division, options=section), find_target(options.target)
    check_target(target)
    dtype = find_dtype(options.dtype)
    if options.needs_weights:
        checkpoint = Checkpoint.open(options.model, find_device(), dtype)
    else:
        checkpoint = Checkpoint.of_configuration(options.model, "cpu", dtype)
    is_split = config.spec(options.num_ranks).context > 1
    rules.check_model(checkpoint.eager_only(is_split=is_split))
    if options.calibrate:
        record_calibration(checkpoint, read_prompts(options.prompts), next(iter(options.sizes), None), config.cache_dir)
    with model_for(options, checkpoint) as model:
        return build_engine(
            model,
            buckets_for(options, checkpoint, model),
            config=config,
            num_ranks=options.num_ranks,
            target=target,
            weight_streaming=options.weight_streaming,
            strip_weights=options.strip_weights,
        )


@contextmanager
def model_for(options: EngineBuildOptions, checkpoint: Checkpoint) -> Iterator[DenoiserModel]:
    """Yield the model; an outline without weight values unless ``options.needs_weights``."""
    from engines.core.torch_private import fake_mode

    if options.needs_weights:
        yield checkpoint.denoiser()
        return
    with fake_mode(allow_non_fake_inputs=True):
        yield checkpoint.outline()


def buckets_for(options: EngineBuildOptions, checkpoint: Checkpoint, model: DenoiserModel) -> Sequence[Branch]:
    from engines.core.torch_private import without_modes
    from pipelines.size import Size

    defaults = checkpoint.defaults
    sizes = [Size.parse(size) for size in options.sizes] or [Size(width=defaults.width, height=defaults.height)]
    with without_modes():  # the solver reads values of its schedule, which fake tensors do not have
        return [branches[0] for branches in checkpoint.first_steps(sizes, model.modules)]


def record_calibration(checkpoint: Checkpoint, prompts: Sequence[str], size: str | None, folder: Path) -> None:
    """Save the magnitudes over ``prompts`` for this checkpoint in ``folder``."""
    from engines.quantization.calibration import calibration_of, recording_all, save_calibration

    model, run = model_over(prompts, checkpoint, size)
    with recording_all(model) as records:
        run()
    for name, record in records.items():
        file = calibration_of(model.modules[name], folder)
        save_calibration({name: record}, file)
        console.print(f"calibrated {name} on {len(prompts)} prompts: {file}")


def find_target(text: str) -> Any:
    """Return ``text`` as a target; "auto" is this machine's GPU. ValueError if there is none."""
    import torch

    from engines.tensorrt_engine.build.bindings import Target

    if text != "auto":
        return Target.parse(text)
    if not torch.cuda.is_available():
        raise ValueError("--target: there is no GPU here to build for; name one, such as sm90 or sm120")
    major, minor = torch.cuda.get_device_capability()
    return Target(major=major, minor=minor)


def find_dtype(name: str) -> torch.dtype:
    import torch

    from pipelines.loading import resolve_dtype

    return resolve_dtype("bfloat16" if name == "auto" else name, torch.device("cpu"))
