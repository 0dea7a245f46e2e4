"""A use of a model that needs another of its transformers, as a model of its own.

It is opened as a diffusers folder with links to the parts of the model, and an index without those that the workflow
leaves out (``ModelSpec.workflows``).
"""

from __future__ import annotations

from pathlib import Path

from pipelines.directory import DENOISERS, linked_folder, read_index
from pipelines.models.registry import spec_of

FOLDERS = "workflows"
"""Place of such folders in the Hugging Face cache."""


def unused_folders(model: Path, workflow: str) -> tuple[str, ...]:
    """Return the parts that the workflow leaves out. ValueError if the model has no such workflow."""
    spec = spec_of(model)
    if workflow not in spec.workflows:
        known = f"; {spec.family} has {', '.join(spec.workflows)}, and all else without one"
        known = known if spec.workflows else f", and {spec.family} has none: leave workflow out"
        raise ValueError(f"workflow is {workflow!r}{known}")
    return spec.workflows[workflow]


def workflow_folder(model: Path, workflow: str) -> Path:
    """Return the folder of ``model`` for a workflow.

    It is made at the first call, and the same for equal folders. ValueError if the model has no such workflow, or lacks
    the transformer for it.
    """
    unused, index = unused_folders(model, workflow), read_index(model)
    entries = {name: entry for name, entry in index.items() if name not in unused}
    if not any(name in entries for name in DENOISERS):
        raise ValueError(
            f"{model} has no transformer for the workflow {workflow}: download the whole model, or leave workflow out"
        )
    return linked_folder(model, FOLDERS, f"{model.resolve()}\n{workflow}", entries)
