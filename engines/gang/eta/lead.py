"""How long before the end of a step the next one is sent: as long as hides what a call takes, and no longer.

What is sent cannot be changed any more: who comes meanwhile waits for it. Where steps take seconds, as those of clips,
that is most of what a small picture beside them waits for.
"""

from __future__ import annotations

LEAD_S = 0.1
"""So much work a rank has before it at least: a call takes milliseconds, in a process with many streams more."""
LEAD_SHARE = 0.25
"""Of a step: so much sooner than predicted it may end without a gap after it."""


def lead_s(step_s: float) -> float:
    """Returns the seconds before the end of a step that is predicted to take ``step_s``."""
    return max(LEAD_S, LEAD_SHARE * step_s)
