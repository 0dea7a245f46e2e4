"""Fixtures of the HTTP API, through which some rules are tested."""

from tests.deployments.http.conftest import api, client, service, url

__all__ = ["api", "client", "service", "url"]
