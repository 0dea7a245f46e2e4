"""A gang wider than a node, on a cluster of two nodes in one machine."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.support.patience import PATIENCE_S


@pytest.mark.ray
@pytest.mark.slow
def test_ranks_go_to_nodes_in_node_order() -> None:
    command = [sys.executable, "-m", "tests.engines.gang.support.two_nodes"]
    # The script starts two raylets and a gang, one after the other.
    run = subprocess.run(command, capture_output=True, text=True, check=True, timeout=2 * PATIENCE_S)
    nodes = json.loads(run.stdout.splitlines()[-1])
    assert nodes[0] == nodes[1] != nodes[2] == nodes[3]
