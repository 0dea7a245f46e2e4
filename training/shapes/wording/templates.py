"""Templates of whole phrases. `shown` has those of training, `unseen` and `fresh` two sets that are held
out for evaluation; the three share words and no template.

`{item}` is the only item, `{first}` and `{second}` are two, `{at}` where one is and `{side}` the name of that place; a
1 or 2 says whose. `{relation}` is of the first to the second, `{inverse}` of the second to the first. `{body}` is what
a body says, `{on}` and `{ground}` the background, after what lies on it and by itself; `{colour}` is its colour alone.
`{part1}` and `{part2}` say one of two items and its place, by a template of `part`. An `opening`
comes before all of it and means nothing.
"""

from dataclasses import dataclass

DRAW = (
    "(draw|paint|show|make|create|give me|show me|I want|I need|I would like|please draw|can you draw|let me see"
    "|sketch|generate|render|produce|display|imagine|could you paint|please make|I wish for|I am looking for|add)"
)
PICTURE = "(a picture of|a drawing of|an image of|a picture with|an image with|a picture that shows)"
THERE = "(there is|there's|we see|you see|it shows|here is|I can see|we have|look at)"
BE = "(is|sits|lies|stands|rests|appears|is placed|is drawn)"


@dataclass(frozen=True, kw_only=True, slots=True)
class Templates:
    """Templates for one item, two, two by relation, two by their places, a moving one, and for backgrounds."""

    one: tuple[str, ...]
    pair: tuple[str, ...]
    relation: tuple[str, ...]
    places: tuple[str, ...]
    motion: tuple[str, ...]
    whole: tuple[str, ...]
    on: tuple[str, ...]
    ground: tuple[str, ...]
    part: tuple[str, ...] = ()
    opening: tuple[str, ...] = ()
