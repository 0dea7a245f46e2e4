"""Commands about the server of this machine and this version, which need no key."""

from __future__ import annotations

from typing import Annotated

import typer

from deployments.cli.errors import errors
from deployments.names import own_version


def print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"troupe {own_version()}")
        raise typer.Exit


def stop(
    port: Annotated[int | None, typer.Option(help="Of which server, if several run here.")] = None,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for its end.")] = 120.0,
) -> None:
    """End a server that `troupe serve` started here; what is under way there has door.drain_s to finish."""
    from deployments.cli.operation.stop import stop as run

    with errors():
        run(port, timeout)
