"""Print ``tests/durations.json``: seconds by test file, from a JUnit report of pytest (``make durations``)."""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parents[1]


def durations_s(report: Path) -> dict[str, float]:
    """Return the seconds that the tests of each file took, their fixtures included. Files have their names' order."""
    found: defaultdict[str, float] = defaultdict(float)
    for case in ElementTree.parse(report).iter("testcase"):
        file = case.attrib["classname"].replace(".", "/") + ".py"
        if not (ROOT / file).is_file():
            raise SystemExit(f"{report} names {file}, which is not there: run the tests of this checkout again")
        found[file] += float(case.attrib["time"])
    return {file: round(seconds, 1) for file, seconds in sorted(found.items())}


if __name__ == "__main__":
    print(json.dumps(durations_s(Path(sys.argv[1])), indent=1))
