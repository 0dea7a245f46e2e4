"""Print ``tests/durations.json``: seconds by test file, from a JUnit report of pytest (``make durations``).

CPU seconds of each folder, processes that its tests start included, must be within ``tests/budget.json``.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parents[1]
BUDGET = ROOT / "tests" / "budget.json"
CPU = "cpu_s"
"""Property of a test case (tests/conftest.py)."""


def durations_s(report: Path) -> dict[str, float]:
    """Return the seconds that the tests of each file took, their fixtures included. Files have their names' order."""
    found: defaultdict[str, float] = defaultdict(float)
    for file, case in cases(report):
        found[file] += float(case.attrib["time"])
    return {file: round(seconds, 1) for file, seconds in sorted(found.items())}


def cases(report: Path) -> Iterator[tuple[str, ElementTree.Element]]:
    """Yield each test case with its file."""
    for case in ElementTree.parse(report).iter("testcase"):
        file = case.attrib["classname"].replace(".", "/") + ".py"
        if not (ROOT / file).is_file():
            raise SystemExit(f"{report} names {file}, which is not there: run the tests of this checkout again")
        yield file, case


def cpu_s(report: Path) -> dict[str, float]:
    """Return the CPU seconds of each folder of ``tests``; those of files in no folder are of ``tests`` itself."""
    found: defaultdict[str, float] = defaultdict(float)
    for file, case in cases(report):
        folder = "/".join(Path(file).parts[:2]) if len(Path(file).parts) > 2 else "tests"
        found[folder] += sum(float(one.attrib["value"]) for one in case.iter("property") if one.attrib["name"] == CPU)
    return dict(found)


def over_budget(used_s: Mapping[str, float], budget_s: Mapping[str, float]) -> list[str]:
    """Return a sentence for each folder that takes more than its budget, or has none."""
    return [
        f"{folder} takes {seconds:.0f} CPU seconds, its budget in tests/budget.json is {budget_s.get(folder, 0):g}"
        for folder, seconds in sorted(used_s.items())
        if seconds > budget_s.get(folder, 0)
    ]


if __name__ == "__main__":
    junit = Path(sys.argv[1])
    if sys.argv[2:] == ["--budget"]:
        sys.exit("\n".join(over_budget(cpu_s(junit), json.loads(BUDGET.read_text()))) or None)
    print(json.dumps(durations_s(junit), indent=1))
