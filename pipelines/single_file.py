"""A transformer as one safetensors or GGUF file, combined with a folder of all other parts.

Its name is ``FILE.safetensors@BASE`` or ``FILE.gguf@BASE``, where ``BASE`` is any name of a model. The format of GGUF:
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelines.directory import (
    GGUF,
    OWN_CLASS,
    PACKAGES,
    QUANTIZATION,
    U_NET,
    check_package,
    open_gguf,
    part_class,
    part_folder,
    read_config,
    unknown_quantiser,
)
from pipelines.models.makers_layers import known_name, translate_layers
from pipelines.models.registry import FAMILY_FOLDERS, load_spec
from pipelines.vae.makers_names import in_own_names, layout_of

if TYPE_CHECKING:
    import torch
    from torch import Tensor

logger = logging.getLogger(__name__)
AT = "@"
SUFFIXES = (".safetensors", GGUF)
ORIGINAL_SHAPE = "comfy.gguf.orig_shape."
"""Prefix of the key of a tensor's shape, in files whose tensors were reshaped to be quantised (ComfyUI-GGUF)."""
OWN = "model.diffusion_model."
"""Prefix of the transformer's keys in a file with all parts of a pipeline."""
PREFIXES = (OWN, "model.model.", "net.")
"""Prefixes of a transformer's keys in files that ComfyUI saves (the second: of HunyuanVideo), and NVIDIA's."""
MARKS = {"__index_timestep_zero__": "zero_cond_t"}
"""Keys without values in ComfyUI's files, by the setting of a configuration that they stand for."""
UNUSED = re.compile(
    r"(^|\.)(rope\.(inv_)?freqs?|norm_final\.weight|_extra_state|pos_embedder\.\w+|logvar\.\d\.\w+|accum_\w+)$"
    r"|^decoder\.mask_token$"
    r"|^(repa_projectors|vae|audio_vae|vocoder|text_encoders?|text_embedding_projection|first_stage_model|conditioner)\."
    r"|_embeddings_connector\.|^(model_ema|loss)\.|per_channel_statistics\.(channel|mean-of-stds)"
)
"""Keys that may go unread: recomputed values, training-only values, and other parts of a pipeline."""
PART_PREFIXES = {
    "vae": "first_stage_model.",
    "text_encoder": "conditioner.embedders.0.",
    "text_encoder_2": "conditioner.embedders.1.",
}
"""Prefixes of the keys of other parts beside a U-Net, as Stability AI's files have them."""
AUTO_ENCODER = "Autoencoder"
"""Part of the names of diffusers' classes whose files hold nothing else."""
OF_AUTO_ENCODER = ("first_stage_model.", "vae.")
"""Prefixes of an auto-encoder's keys in files with all parts."""
TINY = re.compile(r"((taesd_)?(en|de)coder\.)?(layers\.)?\d+\.|vae_(scale|shift)$")
"""Names in files of tiny auto-encoders (TAESD, TAEHV)."""
STATISTICS = re.compile(r"(running_(mean|var)|latents_(mean|std))$")
"""Buffers that no configuration has the values of."""
INNER_CONVOLUTION = re.compile(r"^(?:en|de)coder\.((?:post_)?quant_conv\.)")
"""Keys of auto-encoders whose makers count two convolutions to encoder and decoder."""
OPEN_CLIP = ".model."
"""In the keys of a text encoder in OpenCLIP's names. Others are in those of transformers."""
UNUSED_OF_PARTS = re.compile(r"(position_ids|logit_scale)$|^first_stage_model\.(model_ema|loss)\b")
OTHER_PARTS = re.compile(
    r"^(vae|audio_vae|vocoder|text_encoders?|text_embedding_projection|first_stage_model|conditioner)\."
    r"|^(?:model\.diffusion_model\.)?(\w+_embeddings_connector)\."
)
PREDICTS_VELOCITY, ENDS_IN_NOISE = "v_pred", "ztsnr"
"""Keys without values by which files of U-Nets say how they were trained."""
TRAINING = re.compile(r"^(v_pred|ztsnr|edm_(mean|std|vpred\.sigma_(min|max)))$")
CONTINUOUS_NOISE = frozenset(("edm_mean", "edm_vpred.sigma_max"))
"""The same for noise without steps (Playground 2.5, CosXL), which diffusers' classes ``EDM…`` schedule."""
PREDICTION_KEYS, VELOCITY = ("modelspec.prediction_type", "modelspec.predict_key"), "v"
"""The same in headers that kohya's scripts and ComfyUI write."""


