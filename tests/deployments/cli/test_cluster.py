"""What a cluster of our own does without."""

from __future__ import annotations

import pytest
from ray._private.node import Node

from deployments.cli.cluster import UNASKED_SERVERS, only_servers_that_are_asked


def test_a_node_has_its_own_way_to_start_again_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[str] = []
    for name in UNASKED_SERVERS:
        assert hasattr(Node, name), "Ray calls it otherwise now"
        monkeypatch.setattr(Node, name, lambda node, name=name, **options: started.append(name))
    node = Node.__new__(Node)

    def start() -> None:
        node.start_log_monitor()  # type: ignore[no-untyped-call]
        node.start_monitor()  # type: ignore[no-untyped-call]
        node.start_api_server(include_dashboard=False, raise_on_failure=False)

    with only_servers_that_are_asked():
        start()
        assert started == []
    start()
    assert started == list(UNASKED_SERVERS)
    with pytest.raises(ZeroDivisionError), only_servers_that_are_asked():
        raise ZeroDivisionError
    start()
    assert started == [*UNASKED_SERVERS, *UNASKED_SERVERS]
