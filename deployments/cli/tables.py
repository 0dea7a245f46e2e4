"""Tables that can be read in a terminal of any width."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.table import Table
from rich.text import Text

from deployments.cli.progress import console

MIN_LAST_CHARS = 20
"""Width that the last column wraps to, if its cells are longer."""
INDENT = "  "
SEPARATOR = " · "


def print_table(headings: Sequence[str], rows: Iterable[Sequence[str | Text]]) -> None:
    """Print a table whose last column wraps, or one paragraph per row if the terminal is too narrow for its columns."""
    texts = [[Text(cell) if isinstance(cell, str) else cell for cell in row] for row in rows]
    *widths, last = (max(cell.cell_len for cell in column) for column in zip(map(Text, headings), *texts, strict=True))
    borders = 3 * len(headings) + 1
    if sum(widths) + min(last, MIN_LAST_CHARS) + borders > console.width:
        for row in texts:
            _print_paragraph(headings, row)
        return
    table = Table(*headings)
    for column in table.columns[:-1]:
        column.no_wrap = True
    table.columns[-1].overflow = "fold"  # paths and addresses are kept whole
    for row in texts:
        table.add_row(*row)
    console.print(table, soft_wrap=False)


def _print_paragraph(headings: Sequence[str], row: Sequence[Text]) -> None:
    """Print the first cell in bold and, after their headings, the others; a line ends between cells if it can."""
    cells = [Text(f"{heading} ") + cell for heading, cell in zip(headings[1:], row[1:], strict=True)]
    width, lines = console.width - len(INDENT), [row[0]]
    row[0].stylize("bold")
    for cell in cells:
        if lines[-1].cell_len + len(SEPARATOR) + cell.cell_len > width:
            lines.append(cell)
        else:
            lines[-1] = lines[-1] + SEPARATOR + cell
    wrapped = [part for line in lines for part in line.wrap(console, width)]
    console.print(Text(f"\n{INDENT}").join(wrapped))