def with_base(file: str, base: str) -> str:
    """Return the name of a model with the transformer in ``file`` and all other parts of ``base``, or else ``file``.

    ValueError if there is a base and ``file`` is not a safetensors or GGUF file.
    """
    if base and not file.endswith(SUFFIXES):
        allowed = " or ".join(SUFFIXES)
        raise ValueError(
            f"base is {base!r}, which needs a {allowed} file as path, and path is {file!r}: give such a file, or leave "
            "base out"
        )
    return f"{file}{AT}{base}" if base else file


def split_source(source: str) -> tuple[Path | None, str]:
    """Return the file and the base in a model's name; for any other name, None and the name.

    ValueError if the file has no base or does not exist, or the package that reads it is missing.
    """
    suffix = next((one for one in SUFFIXES if one + AT in source or source.endswith(one)), None)
    if suffix is None:
        if Path(given := source.partition(AT)[0]).is_file():
            raise ValueError(f"{given} is a file, and only {' or '.join(SUFFIXES)} files are read: convert it")
        return None, source
    name, _, base = source.partition(suffix + AT)
    if not base:
        raise ValueError(
            f"{source} is a transformer alone: name the folder or hub id of the other parts, as base: FOLDER in a "
            f"configuration, or {source}{AT}FOLDER on the command line"
        )
    file = Path(name + suffix)
    if not file.is_file():
        raise ValueError(f"there is no file {file}, which replaces the transformer of {base}: check the path")
    check_package(file)
    return file, base


def check_metadata(file: Path, metadata: Mapping[str, str] | None) -> None:
    """Raise ValueError for a file whose ``metadata`` names a quantiser, as those of SVDQuant do."""
    if written := (metadata or {}).get(QUANTIZATION):
        try:
            quantiser = str(json.loads(written)["method"])
        except (ValueError, LookupError, TypeError):
            quantiser = ""
        raise ValueError(unknown_quantiser(str(file), quantiser, PACKAGES))


def load_single_file(kind: Any, file: Path, config: Path, device: torch.device, dtype: torch.dtype) -> Any:
    """Load a model of diffusers' class ``kind`` by the configuration in the folder ``config``, in the file's dtypes.

    Keys may be diffusers' or the original ones that diffusers translates. Eight-bit weights, and those of GGUF, are
    converted to ``dtype``. ValueError if the keys are others than the class's and nothing translates them, or the
    file does not match the model.
    """
    from pipelines.component_weights import check_finite

    tensors = _read_file(file, dtype, of_all=AUTO_ENCODER in kind.__name__)
    if "UNet" not in kind.__name__:  # diffusers finds these by the prefix, and some transformers only without
        tensors = _without_prefix(tensors)
    try:
        model, written = _outline(kind, config)
        tensors = _without_marks(tensors, written)
        if faults := _faults(kind, tensors, model, written):
            raise ValueError(faults)
        model.load_state_dict(_translated(kind, dict(tensors), model, written), strict=False, assign=True)
        model = model.to(device).eval()
    except (LookupError, RuntimeError, ValueError) as error:
        raise ValueError(
            f"{file} is not exactly the {kind.__name__} that {config} describes ({error}): {_advice(kind, tensors)}"
        ) from error
    check_finite(model, lambda name: file)
    return model


