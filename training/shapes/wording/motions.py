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
OWN_VERBS: dict[str, Verbs] = {  # these say by themselves where they lead
    "left": (),
    "right": (),
    "up": (("rises", "rising", "rise"), ("climbs", "climbing", "climb")),
    "down": (("falls", "falling", "fall"), ("sinks", "sinking", "sink"), ("drops", "dropping", "drop")),
}
TOWARDS = {
    "left": "(left|to the left|to the left|to the left side|over to the left|leftwards|towards the left"
    "|from right to left|from the right to the left)",
    "right": "(right|to the right|to the right|to the right side|over to the right|rightwards|towards the right"
    "|from left to right|from the left to the right)",
    "up": "(up|up|upwards|upward|to the top|towards the top|from bottom to top|from the bottom to the top)",
    "down": "(down|down|downwards|downward|to the bottom|towards the bottom|from top to bottom"
    "|from the top to the bottom)",
}
