"""How long things took, as it was measured: in a file, so that who starts again knows it."""

from __future__ import annotations

import json
import logging
import threading
from collections import defaultdict, deque
from collections.abc import Mapping
from pathlib import Path
from statistics import median

from engines.core.storage.files import write_atomically

logger = logging.getLogger(__name__)

NUM_NEWEST = 32
"""Newest times of one kind, whose median counts."""
MIN_CHANGE = 0.1
"""A time that is known is replaced only by one that differs by so much, so that decisions stay what they were."""
MAX_KINDS = 1000
"""Sizes and lengths of prompts come in any number: of more, those whose times changed last are kept."""

Kind = tuple[str, int]
"""What a time is of: a name and a number."""

KeptTime = tuple[float, float | None]
"""Seconds as measured, and as they were estimated; None where nobody did."""


class KeptTimes:
    """``file`` has them by kind; it is made when there is something to keep, and belongs to one machine, model and
    software (its name should say which). None keeps them in memory alone. Any thread may call.

    A kind is known once there are ``num_first`` times of it, and corrected by ``num_needed`` or more. ``what`` they are
    times of is for the log.
    """

    def __init__(self, file: Path | None, what: str, *, num_first: int, num_needed: int) -> None:
        self._file, self._what = file, what
        self._num_first, self._num_needed = num_first, num_needed
        self._known = self._read()
        self._newest: defaultdict[Kind, deque[float]] = defaultdict(lambda: deque(maxlen=NUM_NEWEST))
        self._heard: dict[Kind, float | None] = {}
        """Kinds of which there is news, and what was estimated of them."""
        self._lock, self._writing = threading.Lock(), threading.Lock()

    @property
    def known(self) -> dict[Kind, KeptTime]:
        with self._lock:
            return dict(self._known)

    def hear(self, kind: Kind, time_s: float, estimate_s: float | None = None) -> None:
        """Takes a time, which counts from the next ``update`` on."""
        with self._lock:
            self._newest[kind].append(time_s)
            self._heard[kind] = estimate_s

    def update(self) -> dict[Kind, float]:
        """Returns the times that what was heard since makes others, as they are from then on."""
        with self._lock:
            medians_s = {kind: round(median(self._newest[kind]), 6) for kind in self._heard}
            news = {kind: time_s for kind, time_s in medians_s.items() if self._is_news(kind, time_s)}
            changed = {kind: (time_s, self._heard[kind]) for kind, time_s in news.items()}
            self._known = _with(self._known, changed)
            self._heard.clear()
            for kind in [*self._newest][:-MAX_KINDS]:
                del self._newest[kind]
            return news

    def save(self) -> None:
        """Writes the file, with what others have written there meanwhile; waits for the disk."""
        if self._file is None:
            return
        with self._writing:
            kept = _with(self._read(), self.known)
            try:
                write_atomically(self._file, json.dumps(_nested(kept), indent=1).encode())
            except OSError as error:  # it is measured again the next time
                logger.warning("the times of %s cannot be kept in %s: %s", self._what, self._file, error)

    def _is_news(self, kind: Kind, time_s: float) -> bool:
        num_times = len(self._newest[kind])
        if kind not in self._known:
            return num_times >= self._num_first
        known_s, _ = self._known[kind]
        return num_times >= self._num_needed and abs(time_s - known_s) > MIN_CHANGE * known_s

    def _read(self) -> dict[Kind, KeptTime]:
        """Returns what was kept; nothing where there is no such file, or none that can be read."""
        try:
            nested = {} if self._file is None else json.loads(self._file.read_text())
            return {
                (name, int(number)): (float(time_s), None if estimate_s is None else float(estimate_s))
                for name, by_number in nested.items()
                for number, (time_s, estimate_s) in by_number.items()
            }
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, AttributeError, TypeError) as error:
            logger.warning("%s holds no times of %s (%s): they are measured anew", self._file, self._what, error)
            return {}


def _with(old: Mapping[Kind, KeptTime], new: Mapping[Kind, KeptTime]) -> dict[Kind, KeptTime]:
    """Returns both, the new ones last, without the first of too many."""
    both = [*((kind, time) for kind, time in old.items() if kind not in new), *new.items()]
    return dict(both[-MAX_KINDS:])


def _nested(kept: Mapping[Kind, KeptTime]) -> dict[str, dict[str, KeptTime]]:
    nested: defaultdict[str, dict[str, KeptTime]] = defaultdict(dict)
    for (name, number), time in kept.items():
        nested[name][str(number)] = time
    return nested
