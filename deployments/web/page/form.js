"use strict";
// The form as the chosen model has it, and what it asks for.

const PLACEHOLDERS = { clip: "the clip's", recipe: "the recipe's" };

// Fields that say one thing: a request that gives one of them decides about all.
const GROUPS = [["guidance_scale", "true_cfg_scale"], ["num_inference_steps", "sigmas", "timesteps"]];

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
  showKind(model.kind);
  const d = model.defaults;
  for (const name of ["width", "height", "num_frames", "fps"]) {
    Object.assign(fields[name], { value: d[name], placeholder: "" });
  }
  for (const name of ["width", "height"]) Object.assign(fields[name], { step: d.size_multiple, min: d.size_multiple });
  fields.guidance_scale.disabled = !d.guidance_scale;  // of two scales a model without this one has only the other
  fields.prompt.required = !d.describes_pictures;
  Object.assign(fields.num_frames, { step: d.frame_multiple, min: d.min_frames, max: d.max_frames });
  fields.num_inference_steps.max = d.max_steps;
  showAbout(model);
  showRecipes(model);
  showInputs(model);
  showOptions(model);
  showAdapters(model);
  checkFiles();
}

function showKind(kind) {
  for (const part of form.querySelectorAll("[data-kind]")) {
    part.hidden = part.dataset.kind !== kind;
    // A browser sends no form with a value out of range, shown or not: the 0 frames a second of a picture, say.
    for (const field of part.querySelectorAll("input")) field.disabled = part.hidden;
  }
}

// Possible inputs. Control pictures are for pictures alone.
function showInputs({ kind, defaults: d }) {
  const pictures = { disabled: !d.max_pictures, required: d.min_pictures > 0, multiple: d.max_pictures > 1 };
  Object.assign(fields.image, pictures);
  const masksClip = d.masks_video && kind === "video";
  const maskTypes = masksClip ? `${CLIPS},${PICTURES}` : PICTURES;
  Object.assign(fields.mask, { disabled: !(d.takes_mask || masksClip), required: d.needs_mask, accept: maskTypes });
  fields.frame_indices.disabled = !d.takes_frame_indices;
  fields.video.disabled = !d.max_video_frames;
  const takesControl = d.takes_control && kind === "image";
  Object.assign(fields.control_image, { disabled: !takesControl, required: takesControl && d.needs_control });
  const hasWeight = (takesControl || d.max_video_frames) && d.control_scale;
  Object.assign(fields.control_scale, { disabled: !hasWeight, placeholder: d.control_scale });
  for (const name of ["control_guidance_start", "control_guidance_end"]) {
    fields[name].disabled = !(takesControl && d.takes_control_guidance);
  }
  Object.assign(fields.strength, { disabled: !d.takes_strength, placeholder: d.strength });
}

// Settings of the model that it has a default for: what is not chosen is not sent, and a recipe decides about it.
const CACHES = ["conservative", "fast", "off"];
const MIN_CACHED_STEPS = 10;
const CHOICES = ["scheduler", "cache"];
const SWITCHES = ["generate_sound", "enhance_prompt"];

function showOptions({ kind, defaults: d, enhances_prompts: enhances }) {
  const { scheduler: own, schedulers } = d.solver;
  Object.assign(fields.layers, { disabled: !d.max_layers, max: d.max_layers, placeholder: d.num_layers, value: "" });
  showChoice(fields.scheduler, schedulers, own ? `default (${own})` : "default");
  const inRounds = d.frames_per_chunk && !d.chunk_overlap;
  const takesCache = d.takes_cache && !inRounds && d.max_steps >= MIN_CACHED_STEPS;
  showChoice(fields.cache, takesCache ? CACHES : [], "default");
  showSwitch(fields.generate_sound, kind === "video" && d.make_sound ? true : null);
  showSwitch(fields.enhance_prompt, enhances);
}

function showChoice(field, names, usual) {
  field.disabled = !names.length;
  field.replaceChildren(...["", ...names].map((name) => make("option", { value: name, textContent: name || usual })));
}

// ``usual``: its default; null where the model has no such switch.
function showSwitch(field, usual) {
  Object.assign(field, { disabled: usual === null, defaultChecked: usual === true, checked: usual === true });
}

