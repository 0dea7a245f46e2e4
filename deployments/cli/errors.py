"""Mistakes and refusals as one line on stderr, not as a traceback."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from deployments.cli.ending import Terminated, interrupts_never


@contextmanager
def errors() -> Iterator[None]:
    """Exit with 2 after a user's mistake or a server's refusal, 130 after Ctrl-C, 143 after SIGTERM.

    Other errors keep a traceback.
    """
    try:
        yield
    except KeyboardInterrupt as interrupt:
        interrupts_never()  # a second one, of somebody in a hurry
        exec("")  # If one left an exec(), CPython would end a `python -m` by a signal; the next exec() makes it forget.
        number = signal.SIGTERM if isinstance(interrupt, Terminated) else signal.SIGINT
        raise typer.Exit(128 + number) from None
    except Exception as error:
        message = explain(error)
        if message is None:
            raise
        for line in message.splitlines():
            typer.echo(f"troupe: {line}", err=True)
        raise typer.Exit(2) from error


def explain(error: Exception) -> str | None:
    """Return what to tell the user; None if the error is none that users can do something about."""
    import httpx
    from pydantic import ValidationError

    from deployments.cli.checks.extras import hint_for

    match error:
        case ValidationError():
            return "\n".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors())
        case httpx.RequestError() | httpx.InvalidURL():
            where = error.request.url if isinstance(error, httpx.RequestError) else "the URL"
            return f"no answer from {where}: {error}"
        case ModuleNotFoundError(name=str(module)) if hint := hint_for(module):
            return f"{module} is not installed, which this needs: {hint}"
        case ValueError() | RuntimeError() | OSError():
            return str(error)
    return None
