"""Calls of TensorRT's builder: ONNX to engine file, with timing caches, profiles and targets."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from engines.core.model import DenoiserModel
from engines.core.storage import write_atomically
from engines.tensorrt_engine.build.bindings import Target, load_bindings, take_errors, trt_logger
from engines.tensorrt_engine.build.cache_files import locked
from engines.tensorrt_engine.build.progress import BuildCancelledError, ProgressBar, as_monitor


def attach_timing_cache(config: Any, folder: Path | None, target: Target) -> Path | None:
    """Load stored timings into ``config``; return the file to store them in. None without a cache folder."""
    if folder is None:
        return None
    bindings = load_bindings()
    path = folder / f"{bindings.product}-{bindings.version}-{target.name}.timing"
    stored = path.read_bytes() if path.exists() else b""
    with _rtx_deprecation_ignored():
        config.set_timing_cache(config.create_timing_cache(stored), False)
    return path


def store_timing_cache(config: Any, path: Path | None) -> None:
    """Merge this build's timings into the file, which concurrent builds may have updated."""
    if path is None:
        return
    with locked(path), _rtx_deprecation_ignored():
        timings = config.get_timing_cache()
        if path.exists():
            timings.combine(config.create_timing_cache(path.read_bytes()), True)
        write_atomically(path, bytes(timings.serialize()))


