"use strict";
// Clips: one look at the newest tells of all that are made.

const LOOK_MS = 500;
const PASSING = [502, 503, 504];  // of a server that starts again, beside no answer at all
let look = null;

async function makeClip(body, files) {
  const card = makeCard(body.prompt);
  gallery.prepend(card.node);
  let isStopped = false;
  card.stop.onclick = () => { isStopped = true; card.note.textContent = "stopping"; };
  try {
    const video = await (await post("v1/videos", body, files)).json();
    if (isStopped) await removeClip(card, video.id);
    await followClip(card, video);
  } catch (error) {
    failAll([card], error);
  }
}

async function followClip(card, video) {
  card.stop.onclick = () => removeClip(card, video.id);
  showOrigin(card, video);
  try {
    const last = await lastRecord(card, video);
    if (!card.node.isConnected) return;
    if (last.status === "failed") throw new Error(last.error.message);
    await showClip(card, last);
  } catch (error) {
    if (error.status === 404) return card.node.remove();  // somebody has deleted it
    fail(card, error);
    offerRemoval(card, video.id);
  }
}

async function lastRecord(card, video) {
  while (card.node.isConnected && ["queued", "in_progress"].includes(video.status)) {
    await showProgress(card, video);
    const news = await nextRecord(video.id).catch((error) => {
      if (error.status && !PASSING.includes(error.status)) throw error;
      return { note: "no answer, asking again" };
    });
    video = { ...video, note: null, ...news };
  }
  return video;
}

async function nextRecord(id) {
  look ??= newestClips().finally(() => { look = null; });
  return (await look).get(id) ?? (await call(`v1/videos/${id}`)).json();
}

// A stream of events for each card would take all six connections that a browser has to a server.
async function newestClips() {
  await new Promise((resolve) => setTimeout(resolve, LOOK_MS));
  const { data } = await (await call("v1/videos?limit=20")).json();
  return new Map(data.map((video) => [video.id, video]));
}

async function showProgress(card, video) {
  card.bar.value = video.progress / 100;
  card.note.textContent = video.note ?? (video.status === "queued"
    ? placeText(video.num_before, video.eta_s) : `${video.progress} %${etaText(video.eta_s)}`);
  if (video.num_previews <= (card.numPreviews ?? 0)) return;
  card.numPreviews = video.num_previews;
  const url = blobUrl(`v1/videos/${video.id}/content?variant=preview`);
  await url.then((preview) => showImage(card, preview, video.prompt), () => {});
}

async function showClip(card, video) {
  const url = await blobUrl(`v1/videos/${video.id}/content`);
  const plays = { controls: true, loop: true, muted: true, autoplay: true, playsInline: true };
  const player = make("video", { src: url, ...plays });
  card.frame.replaceChildren(player);
  const time = video.timings ? `, ${video.timings.total_s.toFixed(1)} s` : "";
  finish(card, `seed ${video.seed}${time}`, { href: url, download: `${video.id}.mp4` });
  offerClip(card, video);
  offerRemoval(card, video.id);
}

function offerRemoval(card, id) {
  const remove = make("button", { type: "button", className: "small", textContent: "Delete" });
  remove.onclick = () => removeClip(card, id);
  card.row.append(remove);
}

async function removeClip(card, id) {
  try {
    await call(`v1/videos/${id}`, { method: "DELETE" });
  } catch (error) {
    if (error.status !== 404) return showError(error.message);
  }
  card.node.remove();
  if (source?.id === id) dropSource();
}

// A clip that was made of another one leads to its card.
function showOrigin(card, video) {
  card.node.id = video.id;
  if (!video.remixed_from_video_id) return;
  const link = make("a", { href: `#${video.remixed_from_video_id}`, textContent: "an earlier clip" });
  card.row.before(make("small", {}, "made of ", link));
}

async function showOldClips() {
  const { data } = await (await call("v1/videos?limit=12")).json();
  for (const video of data) {
    const card = makeCard(video.prompt);
    gallery.append(card.node);
    followClip(card, video);
  }
}
