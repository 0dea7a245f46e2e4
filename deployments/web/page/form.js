"use strict";

// Form

// The model, as it is for what is to be made: some make clips and pictures.
function chosenModel() {
  const model = models.get(fields.model.value);
  const isPicture = model?.picture_defaults && making.value === "image";
  return isPicture ? { ...model, kind: "image", defaults: model.picture_defaults } : model;
}

function showModel() {
  const model = chosenModel();
  if (!model) return;
  making.disabled = !model.picture_defaults;
  for (const part of form.querySelectorAll("[data-kind]")) {
    part.hidden = part.dataset.kind !== model.kind;
    // A browser sends no form with a value out of range, shown or not: the 0 frames a second of a picture, say.
    for (const field of part.querySelectorAll("input")) field.disabled = part.hidden;
  }
  const d = model.defaults;
  for (const name of ["width", "height", "num_inference_steps", "num_frames", "fps", "guidance_scale", "true_cfg_scale"]) {
    fields[name].value = d[name];
  }
  for (const name of ["width", "height"]) Object.assign(fields[name], { step: d.size_multiple, min: d.size_multiple });
  fields.guidance_scale.disabled = !d.guidance_scale;  // of two scales a model without this one has only the other
  if (fields.guidance_scale.disabled) fields.guidance_scale.value = "";
  fields.prompt.required = !d.describes_pictures;
  showAbout(model);
  Object.assign(fields.num_frames, { step: d.frame_multiple, min: d.min_frames, max: d.max_frames });
  fields.num_inference_steps.max = d.max_steps;
  Object.assign(fields.image, { disabled: !d.max_pictures, multiple: d.max_pictures > 1, required: d.min_pictures > 0 });
  Object.assign(fields.mask, { disabled: !d.takes_mask, required: d.needs_mask });
  fields.strength.disabled = !d.takes_strength;
  checkFiles();
}

// A model's own words, and prompts that a press puts into the form. Prompts of a model of clips are of clips.
function showAbout(model) {
  const prompts = model.kind === model.kinds?.[0] ? model.prompts ?? [] : [];
  about.textContent = about.title = model.description ?? "";
  about.hidden = !about.textContent;
  examples.hidden = !prompts.length;
  examples.replaceChildren(...prompts.map((prompt) => {
    const button = make("button", { type: "button", className: "small", textContent: prompt, title: prompt });
    button.onclick = () => { fields.prompt.value = prompt; fields.prompt.focus(); };
    return button;
  }));
}

// What a browser says of a form that it does not send.
function checkFiles() {
  const { defaults: d } = chosenModel();
  const count = (field) => field.files?.length ?? 0;
  const few = count(fields.image) < d.min_pictures;
  const many = count(fields.image) > d.max_pictures;
  const pictures = (number) => (number === 1 ? "1 picture" : `${number} pictures`);
  const reason = few ? `This model needs ${pictures(d.min_pictures)}: choose as many`
    : many ? `This model takes at most ${pictures(d.max_pictures)}: choose fewer` : "";
  fields.image.setCustomValidity(reason);
  const lacksMask = d.needs_mask && !count(fields.mask);
  fields.mask.setCustomValidity(lacksMask ? "This model paints what a mask marks: choose a mask, white where to paint" : "");
}

// What a server does without a size.
async function takeShape() {
  const { defaults: d } = chosenModel();
  if (fields.image.disabled || !fields.image.files?.length) return;
  const { width, height } = await createImageBitmap(fields.image.files[0]);
  const largest = d.enlarges_pictures ? Infinity : 1;
  const scale = Math.min(largest, Math.sqrt((d.width * d.height) / (width * height)));
  const nearest = (side) => Math.max(1, Math.round((scale * side) / d.size_multiple)) * d.size_multiple;
  [fields.width.value, fields.height.value] = [nearest(width), nearest(height)];
}

function chosenFiles(model) {
  const chosen = (field) => (field.disabled ? [] : [...(field.files ?? [])]);
  const name = model.kind === "video" ? "input_reference" : "image";
  const pictures = chosen(fields.image).map((file) => [name, file]);
  return pictures.length ? [...pictures, ...chosen(fields.mask).map((file) => ["mask", file])] : [];
}

function wanted(model) {
  const names = ["num_inference_steps", "seed", "guidance_scale", "true_cfg_scale"];
  if (chosenFiles(model).length && !fields.strength.disabled) names.push("strength");
  names.push(...(model.kind === "video" ? ["num_frames", "fps"] : ["n"]));
  const numbers = names.filter((name) => fields[name].value !== "").map((name) => [name, Number(fields[name].value)]);
  const body = { prompt: fields.prompt.value, model: model.id, size: `${fields.width.value}x${fields.height.value}` };
  if (fields.negative_prompt.value) body.negative_prompt = fields.negative_prompt.value;
  return { ...body, ...Object.fromEntries(numbers) };
}