@contextmanager
def _rtx_deprecation_ignored() -> Iterator[None]:
    """Ignore TensorRT-RTX's deprecation of the timing cache: it compiles on the target GPU, without timings."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        yield


Shape = tuple[int, ...]


class BuildError(RuntimeError):
    """TensorRT refused the network; the message quotes its reason."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Profile:
    """Shapes that one optimization profile covers."""

    shapes: Mapping[str, tuple[Shape, Shape, Shape]]
    """Smallest, most likely and largest shape by input name."""

    def covers(self, shapes: Mapping[str, Shape]) -> bool:
        """Return whether all dims of all inputs of the profile are within its bounds."""
        return all(
            low <= size <= high
            for name, (smallest, _, largest) in self.shapes.items()
            for low, size, high in zip(smallest, shapes[name], largest, strict=True)
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class BuildOptions:
    """Settings that determine the engine file, together with the network."""

    target: Target
    """GPU that the file is built for."""
    profiles: tuple[Profile, ...] = ()
    """Shapes of dynamic dims; empty: all shapes are static."""
    weight_streaming: bool = False
    """Let weights stay in host memory at run time."""
    strip_weights: bool = False
    """Leave weights out of the file, which is refitted at load."""
    timing_cache_dir: Path | None = field(default=None, compare=False)
    """Folder of measured kernels that builds share; None: none. It does not change the file's key."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BuiltEngine:
    """A new engine file."""

    engine_file: bytes
    """Its bytes, as TensorRT serialized it."""
    build_s: float
    """Seconds of the build."""


def build(onnx_file: bytes, options: BuildOptions, *, bar: ProgressBar | None = None) -> BuiltEngine:
    """Build a strongly typed network for ``options.target``.

    Raises BuildError with TensorRT's reason, BuildCancelledError after Ctrl-C.
    """
    trt = load_bindings().api
    bar = bar if bar is not None else ProgressBar(visible=False)
    started_s = time.perf_counter()
    take_errors()
    builder = trt.Builder(trt_logger())
    network = _parse(builder, onnx_file)
    _check_profiles(network, options.profiles)
    monitor = as_monitor(bar)
    config = _configure(builder, options, monitor)
    cache = attach_timing_cache(config, options.timing_cache_dir, options.target)
    with bar.running():
        engine_file = builder.build_serialized_network(network, config)
    if bar.cancelled.is_set():
        raise BuildCancelledError("TensorRT build cancelled; no engine file was written")
    if engine_file is None:
        raise BuildError(
            f"TensorRT refused the network for {options.target.name}: {take_errors() or 'no reason given'}"
        )
    store_timing_cache(config, cache)
    return BuiltEngine(engine_file=bytes(engine_file), build_s=time.perf_counter() - started_s)


def _parse(builder: Any, onnx_file: bytes) -> Any:
    trt = load_bindings().api
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, trt_logger())
    if not parser.parse(onnx_file):
        reasons = "; ".join(parser.get_error(i).desc() for i in range(parser.num_errors))
        raise BuildError(f"TensorRT cannot parse the ONNX graph: {reasons}")
    return network


def _check_profiles(network: Any, profiles: tuple[Profile, ...]) -> None:
    """Raise ValueError for names that TensorRT would silently ignore, or report as an error of the graph."""
    inputs = [network.get_input(i) for i in range(network.num_inputs)]
    dynamic = {tensor.name for tensor in inputs if -1 in tuple(tensor.shape)}
    if dynamic and not profiles:
        raise ValueError(f"inputs {', '.join(sorted(dynamic))} have dynamic dims: give at least one profile")
    for profile in profiles:
        if dynamic != set(profile.shapes):
            named = ", ".join(sorted(profile.shapes)) or "none"
            raise ValueError(
                f"a profile names {named}; the inputs with dynamic dims are {', '.join(sorted(dynamic)) or 'none'}"
            )


def _configure(builder: Any, options: BuildOptions, monitor: Any) -> Any:
    trt = load_bindings().api
    config = builder.create_builder_config()
    config.progress_monitor = monitor
    _set_target(config, options.target)
    if options.weight_streaming:
        config.set_flag(trt.BuilderFlag.WEIGHT_STREAMING)
    if options.strip_weights:
        config.set_flag(trt.BuilderFlag.STRIP_PLAN)
    for profile in options.profiles:
        config.add_optimization_profile(_optimization_profile(builder, profile))
    return config


def _optimization_profile(builder: Any, profile: Profile) -> Any:
    optimization = builder.create_optimization_profile()
    for name, (smallest, likely, largest) in profile.shapes.items():
        optimization.set_shape(name, smallest, likely, largest)
    return optimization


def check_target(target: Target) -> None:
    """Raise ValueError for a target that the installed product does not support.

    RTX cross-compiles for a list of targets; TensorRT builds for the local GPU.
    """
    capabilities = getattr(load_bindings().api, "ComputeCapability", None)
    if capabilities is None:
        _require_this_gpu(target)
        return
    supported = [name.lower() for name in capabilities.__members__ if name.startswith("SM")]
    if target.name not in supported:
        product = load_bindings().product
        raise ValueError(
            f"{product} builds for {', '.join(supported)}, not for {target.name}: build on such a GPU with TensorRT 11"
        )


def _set_target(config: Any, target: Target) -> None:
    check_target(target)
    capabilities = getattr(load_bindings().api, "ComputeCapability", None)
    if capabilities is not None:
        config.num_compute_capabilities = 1
        config.set_compute_capability(capabilities.__members__[target.name.upper()], 0)


def _require_this_gpu(target: Target) -> None:
    if not torch.cuda.is_available():
        raise ValueError(f"TensorRT builds for the GPU it runs on; there is none here to build for {target.name}")
    major, minor = torch.cuda.get_device_capability()
    if (major, minor) != (target.major, target.minor):
        raise ValueError(f"TensorRT builds for the GPU it runs on: this is sm{major}{minor}, not {target.name}")


@contextmanager
def explain_build_errors(model: DenoiserModel, strategy: str) -> Iterator[None]:
    """Add the class of ``model`` and an alternative to a BuildError, in front of TensorRT's own message."""
    try:
        yield
    except BuildError as error:
        raise BuildError(
            f"TensorRT cannot build an engine of {model.class_name} with {strategy}: use another strategy, or engine: "
            f"torch. Its own words: {error}"
        ) from error
