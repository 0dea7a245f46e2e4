"""Errors and refusals as one line on stderr, not as a traceback; Ctrl-C and SIGTERM while something is started."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import typer

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Terminated(KeyboardInterrupt):
    """SIGTERM came: all that is started is ended as after Ctrl-C. The exit status is 143."""


def terminate(number: int, frame: object) -> None:
    raise Terminated


def interrupts_never() -> None:
    """Have Ctrl-C and SIGTERM change nothing from here on, where a command is about to exit.

    One that came while the interpreter ends, which takes it a while, would end it by a signal instead of its status.
    """
    if threading.current_thread() is threading.main_thread():
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)  # a handler of Python's own would not last to the end


@contextmanager
def interrupts_later() -> Iterator[None]:
    """Turn a Ctrl-C or a SIGTERM inside the block into its exception at the block's end.

    For blocks that fork (an interrupted child prints a traceback before it has become what it was forked for), and for
    those that set handlers of their own, as Ray does, which prints a stack trace on SIGTERM: afterwards all is as
    before. One that is ignored, as under ``nohup``, stays so. In other threads than the main one, where Python handles
    no signals, it changes nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received: list[int] = []
    heeded = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, lambda number, frame: received.append(number)) for number in heeded}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if received:
        raise Terminated if signal.SIGTERM in received else KeyboardInterrupt


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

    from deployments.cli.preflight import hint_for

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
