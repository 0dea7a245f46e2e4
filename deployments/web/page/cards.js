"use strict";
// One card for each picture and clip, and one for the last error.

function make(tag, properties = {}, ...children) {
  const node = Object.assign(document.createElement(tag), properties);
  node.append(...children);
  return node;
}

function makeCard(prompt) {
  gallery.querySelector(".empty")?.remove();
  news.textContent = "queued";
  const frame = make("div", { className: "frame" });
  const bar = make("progress", { max: 1, ariaLabel: `Progress of ${prompt}` });
  const note = make("small", { textContent: "queued" });
  const stop = make("button", { type: "button", className: "small", textContent: "Stop" });
  const row = make("div", { className: "row" }, note, stop);
  const text = make("p", { textContent: prompt, title: prompt });
  const node = make("article", { className: "card" }, frame, bar, text, row);
  return { node, frame, bar, note, row, stop };
}

function showImage(card, url, alt) {
  const image = card.frame.querySelector("img") ?? make("img");
  Object.assign(image, { src: url, alt });
  card.frame.replaceChildren(image);
}

function finish(card, note, download) {
  clearInterval(card.clock);
  card.bar.remove();
  card.stop.remove();
  card.note.textContent = news.textContent = note;
  if (download) card.row.append(make("a", { ...download, textContent: "Save" }));
}

function fail(card, error) {
  finish(card, error.name === "AbortError" ? "stopped" : error.message);
  card.note.className = "error";
}

function dismissButton(node) {
  const button = make("button", { type: "button", className: "small", textContent: "Dismiss" });
  button.onclick = () => { node.remove(); fields.prompt.focus(); };
  return button;
}

function clearError() {
  for (const one of [...gallery.children]) if (one.className === "card failure") one.remove();
}

// One card, of the last error, however many pictures there were to be.
function showError(message) {
  gallery.querySelector(".empty")?.remove();
  clearError();
  const node = make("article", { className: "card failure", role: "alert" });
  node.append(make("p", { textContent: message }), dismissButton(node));
  gallery.prepend(node);
  gallery.scrollTop = 0;
}

// How long it will take, in words; nothing where nobody knows.
function etaText(seconds) {
  if (seconds === null || seconds === undefined) return "";
  return seconds < 100 ? `, about ${Math.max(1, Math.round(seconds))} s` : `, about ${Math.round(seconds / 60)} min`;
}

const placeText = (numBefore, etaS) => `queued${numBefore ? ` behind ${numBefore}` : ""}${etaText(etaS)}`;

// What waits hears nothing until its first step: its clock goes on by itself.
function showPlace(card, event) {
  const end_s = event.eta_s === null ? null : Date.now() / 1000 + event.eta_s;
  const show = () => {
    card.note.textContent = placeText(event.num_before, end_s === null ? null : end_s - Date.now() / 1000);
  };
  clearInterval(card.clock);
  card.clock = setInterval(show, 1000);
  show();
  news.textContent = card.note.textContent;
}
