"""Whether a transformer takes what its pipeline gives it: checkpoints for masks, controls or pictures take more."""

from __future__ import annotations

from pathlib import Path

from pipelines.directory import read_config, read_index


def check_channels(path: Path, part: str, given: int, taken: int | None = None) -> None:
    """ValueError if the part's configuration says another number of ``in_channels`` than the pipeline has for it.

    ``taken`` is that number where the configuration calls it otherwise.
    """
    number = read_config(path, part).get("in_channels", given) if taken is None else taken
    if number != given:
        raise ValueError(
            f"the {part} of {path} takes {number} channels, and a {read_index(path).get('_class_name')} gives it "
            f"{given}: it was made for other inputs, such as masks or pictures; name the pipeline that it was "
            "published with in the folder's index, or take another model"
        )
