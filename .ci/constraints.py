"""Print exact pins of all that the installed ``troupe-serve[dev]`` reaches; ``make constraints`` writes them to a file.

Local versions (``2.13.0+cpu``) lose their suffix, so that one file serves CPU and GPU machines.
"""

from __future__ import annotations

from importlib.metadata import Distribution, distribution

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version


def wanted(requirement: Requirement, extras: frozenset[str]) -> bool:
    marker = requirement.marker
    return marker is None or any(marker.evaluate({"extra": extra}) for extra in extras | {""})


def reachable(root: Requirement) -> dict[str, Distribution]:
    """Return the distributions that ``root`` needs here, by canonical name, without ``root`` itself."""
    found: dict[str, Distribution] = {}
    visited: set[tuple[str, frozenset[str]]] = set()
    queue = [root]
    while queue:
        requirement = queue.pop()
        key = (canonicalize_name(requirement.name), frozenset(requirement.extras))
        if key in visited:
            continue
        visited.add(key)
        found[key[0]] = here = distribution(requirement.name)
        parsed = map(Requirement, here.requires or [])
        queue += [child for child in parsed if wanted(child, key[1])]
    del found[canonicalize_name(root.name)]
    return found


def main() -> None:
    print("# Exact versions that the tests pass with. Written by `make constraints`; do not edit.")
    for name, here in sorted(reachable(Requirement("troupe-serve[dev]")).items()):
        print(f"{name}=={Version(here.version).public}")


if __name__ == "__main__":
    main()
