"use strict";
// Pictures and input clips: chosen, dropped, or made here before.

const DROPPED = ["image", "video", "control_image"];
const PICTURES = "image/png,image/jpeg,image/webp";
const CLIPS = "video/mp4,video/quicktime,video/webm,image/gif";
const PICTURE = { format: "PNG, JPEG or WebP picture", one: "picture" };
const CLIP = { format: "MP4, MOV, WebM or GIF clip", one: "clip" };

// The record of a clip of this server that is the input.
let source = null;

const chosen = (field) => (field.disabled ? [] : [...(field.files ?? [])]);

// The file, the id of a clip of this server, or null.
function chosenClip() {
  if (fields.video.disabled) return null;
  return chosen(fields.video)[0] ?? source?.id ?? null;
}

function chosenFiles(model) {
  const name = model.kind === "video" ? "input_reference" : "image";
  const pictures = chosen(fields.image).map((file) => [name, file]);
  const isMasked = pictures.length || (model.defaults.masks_video && chosenClip() !== null);
  const masks = isMasked ? chosen(fields.mask).map((file) => ["mask", file]) : [];
  const others = ["video", "control_image"].flatMap((other) => chosen(fields[other]).map((file) => [other, file]));
  return [...pictures, ...masks, ...others];
}

const frameIndices = () => fields.frame_indices.value.split(",").map(Number);

// What a browser says of a form that it does not send.
function checkFiles() {
  const { defaults: d } = chosenModel();
  const count = (field) => chosen(field).length;
  fields.image.setCustomValidity(picturesProblem(d, count(fields.image)));
  const lacksMask = d.needs_mask && !count(fields.mask);
  const maskText = "This model paints what a mask marks: choose a mask, white where to paint";
  fields.mask.setCustomValidity(lacksMask ? maskText : "");
  const lacksClip = d.needs_video && chosenClip() === null;
  fields.video.setCustomValidity(lacksClip ? "This model changes clips: choose one" : "");
  fields.video.required = lacksClip;
  fields.frame_indices.setCustomValidity(framesProblem(d, count(fields.image)));
  for (const name of ["image", "mask", "video", "control_image"]) {
    document.getElementById(`clear_${name}`).hidden = !count(fields[name]);
  }
  showSource();
}

function picturesProblem(d, number) {
  const pictures = (many) => (many === 1 ? "1 picture" : `${many} pictures`);
  if (number && chosenClip() !== null && !d.takes_both) return "This model takes a picture or a clip: remove one";
  if (d.needs_source && !number && chosenClip() === null) return "This model needs a picture or a clip: choose one";
  if (number < d.min_pictures) {
    return `This model needs ${pictures(d.min_pictures)}: ${number ? "choose more" : "choose a file, or drop it here"}`;
  }
  return number > d.max_pictures ? `This model takes at most ${pictures(d.max_pictures)}: choose fewer` : "";
}

function framesProblem(d, number) {
  if (!d.takes_frame_indices || !number) return "";
  if (!fields.frame_indices.value) return number > 2 ? "Write the frame of each picture, such as 0, 40, -1" : "";
  const given = frameIndices().length;
  return given === number ? "" : `Write one frame for each picture: ${number} in all, and ${given} are written`;
}

function dropSource() {
  source = null;
  fields.video.onchange();
}

function showSource() {
  const box = document.getElementById("source");
  box.hidden = !source || fields.video.disabled;
  const note = box.querySelector("small");
  if (source && note) note.textContent = `Clip: ${source.prompt}`;
}

// ---- What was made becomes an input: of the chosen model if it takes that, else of the first one that does

const takesPictures = (model) => model.defaults.max_pictures > 0;
const takesClips = (model) => model.defaults.max_video_frames > 0;

function chooseTaker(takes) {
  const now = chosenModel();
  if (now && takes(now)) return;
  const taker = [...models.values()].find(takes);
  fields.model.value = taker.id;
  making.value = taker.kind;
  fields.model.onchange();
}

function offerInput(card, takes, put) {
  if (![...models.values()].some(takes)) return;
  const button = make("button", { type: "button", className: "small", textContent: "Use as input" });
  button.onclick = () => {
    chooseTaker(takes);
    put();
    fields.prompt.focus();
    news.textContent = "chosen as input";
  };
  card.row.append(button);
}

const offerPicture = (card, file) => offerInput(card, takesPictures, () => putFiles(fields.image, [file]));

const offerClip = (card, video) => offerInput(card, takesClips, () => {
  fields.video.value = "";
  source = video;
  fields.video.onchange();
});

function fileOf(base64, name, type) {
  return new File([Uint8Array.from(atob(base64), (char) => char.charCodeAt(0))], name, { type });
}

// ---- Files that are dropped: into the field below them, else one that takes them; a browser would open them

const accepts = (field, file) => field.accept.split(",").includes(file.type);

function dropField(target, files = []) {
  const hit = target.closest?.("label")?.querySelector("input[type=file]");
  if (hit) return hit.disabled ? null : hit;
  const open = DROPPED.map((name) => fields[name]).filter((field) => !field.disabled);
  return open.find((field) => files.every((file) => accepts(field, file))) ?? open[0] ?? null;
}

const bringsFiles = (event) => event.dataTransfer?.types.includes("Files") ?? false;

document.ondragover = (event) => {
  if (!bringsFiles(event)) return;
  event.preventDefault();
  event.dataTransfer.dropEffect = dropField(event.target) ? "copy" : "none";
};

document.ondrop = (event) => {
  if (!bringsFiles(event)) return;
  event.preventDefault();
  const files = [...event.dataTransfer.files];
  const field = dropField(event.target, files);
  if (field) putFiles(field, files);
};

function putFiles(field, dropped) {
  const { format, one } = field === fields.video ? CLIP : PICTURE;
  const strange = dropped.find((file) => !accepts(field, file));
  if (strange) return showError(`${strange.name} is no ${format}`);
  if (dropped.length > 1 && !field.multiple) return showError(`one ${one} is taken here: drop one`);
  const kept = new DataTransfer();
  for (const file of dropped) kept.items.add(file);
  field.files = kept.files;
  field.onchange?.();
}

// ---- Changes of the fields

const changed = () => { checkFiles(); return takeShape().catch((error) => showError(error.message)); };

for (const field of [fields.image, fields.control_image]) field.onchange = changed;
fields.mask.onchange = fields.frame_indices.oninput = checkFiles;
fields.video.onchange = () => {
  if (chosen(fields.video).length) source = null;
  return changed();
};

function wireFiles() {
  for (const name of ["image", "mask", "video", "control_image"]) {
    document.getElementById(`clear_${name}`).onclick = () => {
      fields[name].value = "";
      fields[name].onchange();
      fields[name].focus();
    };
  }
  document.getElementById("source").querySelector("button").onclick = () => {
    dropSource();
    fields.video.focus();
  };
}
