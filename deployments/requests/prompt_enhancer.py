"""Prompts that a language model rewrites, at any chat endpoint of OpenAI's form, before they are encoded.

The endpoint's URL comes from the configuration alone: no field of a request has a part in it.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from deployments.observability.metrics import ENHANCEMENTS
from deployments.requests.enhancer_config import PromptEnhancerConfig
from deployments.requests.fields import Prompt
from pipelines.request import EnhancerOutcome, MediaRequest

if TYPE_CHECKING:
    import httpx

logger = logging.getLogger("troupe.flow")

MAX_ANSWER_BYTES = 1 << 20
MAX_CONNECTIONS = 100
"""Prompts that are rewritten concurrently. Others wait, within their time limit."""
IDLE_S = 2.0
"""Time for which unused connections are kept: less than the five seconds after which many servers close them."""
SHARE_OF_DEADLINE = 0.5
"""Share of the time left until a request's deadline that its prompt may take."""
THOUGHTS = re.compile(r"\s*<think>.*?</think>", re.DOTALL)
"""Reasoning before the answer, where the endpoint leaves it in the text."""
COMPLETE = (None, "stop")
"""Reasons for an answer's end after which it is whole."""


class PromptEnhancers:
    """The enhancers of all models, by model, with the keys of their endpoints by environment variable.

    ``enhanced`` may be called from one event loop.
    """

    def __init__(
        self,
        configs: Mapping[str, PromptEnhancerConfig] = MappingProxyType({}),
        keys: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._configs, self.keys = configs, keys
        self._client: httpx.AsyncClient | None = None

    async def enhanced(self, request: MediaRequest) -> MediaRequest:
        """Return ``request`` with its prompt rewritten, if it asks for that; with the prompt as it came on any failure.

        ``enhancer_outcome`` of the returned request says which.
        """
        if not request.enhance_prompt or not request.prompt:
            return request
        config, start_s = self._configs[request.model], time.monotonic()
        outcome, prompt, reason = await self._ask(config, request)
        took_s = time.monotonic() - start_s
        ENHANCEMENTS.labels(request.model, outcome).observe(took_s)
        later = replace(request, enhancer_outcome=outcome, waited_s=request.waited_s + took_s)
        if outcome == "revised":
            return replace(later, prompt=prompt, given_prompt=request.prompt)
        fields = {"request_id": request.request_id, "model": request.model, "outcome": outcome, "reason": reason}
        logger.warning("a prompt is used as it came: its enhancer failed", extra=fields)
        return later

    async def close(self) -> None:
        """Close connections. The next prompt opens new ones."""
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()

    async def _ask(self, config: PromptEnhancerConfig, request: MediaRequest) -> tuple[EnhancerOutcome, str, str]:
        """Return the outcome, the new prompt, and the reason of a failure."""
        import httpx

        limit_s = config.timeout_s
        if request.deadline_s is not None:
            limit_s = min(limit_s, SHARE_OF_DEADLINE * max(0.0, request.deadline_s - request.waited_s))
        try:
            async with asyncio.timeout(limit_s):
                status, data = await self._post(config, config.body(request.prompt, request.kind))
        except TimeoutError:
            return "timeout", "", f"no answer within {limit_s:g} s"
        except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
            return "unreachable", "", type(error).__name__
        if not httpx.codes.is_success(status):
            return "refused", "", f"status {status}"
        try:
            return "revised", prompt_in(data), ""
        except ValueError as error:
            return "invalid", "", str(error)

    async def _post(self, config: PromptEnhancerConfig, body: Mapping[str, Any]) -> tuple[int, bytes]:
        """Return the status and the content of the answer, of a success alone, cut above ``MAX_ANSWER_BYTES``."""
        key = self.keys.get(config.api_key_variable, "")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        data = bytearray()
        async with self._http().stream("POST", config.endpoint, json=body, headers=headers) as answer:
            if answer.is_success:
                async for piece in answer.aiter_bytes():
                    data += piece
                    if len(data) > MAX_ANSWER_BYTES:
                        break
            return answer.status_code, bytes(data)

    def _http(self) -> httpx.AsyncClient:
        import httpx

        if self._client is None:
            limits = httpx.Limits(max_connections=MAX_CONNECTIONS, keepalive_expiry=IDLE_S)
            self._client = httpx.AsyncClient(trust_env=False, follow_redirects=False, timeout=None, limits=limits)
        return self._client


class _Message(BaseModel):
    content: str


class _Choice(BaseModel):
    message: _Message
    finish_reason: str | None = None


class _ChatAnswer(BaseModel):
    """The part of a chat completion that counts."""

    choices: list[_Choice] = Field(min_length=1)


PROMPTS: TypeAdapter[str] = TypeAdapter(Prompt)


def prompt_in(data: bytes) -> str:
    """Return the prompt in a chat completion. ValueError, without any of its text, if there is no usable one."""
    if len(data) > MAX_ANSWER_BYTES:
        raise ValueError(f"the answer has more than {MAX_ANSWER_BYTES} bytes")
    try:
        choice = _ChatAnswer.model_validate_json(data).choices[0]
    except ValidationError:
        raise ValueError("the answer is no chat completion") from None
    if choice.finish_reason not in COMPLETE:
        raise ValueError(f"the answer is incomplete: finish_reason is {choice.finish_reason[:40]!r}")
    text = choice.message.content
    thoughts = THOUGHTS.match(text)
    try:
        return PROMPTS.validate_python(text[thoughts.end() if thoughts else 0 :].strip())
    except ValidationError as error:
        raise ValueError(f"the answer is no prompt: {error.errors()[0]['msg']}") from None
