"""A build's progress bar, and cancellation by Ctrl-C."""

from __future__ import annotations

import functools
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from engines.tensorrt_engine.build.bindings import load_bindings


class BuildCancelledError(KeyboardInterrupt):
    """The build was stopped from outside; nothing was written."""


class ProgressBar:
    """Phases of a build as nested bars. Setting ``cancelled``, from any thread, ends the build at its next step."""

    def __init__(self, *, visible: bool) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
        self._progress = _progress(*columns, visible=visible)
        self._tasks: dict[str, TaskID] = {}
        self.cancelled = threading.Event()

    def phase_start(self, phase: str, parent: str | None, num_steps: int) -> None:
        indent = "  " if parent else ""
        self._tasks[phase] = self._progress.add_task(indent + phase, total=num_steps)

    def step_complete(self, phase: str, step: int) -> bool:
        """Advance the bar; return False to stop the build."""
        if phase in self._tasks:
            self._progress.update(self._tasks[phase], completed=step + 1)
        return not self.cancelled.is_set()

    def phase_finish(self, phase: str) -> None:
        if phase in self._tasks:
            self._progress.remove_task(self._tasks.pop(phase))

    @contextmanager
    def running(self) -> Iterator[None]:
        """Show the bar. Ctrl-C sets ``cancelled``, since exceptions must not cross TensorRT's C++ frames."""
        with self._progress, _interrupts_to(self.cancelled):
            yield


@contextmanager
def spinner(text: str, *, visible: bool) -> Iterator[None]:
    """Show a spinner while the block runs.

    Raises KeyboardInterrupt at the end of the block if an exception of Ctrl-C was lost inside. Python drops exceptions
    in finalizers and in weak-reference callbacks, which are frequent during a trace.
    """
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    interrupted = threading.Event()
    with _progress(*columns, visible=visible) as bar, _interrupts_to(interrupted, raises=True):
        bar.add_task(text, total=None)
        yield
        if interrupted.is_set():
            raise KeyboardInterrupt


def _progress(*columns: ProgressColumn, visible: bool) -> Progress:
    """Return a bar that disappears at its end, and shows nothing if the output is no terminal."""
    console = Console()
    return Progress(*columns, console=console, disable=not (visible and console.is_terminal), transient=True)


@contextmanager
def _interrupts_to(cancelled: threading.Event, *, raises: bool = False) -> Iterator[None]:
    """Set ``cancelled`` at Ctrl-C; with ``raises``, raise KeyboardInterrupt too."""
    if threading.current_thread() is not threading.main_thread():
        yield  # Python delivers signals to the main thread only
        return

    def on_interrupt(_signal: int, _frame: FrameType | None) -> None:
        cancelled.set()
        if raises:
            raise KeyboardInterrupt

    previous = signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


@functools.cache
def _monitor_class() -> type:
    trt = load_bindings().api

    class Monitor(trt.IProgressMonitor):  # type: ignore[misc, name-defined]
        def __init__(self, bar: ProgressBar) -> None:
            trt.IProgressMonitor.__init__(self)
            self._bar = bar

        def phase_start(self, phase: str, parent: str | None, num_steps: int) -> None:
            self._bar.phase_start(phase, parent, num_steps)

        def step_complete(self, phase: str, step: int) -> bool:
            return self._bar.step_complete(phase, step)

        def phase_finish(self, phase: str) -> None:
            self._bar.phase_finish(phase)

    return Monitor


def as_monitor(bar: ProgressBar) -> Any:
    """Return ``bar`` as an ``IProgressMonitor``, to be kept alive during the build."""
    return _monitor_class()(bar)
