"""Configuration of prompt enhancers."""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, JsonValue, field_validator

from pipelines.request import MediaKind

ROUTE = "/chat/completions"
PLACE = "{prompt}"
"""Stands for the prompt in a template, as ``{kind}`` does for image or video."""
TEMPLATE = (
    "Rewrite this prompt for a text-to-{kind} model. Keep its meaning, its language, and every text in quotes. Add "
    "what it leaves open: subject, setting, light, colours, composition, style. Answer with the new prompt alone, in "
    "one paragraph of at most 120 words.\n\nPrompt: {prompt}"
)
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
RESERVED = ("model", "messages", "stream", "n")
"""Fields of the endpoint's body that ``parameters`` may not set."""


class PromptEnhancerConfig(BaseModel):
    """A chat endpoint that rewrites prompts."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    url: str
    """Start of an OpenAI-compatible API, such as http://127.0.0.1:11434/v1, or the whole URL of its chat route."""
    model: str = Field(min_length=1)
    """Name of the model there."""
    template: str = ""
    """The message to it; {prompt} stands for the prompt, {kind} for image or video. Empty: ``TEMPLATE``."""
    api_key_variable: str = ""
    """Name of the environment variable that holds the endpoint's key; empty: it needs none."""
    timeout_s: float = Field(default=10.0, gt=0, le=120)
    """Longest time for one prompt."""
    default: bool = False
    """For requests that do not say ``enhance_prompt``."""
    parameters: dict[str, JsonValue] = {}
    """Further fields of the endpoint's body, such as ``temperature``."""

    @field_validator("url")
    @classmethod
    def _check_url(cls, url: str) -> str:
        try:
            parts = urlsplit(url)
            is_valid = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
        except ValueError:
            is_valid = False
        if not is_valid or "@" in parts.netloc or parts.fragment or parts.query or re.search(r"\s", url):
            allowed = "http:// or https:// and a host, without user, query or fragment: http://127.0.0.1:11434/v1"
            raise ValueError(f"it must be a URL of {allowed}")
        return url.rstrip("/")

    @field_validator("template")
    @classmethod
    def _check_template(cls, template: str) -> str:
        if template and template.count(PLACE) != 1:
            raise ValueError(f"it must hold {PLACE} once, where the prompt belongs")
        return template

    @field_validator("api_key_variable")
    @classmethod
    def _check_variable(cls, name: str) -> str:
        if name and not VARIABLE.fullmatch(name):
            raise ValueError("it must be the name of an environment variable, such as OPENAI_API_KEY, not the key")
        return name

    @field_validator("parameters")
    @classmethod
    def _check_parameters(cls, parameters: dict[str, JsonValue]) -> dict[str, JsonValue]:
        if taken := [name for name in RESERVED if name in parameters]:
            raise ValueError(f"{', '.join(taken)} cannot be set here: {', '.join(RESERVED)} are the server's own")
        return parameters

    @property
    def endpoint(self) -> str:
        """The URL that prompts are posted to."""
        return self.url if self.url.endswith(ROUTE) else f"{self.url}{ROUTE}"

    def body(self, prompt: str, kind: MediaKind) -> dict[str, Any]:
        """Return the endpoint's body for ``prompt``. Braces in the prompt mean nothing."""
        before, _, after = (part.replace("{kind}", kind) for part in (self.template or TEMPLATE).partition(PLACE))
        message = {"role": "user", "content": f"{before}{prompt}{after}"}
        return {**self.parameters, "model": self.model, "messages": [message]}
