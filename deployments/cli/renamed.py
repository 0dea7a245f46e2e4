"""Old spellings of commands and options: each answers with the new one."""

from __future__ import annotations

from typing import Any

import typer


def renamed_option(old: str, new: str) -> Any:
    """A hidden option ``old`` that is refused with a sentence naming ``new``."""

    def refuse(value: str | None) -> None:
        if value is not None:
            raise typer.BadParameter(f"it is called {new} now", param_hint=old)

    return typer.Option(old, hidden=True, callback=refuse)


def rename_command(app: typer.Typer, old: str, new: str) -> None:
    """Let the hidden command ``old``, whatever its arguments, end with exit code 2 and the new name."""

    @app.command(old, hidden=True, context_settings={"ignore_unknown_options": True, "allow_extra_args": True})
    def refuse(context: typer.Context) -> None:
        typer.echo(f"troupe: `troupe {old}` is called `troupe {new}` now", err=True)
        raise typer.Exit(2)
