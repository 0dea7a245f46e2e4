"""Python callers use the running application through handles of Serve."""

from __future__ import annotations

import io
from typing import Any

import pytest
from PIL import Image
from ray import serve

from deployments.ray_private import application_status
from deployments.service.interface import Media, Preview, Progress
from tests.deployments.support.bare import frames_of
from tests.deployments.support.chat_endpoint import ChatEndpoint
from tests.deployments.support.live import PROMPT, SMALL, picture, wait_until
from tests.end_to_end.conftest import CLIPS, SMALL_CLIP


async def test_handle_for_a_picture(url: str) -> None:
    handle: Any = serve.get_app_handle("troupe").options(stream=True)
    events = [event async for event in handle.generate.remote(PROMPT, **SMALL, seed=5, partial_images=1)]
    assert [event.step for event in events if isinstance(event, Progress)] == list(range(1, 9))
    assert sum(isinstance(event, Preview) for event in events) == 1
    assert isinstance(events[-1], Media)
    assert events[-1].data == picture(url, seed=5)


async def test_handle_for_a_clip(url: str) -> None:
    handle: Any = serve.get_app_handle("troupe").options(stream=True)
    events = [
        event async for event in handle.generate.remote(PROMPT, model=CLIPS, seed=5, **SMALL_CLIP | {"num_frames": 5})
    ]
    assert [event.step for event in events if isinstance(event, Progress)] == list(range(1, 7))
    assert any(isinstance(event, Preview) for event in events)
    assert isinstance(events[-1], Media)
    assert len(frames_of(events[-1].data)) == 5
    assert Image.open(io.BytesIO(events[-1].thumbnail)).format == "WEBP"


async def test_handle_with_an_enhanced_prompt(url: str, enhancer: ChatEndpoint) -> None:
    handle: Any = serve.get_app_handle("troupe").options(stream=True)
    fields = {**SMALL, "seed": 5, "enhance_prompt": True}
    *_, media = [event async for event in handle.generate.remote("something round", **fields)]
    assert media.revised_prompt == "a red circle in the evening sun"
    assert media.data == picture(url, seed=5, prompt=media.revised_prompt)
    assert "something round" in enhancer.bodies[-1]["messages"][0]["content"]


async def test_handle_with_bad_fields_says_what_is_wrong(url: str) -> None:
    handle: Any = serve.get_app_handle("troupe").options(stream=True)
    with pytest.raises(ValueError, match="multiples of"):
        async for _ in handle.generate.remote(PROMPT, size="63x64"):
            pass
    with pytest.raises(ValueError, match="Unknown field 'sed'"):
        async for _ in handle.generate.remote(PROMPT, sed=1):
            pass


def test_the_status_is_what_serve_says(url: str) -> None:
    def are_equal() -> bool:
        """Return whether both agree; they differ if a replica is lost between them."""
        status = serve.status().applications["troupe"]
        assert {"Ingress", f"Denoiser-{CLIPS}"} < set(status.deployments)
        return application_status() == status

    wait_until(are_equal, "the two are one")
