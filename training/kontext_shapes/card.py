"""Model card and request settings of the exported folder."""

import shutil
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PARTS = {
    "done": ("checks", "done"),
    "kept": ("checks", "kept"),
    "new_done": ("checks", "done (new phrasing)"),
    "new_kept": ("checks", "kept (new phrasing)"),
    "long_done": ("checks at 512 tokens", "done"),
    "long_kept": ("checks at 512 tokens", "kept"),
}


def write_card(path: Path, scores: dict[str, Any]) -> None:
    """Write README.md and troupe.json into an exported folder, with the scores of `evaluate`."""
    shares = {name: f"{scores[part][check]['share']:.1%}" for name, (part, check) in PARTS.items()}
    card = (HERE / "card.md").read_text()
    (path / "README.md").write_text(card.format(edits=scores["prompts"], **shares))
    shutil.copyfile(HERE / "troupe.json", path / "troupe.json")
