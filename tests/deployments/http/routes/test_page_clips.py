"""The web page follows all clips at once, stops and deletes them, and waits while a server is away."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.deployments.http.support.browser import needs_node, run_page

pytestmark = needs_node

SERVER = """
setTimeout = setImmediate;
URL.createObjectURL = () => "blob:";
const records = new Map(), asked = [], answers = new Map();
const newRecord = (id) => {
  const video = { id, prompt: id, status: "queued", progress: 0, num_previews: 0, seed: 5, timings: null, error: null };
  return records.set(id, video).get(id);
};
const json = (document, status = 200) => new Response(JSON.stringify(document), { status });
const gone = () => json({ error: { message: "There is no such video" } }, 404);
const advance = (video) => {
  video.progress += 50;
  video.status = video.progress < 100 ? "in_progress" : "completed";
};
serve = async (request) => {
  asked.push(request);
  const [, method, id, rest] = request.match(/^(\\w+) \\/v1\\/videos\\/?(\\w*)(.*)$/);
  const answer = answers.get(request)?.shift();
  if (answer) return answer();
  if (method === "POST") return json(newRecord(`clip_${records.size}`));
  if (!id) {
    const data = [...records.values()].reverse().slice(0, Number(rest.split("=")[1]));
    data.forEach(advance);
    return json({ data });
  }
  if (!records.has(id)) return gone();
  if (rest === "/events") return new Promise(() => {});  // a stream that lasts
  if (method === "DELETE") records.delete(id);
  if (method === "GET" && !rest) advance(records.get(id));
  return json(records.get(id) ?? {});
};
const notes = () => gallery.all.filter((one) => one.tag === "small").map((note) => note.textContent);
const press = (card, name) => card.all.find((one) => one.textContent === name).onclick();
const print = (value) => console.log(JSON.stringify(value));
"""
"""A server of clips, each half done further with each look at it. ``answers`` overrides the answer to a request."""


def run(folder: Path, then: str) -> Any:
    return run_page(folder, f"{SERVER}(async () => {{ {then} }})();")


def test_more_clips_are_followed_than_a_browser_has_connections(tmp_path: Path) -> None:
    """One look at the list serves all; clips beyond it are fetched one by one."""
    then = """
    const follow = (card, id) => { gallery.append(card.node); return followClip(card, newRecord(id)); };
    await Promise.all(Array.from({ length: 24 }, (_, i) => follow(makeCard(""), `clip_${i}`)));
    print({ notes: notes(), asked });
    """
    seen = run(tmp_path, then)
    assert seen["notes"] == ["seed 5"] * 24
    assert seen["asked"].count("GET /v1/videos?limit=20") == 2
    assert seen["asked"].count("GET /v1/videos/clip_0") == 2  # the oldest
    assert "GET /v1/videos/clip_23" not in seen["asked"]


def test_a_clip_is_stopped_before_its_server_has_answered(tmp_path: Path) -> None:
    then = """
    const made = makeClip({ prompt: "a" }, []);
    press(gallery, "Stop");
    const told = notes();
    await made;
    print({ told, left: notes(), records: records.size, asked });
    """
    seen = run(tmp_path, then)
    assert seen["told"] == ["stopping"]
    assert seen["asked"] == ["POST /v1/videos", "DELETE /v1/videos/clip_0"]
    assert (seen["left"], seen["records"]) == ([], 0)


@pytest.mark.parametrize("moment", ["while it is made", "once it is made"])
def test_a_clip_that_was_deleted_elsewhere_has_no_card(tmp_path: Path, moment: str) -> None:
    if moment == "while it is made":
        then = """
        const made = makeClip({ prompt: "a" }, []);
        while (!records.size) await new Promise(setImmediate);
        records.clear();
        await made;
        """
    else:
        then = """
        await makeClip({ prompt: "a" }, []);
        records.clear();
        await press(gallery, "Delete");
        """
    assert run(tmp_path, f"{then} print(notes());") == []


def test_a_server_that_is_away_is_asked_again(tmp_path: Path) -> None:
    then = """
    const told = [];
    const away = (status) => () => { told.push(notes()[0]); return json({}, status); };
    const none = () => { told.push(notes()[0]); throw new TypeError("Failed to fetch"); };
    answers.set("GET /v1/videos?limit=20", [away(502), none, away(504)]);
    await makeClip({ prompt: "a" }, []);
    print({ told, notes: notes() });
    """
    away = "no answer, asking again"
    assert run(tmp_path, then) == {"told": ["queued", away, away], "notes": ["seed 5"]}


def test_a_refusal_ends_it_and_a_clip_that_failed_can_be_deleted(tmp_path: Path) -> None:
    then = """
    answers.set("GET /v1/videos?limit=20", [() => json({ error: { message: "no such key" } }, 401)]);
    await makeClip({ prompt: "a" }, []);
    const told = notes();
    await press(gallery, "Delete");
    print({ told, left: notes(), records: records.size });
    """
    assert run(tmp_path, then) == {"told": ["no such key"], "left": [], "records": 0}


def test_a_clip_that_cannot_be_stopped_goes_on(tmp_path: Path) -> None:
    then = """
    answers.set("DELETE /v1/videos/clip_0", [() => json({ error: { message: "not now" } }, 503)]);
    const made = makeClip({ prompt: "a" }, []);
    press(gallery, "Stop");
    await made;
    print({ told: gallery.all.find((one) => one.tag === "p").textContent, notes: notes() });
    """
    assert run(tmp_path, then) == {"told": "not now", "notes": ["seed 5"]}
