"""A server of pictures that makes none."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler
from typing import Any, ClassVar

from tests.support.patience import PATIENCE_S


class Server(BaseHTTPRequestHandler):
    """Answers the first request when the last has come; "b" gets an error."""

    seen: ClassVar[list[tuple[str, dict[str, Any]]]] = []
    all_have_come: ClassVar[threading.Event] = threading.Event()
    expected: ClassVar[int] = 0

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.seen.append((self.path, body))
        if len(self.seen) >= self.expected:
            self.all_have_come.set()
        assert self.all_have_come.wait(PATIENCE_S)
        self.send_response(200 if "prompt" in body else 429)
        self.send_header("Server-Timing", "queue;dur=2.5, denoise;dur=5, total;dur=10")
        self.send_header("X-Troupe-Gpu-Seconds", "0.125")
        if body.get("prompt") == "a":
            self.send_header("X-Troupe-Eta", "0.012")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def do_GET(self) -> None:
        """Return the models, or metrics of steps that began with a second a rank; each request adds one."""
        defaults = {"width": 64, "height": 64, "num_frames": 1, "num_inference_steps": 5}
        models = json.dumps({"data": [{"id": "m", "defaults": defaults}]})
        labels = 'troupe_step_seconds_{}{{model="m",num_ranks="2"}} {}.0'
        metrics = "\n".join(
            (
                "# TYPE troupe_step_seconds summary",
                *(labels.format(name, 1 + len(self.seen)) for name in ("count", "sum")),
            )
        )
        text = (metrics + "\n" if self.path == "/metrics" else models).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: object) -> None:
        pass