def _without_prefix(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return ``tensors`` by names without a prefix, in the spelling that diffusers translates."""
    prefix = next((one for one in PREFIXES if all(name.startswith(one) for name in tensors)), OWN)
    return {known_name(name.removeprefix(prefix)): x for name, x in tensors.items()}


def _without_marks(tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return ``tensors`` without ``MARKS``. ValueError if the configuration lacks a setting that one stands for."""
    for name, setting in MARKS.items():
        if name in tensors and not config.get(setting):
            raise ValueError(f"it has {name}, and the configuration no {setting}")
    return {name: x for name, x in tensors.items() if name not in MARKS}


def _advice(kind: Any, names: Collection[str]) -> str:
    if AUTO_ENCODER not in kind.__name__:
        return "give the base that it was made of, or a file in a known layout"
    if names and all(TINY.match(name) for name in names):
        return (
            "tiny auto-encoders are read in diffusers' names, from folders whose config.json, and the model's index, "
            "name AutoencoderTiny, in place of an AutoencoderKL alone"
        )
    return "give the auto-encoder of this model, in diffusers' names or its makers'"


def cast_like_diffusers(model: Any, dtype: torch.dtype) -> Any:
    """Return ``model`` with the tensors of its files in ``dtype``, but for those that its class keeps in float32."""
    import torch

    wide = set(model._keep_in_fp32_modules or ())
    for key, x in (tensors := model.state_dict()).items():
        if x.is_floating_point():
            tensors[key] = x.to(torch.float32 if wide & set(key.split(".")) else dtype)
    model.load_state_dict(tensors, assign=True)
    return model


def _outline(kind: Any, config: Path) -> tuple[Any, Any]:
    """Return a model without weights, and its configuration."""
    from accelerate import init_empty_weights  # type: ignore[import-untyped]

    written = kind.load_config(str(config))
    with init_empty_weights():
        return kind.from_config(written), written


def _translated(kind: Any, tensors: dict[str, Tensor], model: Any, config: Any) -> dict[str, Tensor]:
    """Return ``tensors`` by diffusers' names. ValueError if they have others, and nothing translates them."""
    from diffusers.loaders.single_file_model import SINGLE_FILE_LOADABLE_CLASSES

    listed = SINGLE_FILE_LOADABLE_CLASSES.get(kind.__name__)
    needed = set(model.state_dict() if listed else dict(model.named_parameters()))
    if needed <= tensors.keys():
        return tensors
    layers = load_spec(kind.__name__).makers_layers if kind.__name__ in FAMILY_FOLDERS else {}
    named = {name: x for name, x, _ in translate_layers(tensors, layers, model)}
    if needed <= named.keys() or (not listed and 2 * len(needed & named.keys()) > len(needed)):
        return named
    translated: dict[str, Tensor] = {}
    failure: Exception | None = None
    if listed:
        try:
            translated = listed["checkpoint_mapping_fn"](config=config, checkpoint=dict(tensors))
        except (LookupError, ValueError, RuntimeError) as error:  # raised below, if no layout is known
            failure = error
    if not needed <= translated.keys() and (layout := _layout_of(kind, tensors)) is not None:
        shapes = {name: x.shape for name, x in model.state_dict().items()}
        return in_own_names(tensors, layout, config, shapes)
    if failure is not None:
        raise failure
    if listed:
        return translated
    others = [name for name in SINGLE_FILE_LOADABLE_CLASSES if AUTO_ENCODER in name and AUTO_ENCODER in kind.__name__]
    buffers = {name: x for name, x in tensors.items() if name in dict(model.named_buffers())}
    best: dict[str, Tensor] = {}
    for other in others:  # that of Qwen-Image has the names of Wan's, that of FLUX.2 those of FLUX.1 and statistics
        inner = {INNER_CONVOLUTION.sub(r"\1", name): x for name, x in tensors.items()}
        with suppress(LookupError):
            found = SINGLE_FILE_LOADABLE_CLASSES[other]["checkpoint_mapping_fn"](config=config, checkpoint=inner)
            best = max(best, found | buffers, key=lambda one: len(needed & one.keys()))
    if 2 * len(needed & best.keys()) > len(needed):
        return best
    if others:
        raise ValueError(f"its names, such as {min(tensors)}, are neither diffusers' nor those of known makers")
    known = ", ".join(sorted(SINGLE_FILE_LOADABLE_CLASSES))
    raise ValueError(f"nothing reads a {kind.__name__} in other names than diffusers' own; they are known of {known}")


def _layout_of(kind: Any, names: Iterable[str]) -> Mapping[str, str] | None:
    """Return the layout of an auto-encoder's ``names`` that diffusers reads from no single file."""
    return layout_of(names) if AUTO_ENCODER in kind.__name__ else None


def has_part(file: Path, name: str) -> bool:
    """Return whether ``file`` has the part ``name`` of a pipeline beside a U-Net."""
    prefix = PART_PREFIXES.get(name)
    return prefix is not None and file.suffix != GGUF and any(key.startswith(prefix) for key in _names_in(file))


def warn_of_parts(file: Path, base: Path, read: Iterable[str] = ()) -> None:
    """Log the parts in ``file``, by prefixes of keys, that come from ``base`` instead, but for those of ``read``."""
    own = tuple(PART_PREFIXES[name] for name in read)
    names = [key for key in _names_in(file) if not key.startswith(own)]
    others = {found[1] or found[2] for key in names if (found := OTHER_PARTS.match(key))}
    if any(key.startswith(OWN) for key in names):
        first = {key.partition(".")[0] for key in names if "." in key and not TRAINING.match(key)}
        others |= first - {OWN.partition(".")[0], "model_ema"}
    if others:
        told = ", ".join(sorted(others))
        logger.warning("%s also has %s, which are not read: these parts are those of %s", file, told, base)


def check_base(name: str, file: Path, base: Path, auto_encoder: Any, *, reads_parts: bool = False) -> None:
    """Raise ValueError if the denoiser ``name`` in ``file`` was trained for another base. Log what is read of that.

    ``auto_encoder`` is the class of the base's; None if it has none. ``reads_parts``: parts beside a U-Net are read.
    """
    if name == U_NET:
        check_training(file, read_config(base, "scheduler"))
    if auto_encoder is not None and not reads_parts:
        check_auto_encoder(auto_encoder, file, part_folder(base, "vae"))
    beside = PART_PREFIXES if reads_parts else ()
    warn_of_parts(file, base, [one for one in beside if part_class(base, one) and has_part(file, one)])


def check_auto_encoder(kind: Any, file: Path, config: Path) -> None:
    """Raise ValueError if the auto-encoder in ``file`` has other layers than the ``kind`` of its base, which is used.

    Its transformer was trained on latents of its own. Names that nothing translates prove nothing. Reads headers only.
    """
    import torch

    if file.suffix == GGUF or not (names := [name for name in _names_in(file) if name.startswith(OF_AUTO_ENCODER)]):
        return
    from safetensors import safe_open

    with safe_open(file, framework="pt") as opened:
        tensors = {name: torch.empty(opened.get_slice(name).get_shape(), device="meta") for name in names}
    model, written = _outline(kind, config)
    own = dict(model.named_parameters())
    best: dict[str, Tensor] = {}
    for prefix in ("", *OF_AUTO_ENCODER):  # some translations need the prefix
        with suppress(LookupError, ValueError):
            found = _translated(kind, {name.removeprefix(prefix): x for name, x in tensors.items()}, model, written)
            best = max(best, found, key=lambda one: len(own.keys() & one.keys()))
    known = own.keys() & best.keys()
    others = [name for name in known if own[name].shape != best[name].shape]
    halves = {name.partition(".")[0] for name in known}  # files for decoders alone say nothing of the encoder
    missing = {name for name in own.keys() - known if name.partition(".")[0] in halves}
    unread = best.keys() - model.state_dict().keys()
    if 2 * len(known) > len(own) and (others or (missing and unread)):
        raise ValueError(
            f"{file} has another auto-encoder than the {kind.__name__} of its base, and {config} is used "
            f"({min(others or missing)} differs): give the base that it was made of"
        )


def check_training(file: Path, scheduler: Mapping[str, Any]) -> None:
    """Raise ValueError if the U-Net in ``file`` was trained for another scheduler than the base's configuration."""
    from engines.parallel.weight_files import metadata_of

    names, header = _names_in(file), metadata_of(file) if file.suffix != GGUF else {}
    predicts_velocity = PREDICTS_VELOCITY in names or any(header.get(key) == VELOCITY for key in PREDICTION_KEYS)
    needed: dict[str, Any] = {"prediction_type": "v_prediction"} if predicts_velocity else {}
    needed |= {"rescale_betas_zero_snr": True} if ENDS_IN_NOISE in names else {}
    if names & CONTINUOUS_NOISE and not str(scheduler.get(OWN_CLASS)).startswith("EDM"):
        needed |= {OWN_CLASS: "EDMEulerScheduler"}
    if wrong := {key: value for key, value in needed.items() if scheduler.get(key) != value}:
        raise ValueError(
            f"{file} was trained with {wrong}, and the scheduler of its base was not: take a base whose "
            "scheduler_config.json says so"
        )


def load_part(kind: Any, name: str, file: Path, config: Path, device: torch.device, dtype: torch.dtype) -> Any:
    """Load the part ``name`` beside the U-Net in ``file``, by the configuration in the folder ``config``.

    ValueError if it does not match the configuration.
    """
    from diffusers import ModelMixin

    from pipelines.component_weights import check_finite

    tensors = _read_file(file, dtype, PART_PREFIXES[name])
    try:
        if issubclass(kind, ModelMixin):
            if faults := _faults(kind, tensors, *_outline(kind, config), UNUSED_OF_PARTS):
                raise ValueError(faults)
            model = kind.from_single_file(dict(tensors), config=str(config), device=device)
        else:
            model = _clip_of(kind, tensors, config, PART_PREFIXES[name]).to(device)
    except (LookupError, RuntimeError, ValueError) as error:
        raise ValueError(f"{file} has no {name} like the {kind.__name__} that {config} describes ({error})") from error
    model = model.to(dtype)
    check_finite(model, lambda _: file)
    return model


def _clip_of(kind: Any, tensors: Mapping[str, Tensor], config: Path, prefix: str) -> Any:
    """Return a text encoder of transformers' class ``kind``. ValueError for tensors that it lacks or does not read."""
    from accelerate import init_empty_weights
    from diffusers.loaders.single_file_utils import convert_ldm_clip_checkpoint, convert_open_clip_checkpoint

    from pipelines.component_weights import describe_faults, sources_of, track, untrack

    with init_empty_weights():
        model = kind(kind.config_class.from_pretrained(str(config)))
    own, written = set(model.state_dict()), track(tensors, set())
    if any(key.startswith(prefix.removesuffix(".") + OPEN_CLIP) for key in tensors):
        translated = convert_open_clip_checkpoint(model, written, prefix=prefix.removesuffix(".") + OPEN_CLIP)
    else:
        translated = convert_ldm_clip_checkpoint(written, f"{prefix}transformer.")
    named = {name if name in own else name.removeprefix("text_model."): x for name, x in translated.items()}
    used = frozenset[str]().union(*(sources_of(x) for name, x in named.items() if name in own))
    faults = describe_faults(
        kind.__name__,
        missing=[name for name, _ in model.named_parameters() if name not in named],
        unread=[name for name in set(tensors) - used if not UNUSED_OF_PARTS.search(name)],
    )
    if faults:
        raise ValueError(faults)
    model.load_state_dict({name: untrack(x) for name, x in named.items() if name in own}, assign=True)
    return model


def _names_in(file: Path) -> frozenset[str]:
    from engines.parallel.weight_files import tensor_names

    if file.suffix == GGUF:
        return frozenset(tensor.name for tensor in open_gguf(file).tensors)
    return frozenset(tensor_names(file))


def _read_file(file: Path, dtype: torch.dtype, prefix: str = "", *, of_all: bool = False) -> dict[str, Tensor]:
    """Return the tensors with a ``prefix``, those ``of_all`` parts, or else the transformer's without other parts."""
    from safetensors import SafetensorError, safe_open

    from engines.quantization.scaled_files import dequantised

    if file.suffix == GGUF:
        found = dict(_read_gguf(file, dtype))
        return found if of_all else _of_transformer(found)
    try:
        with safe_open(file, framework="pt") as opened:
            check_metadata(file, header := opened.metadata())
            names = [name for name in opened.keys() if name.startswith(prefix)]  # noqa: SIM118  # it is no dict
            tensors = {name: opened.get_tensor(name) for name in names}
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file} is no safetensors file, or not the whole of one ({error})") from error
    read = dequantised(tensors if prefix or of_all else _of_transformer(tensors), dtype, [header])
    return {name: x.to(dtype) if x.is_floating_point() and x.itemsize == 1 else x for name, x in read.items()}


