"""Errors of commands as lines on stderr instead of tracebacks; handling of Ctrl-C and SIGTERM."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import typer

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Terminated(KeyboardInterrupt):
    """SIGTERM was received; it is handled like Ctrl-C, with exit status 143."""


def terminate(number: int, frame: object) -> None:
    raise Terminated


def interrupts_never() -> None:
    """Ignore Ctrl-C and SIGTERM from now on, before a command exits.

    A signal while the interpreter shuts down would replace the exit status.
    """
    if threading.current_thread() is threading.main_thread():
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)  # a Python handler would not last until the end


@contextmanager
def interrupts_later() -> Iterator[None]:
    """Delay Ctrl-C and SIGTERM inside the block: raise their exception at its end, and restore the handlers.

    Use it for blocks that fork, since an interrupted child prints a traceback before its exec. Use it also for blocks
    that set handlers, such as Ray's, which prints a stack trace on SIGTERM. An ignored signal (``nohup``) stays
    ignored. Outside the main thread, where Python handles no signals, nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received: list[int] = []
    active = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, lambda number, frame: received.append(number)) for number in active}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if received:
        raise Terminated if signal.SIGTERM in received else KeyboardInterrupt


@contextmanager
def errors() -> Iterator[None]:
    """Exit with 2 after a user's or a server's error, 130 after Ctrl-C, 143 after SIGTERM. Others keep a traceback."""
    try:
        yield
    except KeyboardInterrupt as interrupt:
        interrupts_never()  # a second Ctrl-C
        exec("")  # After an interrupted exec(), CPython ends a `python -m` by a signal; another exec() resets that.
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
    """Return the message for the user; None for errors that users cannot fix."""
    import httpx
    from pydantic import ValidationError

    from deployments.cli.preflight import hint_for

    match error:
        case ValidationError():
            return "\n".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors())
        case httpx.RequestError() | httpx.InvalidURL():
            where = error.request.url if isinstance(error, httpx.RequestError) else "the URL"
            return f"no answer from {where}: {error}"
        case ModuleNotFoundError(name=str(module)) if hint := hint_for(module):
            return f"{module} is not installed, which this needs: {hint}"
        case OSError(filename=source, filename2=target, strerror=str(reason)):  # two where a new file gets its name
            file = source if target is None else target
            return reason if file is None else f"{file}: {reason}"
        case ValueError() | RuntimeError() | OSError():
            return str(error)
    return None
