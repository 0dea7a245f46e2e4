"use strict";
// Pictures: one stream tells of every step, preview and picture.

async function drawPictures(body, files) {
  // Of a picture in layers each has a card, and what is told of the picture is shown on all of them.
  const numLayers = body.layers ?? (models.get(body.model)?.defaults.num_layers || 1);
  const cards = Array.from({ length: (body.n ?? 1) * numLayers }, () => makeCard(body.prompt));
  gallery.prepend(...cards.map((card) => card.node));
  const stopping = new AbortController();
  for (const card of cards) card.stop.onclick = () => stopping.abort();
  const open = new Set(cards);
  try {
    const options = { stream: true, stream_progress: true, partial_images: 3 };
    const path = files.length ? "v1/images/edits" : "v1/images/generations";
    const answer = await post(path, { ...body, ...options }, files, stopping.signal);
    for await (const event of serverSentEvents(answer)) {
      const first = event.image_index * numLayers + (event.layer ?? 0);
      const isWhole = !event.type.endsWith(".completed");
      for (const card of cards.slice(first, isWhole ? first + numLayers : first + 1)) {
        showPictureEvent(card, event, body.prompt);
        if (!isWhole) open.delete(card);
      }
    }
    if (open.size) throw new Error("the stream ended early");
  } catch (error) {
    failAll([...open], error);
  }
}

// What a client stopped says so on its cards; of an error they make place for one.
function failAll(cards, error) {
  for (const card of cards) {
    if (error.name === "AbortError") {
      fail(card, error);
      card.row.append(dismissButton(card.node));
    } else {
      clearInterval(card.clock);
      card.node.remove();
    }
  }
  if (error.name !== "AbortError") showError(error.message);
}

function showPictureEvent(card, event, prompt) {
  if (event.type === "troupe.queued") return showPlace(card, event);
  if (event.type === "troupe.progress") {
    clearInterval(card.clock);
    card.bar.value = event.step / event.of;
    const left = event.eta_s === null ? "" : `, ${event.eta_s.toFixed(1)} s left`;
    card.note.textContent = `step ${event.step} of ${event.of}${left}`;
    return;
  }
  const url = `data:image/${event.output_format};base64,${event.b64_json}`;
  showImage(card, url, prompt);
  if (!event.type.endsWith(".completed")) return;
  const note = `seed ${event.seed}, ${event.timings.total_s.toFixed(1)} s`;
  const layer = event.layer === null ? "" : `-${event.layer + 1}`;
  const name = `troupe-${event.seed}${layer}.${event.output_format}`;
  finish(card, note, { href: url, download: name });
  offerPicture(card, fileOf(event.b64_json, name, `image/${event.output_format}`));
}
