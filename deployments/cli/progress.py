"""Progress bars for one picture or clip, and for the start of the application."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars

from deployments.cli.client import Result
from deployments.service.interface import Progress

if TYPE_CHECKING:
    from deployments.config import ServeConfig

console = Console(markup=False, emoji=False, highlight=False, soft_wrap=True)
"""Prints text unchanged: prompts, names and messages may have brackets and colons, and programs read whole lines."""


def follow(title: str, events: Iterator[Progress | Result], num_results: int = 1) -> list[Result]:
    """Show ``title``, step and ETA until all results have come; return them. RuntimeError if some never come."""
    columns = (_column("{task.description}"), BarColumn(), _column("step"), MofNCompleteColumn(separator=" of "))
    with Bars(*columns, _column("{task.fields[eta]}"), console=console) as bar:
        task = bar.add_task(title, total=None, eta="")
        results: list[Result] = []
        for event in events:
            if isinstance(event, Result):
                results.append(event)
                if len(results) < num_results:
                    continue
                bar.update(task, eta="done")
                return results
            eta = "" if event.eta_s is None else f"ETA {event.eta_s:.1f} s"
            bar.update(task, completed=event.step, total=event.num_steps, eta=eta)
    raise RuntimeError("the server ended the stream before the last result")


def _column(template: str) -> TextColumn:
    return TextColumn(template, markup=False)


@contextmanager
def started(config: ServeConfig, on_open: Callable[[str], None] = lambda url: None) -> Iterator[str]:
    """Start the application, with a spinner and the missing parts; yield its URL. ``on_open`` is as in ``running``."""
    from deployments.cli.serving import running  # clients start without Ray and torch

    with ExitStack() as stack:
        with Bars(SpinnerColumn(), _column("{task.description}"), TimeElapsedColumn(), console=console) as bar:
            task = bar.add_task("Starting Ray Serve", total=1)
            application = running(config, on_open=on_open, on_wait=lambda reason: bar.update(task, description=reason))
            url = stack.enter_context(application)
            bar.update(task, description=f"Ready at {url}", completed=1)
        yield url


@contextmanager
def started_temporarily(config: ServeConfig) -> Iterator[str]:
    """Start the application for one command only; yield its URL.

    It has any free port, no metrics, a temporary data directory, and no settings of the environment (keys, a database).
    """
    from deployments.settings import settings_unset

    with ExitStack() as stack:
        stack.enter_context(settings_unset())
        data_dir = Path(stack.enter_context(TemporaryDirectory(prefix="troupe_")))
        own = config.with_http(port=0).with_data_dir(data_dir).with_metrics(None)
        yield stack.enter_context(started(own))


def timings_line(result: Result) -> str:
    """Return the seconds by stage as one line."""
    return " · ".join(f"{stage.removesuffix('_s')} {seconds:.2f} s" for stage, seconds in result.timings_s.items())
