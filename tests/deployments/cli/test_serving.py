"""Into a cluster that is there already."""

from __future__ import annotations

import pytest
from ray import serve
from ray.serve.config import HTTPOptions

from deployments.cli.serving import free_port, load_config, running


def test_serve_that_runs_at_another_address_is_said_at_once(ray_cluster: None) -> None:
    serve.start(http_options=HTTPOptions(port=free_port("127.0.0.1")))
    try:
        with (
            pytest.raises(ValueError, match="Ray Serve is already running"),
            running(load_config("laptop").with_http(port=0)),
        ):
            pass
        assert serve.status().proxies, "it is left as it was"
    finally:
        serve.shutdown()