function chosenOptions() {
  const choices = CHOICES.map((name) => fields[name]).filter((field) => !field.disabled && field.value);
  const switches = SWITCHES.map((name) => fields[name]);
  const changed = switches.filter((field) => !field.disabled && field.checked !== field.defaultChecked);
  const chosen = [...choices.map((one) => [one.name, one.value]), ...changed.map((one) => [one.name, one.checked])];
  return Object.fromEntries(chosen);
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

function showRecipes(model) {
  const names = Object.keys(model.recipes);
  fields.recipe.disabled = !names.length;
  const options = ["", ...names].map((name) => make("option", { value: name, textContent: name || "none" }));
  fields.recipe.replaceChildren(...options);
  fields.recipe.value = "";
  showRecipe();
}

const chosenRecipe = () => (fields.recipe.disabled ? "" : fields.recipe.value);

// A recipe's values hold where the request says nothing: their fields are empty then.
function showRecipe() {
  const model = chosenModel();
  const recipe = model.recipes[chosenRecipe()] ?? {};
  const numSteps = (recipe.sigmas ?? recipe.timesteps)?.length ?? recipe.num_inference_steps;
  const values = { ...recipe, num_inference_steps: numSteps };
  for (const group of GROUPS) {
    const isOfRecipe = group.some((name) => name in recipe);
    for (const name of group.filter((one) => fields[one])) {
      const placeholder = isOfRecipe ? `${values[name] ?? PLACEHOLDERS.recipe}` : "";
      const value = isOfRecipe || fields[name].disabled ? "" : model.defaults[name];
      Object.assign(fields[name], { value, placeholder });
    }
    if (group.includes("num_inference_steps")) fields.num_inference_steps.required = !isOfRecipe;
  }
}

// An input clip says what the result is like, unless the form does.
function showShape() {
  const { defaults: d } = chosenModel();
  const hasClip = chosenClip() !== null;
  for (const name of ["width", "height"]) {
    fillFromClip(fields[name], hasClip, d[name]);
    fields[name].required = !hasClip;
  }
  fillFromClip(fields.num_frames, hasClip && d.keeps_length, d.num_frames);
}

function fillFromClip(field, isOfClip, value) {
  if (isOfClip === (field.placeholder === PLACEHOLDERS.clip)) return;
  const own = { value: field.value || value, placeholder: "" };
  Object.assign(field, isOfClip ? { value: "", placeholder: PLACEHOLDERS.clip } : own);
}

// What a server does without a size.
async function takeShape() {
  showShape();
  const { defaults: d } = chosenModel();
  const [file] = [...chosen(fields.image), ...chosen(fields.control_image)];
  if (!file || chosenClip() !== null) return;
  const { width, height } = await createImageBitmap(file);
  const largest = d.enlarges_pictures ? Infinity : 1;
  const scale = Math.min(largest, Math.sqrt((d.width * d.height) / (width * height)));
  const nearest = (side) => Math.max(1, Math.round((scale * side) / d.size_multiple)) * d.size_multiple;
  [fields.width.value, fields.height.value] = [nearest(width), nearest(height)];
}

// Names of the fields with numbers that are sent.
function numbersOf(model, files) {
  const names = ["num_inference_steps", "seed", "guidance_scale", "true_cfg_scale", "layers"];
  if (files.length || chosenClip() !== null) names.push("strength");
  if (chosenClip() !== null) names.push("control_scale");
  if (chosen(fields.control_image).length) {
    names.push("control_scale", "control_guidance_start", "control_guidance_end");
  }
  return [...names, ...(model.kind === "video" ? ["num_frames", "fps"] : ["n"])];
}

function sizeOf() {
  const { width, height } = fields;
  if (width.value && height.value) return { size: `${width.value}x${height.value}` };
  const given = [width, height].filter((field) => field.value);
  return Object.fromEntries(given.map((field) => [field.name, Number(field.value)]));
}

function wanted(model) {
  const files = chosenFiles(model), adapters = chosenAdapters(), clip = chosenClip();
  const isSent = (name) => !fields[name].disabled && fields[name].value !== "";
  const numbers = numbersOf(model, files).filter(isSent).map((name) => [name, Number(fields[name].value)]);
  const body = { prompt: fields.prompt.value, model: model.id, ...sizeOf() };
  if (chosenRecipe()) body.recipe = chosenRecipe();
  if (adapters.length) body.lora = adapters;
  if (typeof clip === "string") body.video = clip;
  if (chosen(fields.image).length && isSent("frame_indices")) body.frame_indices = frameIndices();
  if (fields.negative_prompt.value) body.negative_prompt = fields.negative_prompt.value;
  return { ...body, ...chosenOptions(), ...Object.fromEntries(numbers) };
}
