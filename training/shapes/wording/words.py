"""Synonyms. A word that is in one table has no other meaning in any other."""

SHAPE_WORDS = {
    "circle": "(circle|circle|circle|circle|circle|disc|disk|dot|ball|round shape|circular shape)",
    "square": "(square|square|square|square|square|box|block|tile|square shape)",
    "triangle": "(triangle|triangle|triangle|triangle|triangle|pyramid|triangular shape|three-sided shape)",
    "star": "(star|star|star|star|star|star shape|five-pointed star|pentagram)",
}
SIZE_WORDS = {
    "small": "(small|small|small|little|tiny|mini|miniature)",
    "medium": "(medium|medium-sized|mid-sized)",
    "large": "(large|large|large|big|huge|giant|enormous)",
}
COLOUR_WORDS = {"purple": "(purple|purple|violet)", "grey": "(grey|gray)"}
THINGS = (  # an item; two of five are in the plainest order
    *("@ [{size} ]{colour} {shape}",) * 11,
    "@ {colour} [{size} ]{shape}",
    "@ [{size} ]{shape} in {colour}",
    "@ [{size} ]{shape}, {colour},",
    "@ [{size} ]{colour} coloured {shape}",
    "@ [{size} ]{shape} (that|which) is {colour}",
    "@ {colour} {shape}[ (that|which) is {size}]",
    "@ [{size} ]{shape} coloured {colour}",
    "@ {shape}[, {size}], {colour},",
    "@ [{size}, ]{colour} {shape}",
    "@ {colour}[ and {size}] {shape}",
    "@ {shape} that is [{size} and ]{colour}",
    "@ {shape}[ that is {size}], coloured {colour},",
    "@ [{size} ]{shape} (painted|drawn) (|in ){colour}",
    "@ {shape}, [{size}, ]{colour},",
    "@ [{size} ]{shape} of {colour} colour",
)
MIDDLE = "(centre|center|middle)"
OF_IT = "(||| of the picture| of the image)"
PLACES_AT = {
    "centre": (
        f"(in|at) the (||very |exact ){MIDDLE}{OF_IT}",
        f"in the {MIDDLE}",
        "(centred|centered)",
        f"(placed|put) in the {MIDDLE}",
    ),
    "left": (
        "(on|at|to) the left(|| side| edge| of the picture)",
        "on the (far left|left-hand side)",
        "at left",
        "over to the left",
    ),
    "right": (
        "(on|at|to) the right(|| side| edge| of the picture)",
        "on the (far right|right-hand side)",
        "at right",
        "over to the right",
    ),
    "top": (
        f"(at|near|by|on) the top{OF_IT}",
        "(at|near) the (upper|top) (edge|side)",
        "(up at|up near) the top",
        "up top",
    ),
    "bottom": (
        f"(at|near|by|on) the bottom{OF_IT}",
        "(at|near) the (lower|bottom) (edge|side)",
        "(down at|down near) the bottom",
        "at bottom",
    ),
}
CORNERS_AT = (
    "(at|in) the {row} {column}(| corner)",
    "in the {row}-{column} corner",
    "(at|in) the {column} {row} corner",
    "in the corner at the {row} {column}",
    "{row} {column}(| corner)",
    "{row}-{column}",
    "at the {end}, on the {column}",
)
MORE_PLACES_AT = {  # besides those above, which held-out templates have too
    "centre": (f"(by|near|close to) the {MIDDLE}{OF_IT}",),
    **{
        side: (
            f"(by|near) the {side}(| border)",
            f"(near|at) the {side}(-hand side|-hand edge| edge)",
            f"on the {side} (border|half)",
            f"over on the {side}(| side)",
        )
        for side in ("left", "right")
    },
    **{
        side: (
            f"(by|on|close to) the ({side}|{row}) (edge|border)",
            f"on the ({side}|{row}) half",
            f"over (at|by) the {side}",
            f"close to the {side}",
        )
        for side, row in (("top", "upper"), ("bottom", "lower"))
    },
}
MORE_CORNERS_AT = (
    "(by|close to|over in) the {row}-{column} corner",
    "at the {end} on the {column} side",
    "on the {column} side at the {end}",
    "at the {end} of the {column} side",
    "{row} {column}, in the corner",
    "in the {column} {row} of the picture",
    "to the {row} {column}",
)
ROW_WORDS = {"top": "(top|top|upper)", "bottom": "(bottom|bottom|lower)"}
SIDES = {  # a place as a name
    "centre": f"(|the ){MIDDLE}",
    "left": "(|the )left(| side)",
    "right": "(|the )right(| side)",
    "top": "(|the )(top|upper edge)",
    "bottom": "(|the )(bottom|lower edge)",
}
CORNER_SIDES = "(|the ){row}(-| ){column}(| corner)"
RELATION_WORDS = {  # of the first item to the second, and of the second to the first
    "above": (
        "(above|over|on top of|higher than|just above|placed above)",
        "(below|under|beneath|underneath|lower than|just below|placed below)",
    ),
    "left of": (
        "(left of|to the left of|on the left of|on the left side of|just left of)",
        "(right of|to the right of|on the right of|on the right side of|just right of)",
    ),
}