def _of_transformer(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    own = {name: tensor for name, tensor in tensors.items() if name.startswith(OWN)}
    return own or {name: x for name, x in tensors.items() if not (OTHER_PARTS.match(name) or TRAINING.match(name))}


def _read_gguf(file: Path, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Yield names and tensors, quantised ones as diffusers dequantises them, then in ``dtype``.

    ValueError for a file that is damaged, or has a type that diffusers does not read.
    """
    import torch
    from diffusers.quantizers.gguf.utils import SUPPORTED_GGUF_QUANT_TYPES, GGUFParameter, dequantize_gguf_tensor

    reader = open_gguf(file)
    from gguf import GGMLQuantizationType

    for written in reader.tensors:
        kind, tensor = written.tensor_type, torch.from_numpy(written.data.copy())
        if kind not in (GGMLQuantizationType.F32, GGMLQuantizationType.F16):
            if kind not in SUPPORTED_GGUF_QUANT_TYPES:
                known = ", ".join(one.name for one in SUPPORTED_GGUF_QUANT_TYPES)
                raise ValueError(
                    f"{file} has {written.name} as {kind.name}, and only {known} are read: take another file"
                )
            tensor = dequantize_gguf_tensor(GGUFParameter(tensor, quant_type=kind)).to(dtype)
        shape = reader.get_field(ORIGINAL_SHAPE + written.name)
        yield written.name, tensor if shape is None else tensor.reshape(shape.contents())


def _faults(
    kind: Any, tensors: Mapping[str, Tensor], model: Any, written: Any, unused: re.Pattern[str] = UNUSED
) -> str:
    """Return missing and unread keys after diffusers' translation of names, on shapes only; empty if none.

    ``model`` is the outline of a ``kind``, and ``written`` its configuration.
    """
    from pipelines.component_weights import describe_faults, sources_of, track

    own = set(model.state_dict())
    tracked = track({name: tensor.to("meta") for name, tensor in tensors.items()}, set())
    translated = _translated(kind, tracked, model, written)
    used = frozenset[str]().union(*(sources_of(x) for name, x in translated.items() if name in own))
    needed = {name for name, _ in model.named_parameters()} | {name for name in own if STATISTICS.search(name)}
    return describe_faults(
        kind.__name__,
        missing=needed - translated.keys(),
        unread=[
            name
            for name in set(tensors) - used
            if not unused.search(name) and not _has_values(written.get(name), tensors[name])
        ],
    )


def _has_values(configured: Any, x: Tensor) -> bool:
    """Return whether a configuration has the values of ``x``, as ComfyUI's files repeat statistics of latents."""
    is_list = isinstance(configured, list | tuple) and x.is_floating_point()
    return is_list and x.tolist() == x.new_tensor(configured).tolist()
