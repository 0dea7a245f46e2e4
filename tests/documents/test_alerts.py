"""docs/operate/alerts.yaml uses series and labels that exist, and its alerts fire."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deployments.observability.test_dashboard import labels_by_series
from tests.support.fenced import ROOT

FILE = ROOT / "docs" / "operate" / "alerts.yaml"
RULES: list[dict[str, Any]] = [rule for group in yaml.safe_load(FILE.read_text())["groups"] for rule in group["rules"]]
BY_NAME = {rule["alert"]: rule for rule in RULES}
OF_PROCESSES = {"job", "instance", "replica"}
OF_LIBRARIES = {
    "up": {"job", "instance"},
    "process_open_fds": OF_PROCESSES,
    "process_max_fds": OF_PROCESSES,
}
"""Prometheus's own series, and those of its client's process collector."""
PROMTOOL = shutil.which("promtool")


def seconds(name: str, below: float, above: float) -> dict[str, str]:
    """Return a histogram with all values between ``below`` and ``above``."""
    buckets = {f"{below:g}": "0+0x180", f"{above:g}": "0+10x180", "+Inf": "0+10x180"}
    return {f'{name}_bucket{{model="a", le="{bound}"}}': values for bound, values in buckets.items()}


FIRES: dict[str, tuple[dict[str, str], str]] = {
    "TroupeDown": ({'up{job="troupe", instance="host:9464"}': "0x120"}, "3m"),
    "TroupeNoGang": ({'troupe_requests_open{model="a", tier="default"}': "1x120"}, "10m"),
    "TroupeRunsFail": ({'troupe_request_failures_total{model="a", cause="GangBrokenError"}': "_x20 1x100"}, "22m"),
    "TroupeErrors": (
        {
            'troupe_http_requests_total{status="200"}': "0+90x120",
            'troupe_http_requests_total{status="500"}': "0+10x120",
        },
        "30m",
    ),
    "TroupeRefusals": (
        {
            'troupe_http_requests_total{status="200"}': "0+50x120",
            'troupe_http_requests_total{status="429"}': "0+50x120",
        },
        "40m",
    ),
    "TroupeOpenFiles": (
        {
            'process_open_fds{job="troupe", replica="r"}': "90x120",
            'process_max_fds{job="troupe", replica="r"}': "100x120",
        },
        "10m",
    ),
    "TroupeQueueSlow": (seconds("troupe_queue_seconds", 60, 120), "40m"),
    "TroupeClipsWait": (seconds("troupe_clip_wait_seconds", 300, 600), "60m"),
    "TroupePredictionsShort": (seconds("troupe_prediction_ratio", 1.5, 2), "90m"),
    "TroupeDeadlinesMissed": (
        {f'troupe_deadlines_total{{model="a", outcome="{outcome}"}}': "0+5x120" for outcome in ("met", "missed")},
        "60m",
    ),
    "TroupeColdShapes": (
        {
            'troupe_cold_jobs_total{model="a"}': "0+2x180",
            'troupe_jobs_total{model="a", outcome="done"}': "0+9x180",
        },
        "150m",
    ),
}
"""Series, a sample a minute each, under which an alert fires, and the time."""
QUIET = {
    'up{job="troupe", instance="host:9464"}': "1x120",
    'troupe_requests_open{model="a", tier="default"}': "1x120",
    'troupe_gangs{model="a", replica="r"}': "1x120",
    'troupe_request_failures_total{model="a", cause="GangBrokenError"}': "1x120",
    'troupe_http_requests_total{status="200"}': "0+90x120",
    'troupe_http_requests_total{status="429"}': "0+1x120",
}
"""Series of a working server, under which no alert fires."""


@pytest.mark.parametrize("name", BY_NAME)
def test_a_rule_asks_for_what_there_is(name: str) -> None:
    rule, known = BY_NAME[name], labels_by_series() | OF_LIBRARIES
    series = re.findall(r"\b(troupe_\w+|process_\w+|up)\b(?:\{([^}]*)\})?", rule["expr"])
    assert series
    grouped = {label for words in re.findall(r"by \(([^)]*)\)", rule["expr"]) for label in re.split(r",\s*", words)}
    shown = set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"]))
    for one, selectors in series:
        selected = set(re.findall(r"(\w+)(?:=~|!~|!=|=)\"", selectors))
        assert grouped | selected <= known[one] | {"job"}, f"{one} has {known[one]}"
        assert shown <= (grouped or known[one])
    assert set(rule) - {"for"} == {"alert", "expr", "labels", "annotations"}
    assert re.fullmatch(r"\d+[mh]", rule.get("for", "1m"))
    assert rule["labels"]["severity"] in ("page", "ticket")


def test_every_alert_has_a_case_in_which_it_fires() -> None:
    assert set(FIRES) == set(BY_NAME)


def test_the_document_explains_every_alert() -> None:
    rows = re.findall(r"^\| `(Troupe\w+)` \|", (ROOT / "docs/operate/monitoring.md").read_text(), re.MULTILINE)
    assert rows == list(BY_NAME)


@pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed (Debian: apt-get install prometheus)")
def test_alerts_fire_and_are_quiet(tmp_path: Path) -> None:
    cases = [({**QUIET}, "100m", name, False) for name in BY_NAME]
    cases += [(series, when, name, True) for name, (series, when) in FIRES.items()]
    tests = [unit_test(*case) for case in cases]
    file = tmp_path / "tests.yaml"
    file.write_text(yaml.safe_dump({"rule_files": [str(FILE)], "evaluation_interval": "1m", "tests": tests}))
    done = subprocess.run([str(PROMTOOL), "test", "rules", str(file)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def unit_test(series: dict[str, str], when: str, name: str, fires: bool) -> dict[str, Any]:
    """Return a test in promtool's format: whether an alert fires at ``when`` under ``series``."""
    inputs = [{"series": one, "values": values} for one, values in series.items()]
    query = f'count(ALERTS{{alertname="{name}", alertstate="firing"}})'
    expected = [{"labels": "{}", "value": 1}] if fires else []
    wanted = {"expr": query, "eval_time": when, "exp_samples": expected}
    return {"interval": "1m", "input_series": inputs, "promql_expr_test": [wanted]}
