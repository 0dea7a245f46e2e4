"use strict";
// The server: requests, streams of events, its health. Loaded first: all scripts share the names at the top.

const root = new URL(location.pathname.replace(/\/?$/, "/"), location.origin);
const form = document.getElementById("form");
const fields = form.elements;
const gallery = document.getElementById("gallery");
const state = document.getElementById("state");
const key = document.getElementById("key");
const making = document.getElementById("making");
const about = document.getElementById("about");
const examples = document.getElementById("examples");
const settings = document.getElementById("settings");
const news = document.getElementById("news");
const models = new Map();
key.value = sessionStorage.getItem("troupe-key") ?? "";

// ---- HTTP

async function call(path, options = {}) {
  const headers = { ...(key.value && { Authorization: `Bearer ${key.value}` }), ...options.headers };
  const answer = await fetch(new URL(path, root), { ...options, headers });
  if (answer.ok) return answer;
  const body = await answer.json().catch(() => null);
  const message = body?.error?.message ?? `${answer.status} ${answer.statusText}`;
  throw Object.assign(new Error(message), { status: answer.status });
}

function post(path, body, files, signal) {
  if (files.length) return call(path, { method: "POST", body: formOf(body, files), signal });
  const headers = { "Content-Type": "application/json" };
  return call(path, { method: "POST", headers, body: JSON.stringify(body), signal });
}

function formOf(body, files) {
  const form = new FormData();
  const asText = (value) => (typeof value === "object" ? JSON.stringify(value) : value);
  for (const [name, value] of Object.entries(body)) form.append(name, asText(value));
  for (const [name, file] of files) form.append(name, file);
  return form;
}

async function* serverSentEvents(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const blocks = (text + value).split("\n\n");
    text = blocks.pop();
    for (const block of blocks) {
      const lines = block.split("\n").filter((line) => line.startsWith("data: "));
      const data = lines.map((line) => line.slice(6)).join("\n");
      if (!data) continue;
      const event = JSON.parse(data);
      if (event.error) throw new Error(event.error.message);
      yield event;
    }
  }
}

const blobUrl = async (path) => URL.createObjectURL(await (await call(path)).blob());

// ---- The server's health, in the header

const HEALTH_MS = 3000;

// ``/health`` stays as it is while a server drains, and ``/live`` does not.
async function healthOf() {
  try {
    const live = await fetch(new URL("live", root));
    if (live.status === 503 && (await live.json()).error?.code === "server_stopping") {
      return ["draining", "draining: the server ends, and takes nothing new"];
    }
    const { models: reasons, storage } = await (await fetch(new URL("health", root))).json();
    const missing = Object.entries(reasons).filter(([, reason]) => reason !== "ready");
    if (missing.length) return ["rebuilding", `rebuilding: ${missing.map((one) => one.join(": ")).join("; ")}`];
    return ["ready", storage === "ok" ? "ready" : `ready for pictures, not for clips: ${storage}`];
  } catch {
    return ["away", "away: no answer, asking again"];
  }
}

async function showHealth() {
  const [name, text] = await healthOf();
  const wasAway = state.dataset.state === "away";
  state.dataset.state = name;
  if (state.textContent !== text) state.textContent = text;  // else it would be read aloud again
  if (wasAway && name !== "away" && !models.size) start();
}

async function watchHealth() {
  if (!document.hidden) await showHealth();
  setTimeout(watchHealth, HEALTH_MS);
}
