"""Words for motions: verbs in the three forms that templates take (moves, moving, move), and where they lead."""

_ALONG = (
    ("moves", "moving", "move"),
    ("moves", "moving", "move"),
    ("slides", "sliding", "slide"),
    ("goes", "going", "go"),
    ("glides", "gliding", "glide"),
    ("travels", "travelling", "travel"),
    ("drifts", "drifting", "drift"),
    ("shifts", "shifting", "shift"),
    ("flies", "flying", "fly"),
)
FORMS = ("moves", "moving", "move")
Verbs = tuple[tuple[str, str, str], ...]
VERBS: dict[str, Verbs] = {
    **dict.fromkeys(("left", "right", "up", "down"), _ALONG),
    "grow": (
        ("grows", "growing", "grow"),
        ("grows", "growing", "grow"),
        ("gets bigger", "getting bigger", "get bigger"),
        ("becomes larger", "becoming larger", "become larger"),
        ("expands", "expanding", "expand"),
        ("swells", "swelling", "swell"),
        ("increases in size", "increasing in size", "increase in size"),
    ),
    "shrink": (
        ("shrinks", "shrinking", "shrink"),
        ("shrinks", "shrinking", "shrink"),
        ("gets smaller", "getting smaller", "get smaller"),
        ("becomes smaller", "becoming smaller", "become smaller"),
        ("contracts", "contracting", "contract"),
        ("dwindles", "dwindling", "dwindle"),
        ("decreases in size", "decreasing in size", "decrease in size"),
    ),
    "turn": (
        ("turns", "turning", "turn"),
        ("rotates", "rotating", "rotate"),
        ("spins", "spinning", "spin"),
        ("turns around", "turning around", "turn around"),
        ("twirls", "twirling", "twirl"),
        ("revolves", "revolving", "revolve"),
    ),
}
OWN_VERBS: dict[str, Verbs] = {  # verbs that include the direction
    "left": (),
    "right": (),
    "up": (("rises", "rising", "rise"), ("climbs", "climbing", "climb")),
    "down": (("falls", "falling", "fall"), ("sinks", "sinking", "sink"), ("drops", "dropping", "drop")),
}


def _sideways(start: str, end: str) -> tuple[str, ...]:
    """Return where a motion leads from the side `start` to the side `end`: half of it in the plainest words."""
    plain = (
        *(f"{end}", f"to the {end}", f"to the {end}", f"to the {end} side", f"{end}wards", f"towards the {end}"),
        *(f"from {start} to {end}", f"from the {start} to the {end}"),
    )
    edge, anywhere = "(edge|border|end)", "(| side| edge| border)"
    return (
        *plain * 2,
        *_across(
            f"{start} {edge}", f"{end} {edge}", f"{start}{anywhere}", f"{end}(| edge| border)", f"({end}|{end}wards)"
        ),
        f"from the {start} side to the {end}(| edge| border)",
        f"from the {start}(| edge| border) to the {end} side",
        f"from the {start}-hand side to the {end}-hand side",
        f"{end} from the {start}{anywhere}",
        f"over to the {end} (edge|border|side)",
    )


def _upright(start: str, end: str, towards: str) -> tuple[str, ...]:
    """Return where a motion leads from one of bottom and top to the other: half of it in the plainest words."""
    plain = (
        *(f"{towards}", f"{towards}", f"{towards}wards", f"{towards}ward", f"to the {end}", f"towards the {end}"),
        *(f"from {start} to {end}", f"from the {start} to the {end}"),
    )
    low, high = (_ROWS[start], _ROWS[end])
    edge, anywhere = "(edge|border|end|side)", "(edge|border|side)"
    lead = f"({towards}|{towards}wards|{towards}ward)"
    return (
        *plain * 2,
        *_across(f"{low} {edge}", f"{high} {edge}", f"({start}|{low} {anywhere})", f"({end}|{high} {anywhere})", lead),
        f"from the {start} {lead}",
        f"{lead} from the {low} {edge}",
        f"{lead} to the {high} {edge}",
        f"{lead} towards the ({end}|{high} {edge})",
        f"all the way {towards}",
    )


def _across(start_edge: str, end_edge: str, start: str, end: str, lead: str) -> tuple[str, ...]:
    """Return the phrases that name both directions."""
    return (
        f"from the {start_edge} to the {end_edge}",
        f"from {start_edge} to {end_edge}",
        f"from the {start} towards the {end}",
        f"from the {start} (over|across|all the way) to the {end}",
        f"to the {end} from the {start}",
        f"to the {end}, starting (at|on|from) the {start}",
        f"{lead}, starting (at|on|from) the {start}",
        f"starting (at|on) the {start} and ending (at|on|near) the {end}",
        f"(out of|away from) the {start}, {lead}",
        f"(out of|away from) the {start} to the {end}",
        f"across the (picture|image) to the {end}",
        f"all the way to the {end}",
    )


_ROWS = {"top": "(top|upper)", "bottom": "(bottom|lower)"}
TOWARDS = {
    "left": _sideways("right", "left"),
    "right": _sideways("left", "right"),
    "up": _upright("bottom", "top", "up"),
    "down": _upright("top", "bottom", "down"),
}
OWN_TOWARDS = {  # directions of verbs that include it
    motion: ("", "", "", f"from the {start}", f"to the {end}", f"from the {_ROWS[start]} edge to the {_ROWS[end]} edge")
    for motion, start, end in (("up", "bottom", "top"), ("down", "top", "bottom"))
}
