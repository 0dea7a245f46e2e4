"""Benchmarks call servers of this machine directly, whatever proxies the environment names."""

from __future__ import annotations

import ast

import pytest

from benchmarks.load.__main__ import text_of
from tests.deployments.door.support import Backend, served
from tests.layout.support.source import python_files, tree_of

MAKERS = {f"httpx.{name}" for name in ("AsyncClient", "Client", "get", "post", "stream", "request")}


def test_no_client_is_made_without_asking_whether_proxies_are_for_it() -> None:
    said = {
        f"{name}:{node.lineno}": {word.arg for word in node.keywords}
        for name in python_files("benchmarks")
        for node in ast.walk(tree_of(name))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in MAKERS
    }
    assert said
    assert [place for place, words in said.items() if "trust_env" not in words] == []


def test_a_page_of_metrics_is_asked_for_directly(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # nothing answers there
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    with served(Backend()) as (_, port):
        assert text_of(f"http://127.0.0.1:{port}/metrics")
