"use strict";
// Adapters of the chosen model: which of them a request names, new ones, and those that may be deleted.

const adapters = document.getElementById("adapters");
const loras = document.getElementById("loras");
const adding = document.getElementById("adding");
const loraFiles = document.getElementById("lora_files");
const loraName = document.getElementById("lora_name");
const loraAdd = document.getElementById("lora_add");

// Records of adapters that clients have added, by model and name.
const addedLoras = new Map();
const loraKey = (model, name) => `${model}:${name}`;

// The rows of the model that is shown: name, and the two controls.
let rows = [];

function showAdapters(model) {
  adapters.hidden = !(model.loras.length || model.takes_loras);
  adding.hidden = !model.takes_loras;
  rows = model.loras.map((lora) => adapterRow(model, lora));
  loras.replaceChildren(...rows.map((row) => row.node));
}

function adapterRow(model, { name, scale }) {
  const use = make("input", { type: "checkbox" });
  const limits = { type: "number", min: -10, max: 10, step: "any" };
  const number = make("input", { ...limits, value: scale, ariaLabel: `Scale of ${name}` });
  number.oninput = () => { use.checked = true; };
  const node = make("div", { className: "row adapter" }, make("label", { className: "check" }, use, name), number);
  const added = addedLoras.get(loraKey(model.id, name));
  if (added?.is_own) node.append(deleteButton(added));
  return { name, use, number, node };
}

function deleteButton(added) {
  const label = `Delete the adapter ${added.name}`;
  const button = make("button", { type: "button", className: "small", textContent: "Delete", ariaLabel: label });
  button.onclick = () => changeAdapters(button, () => call(`v1/loras/${added.id}`, { method: "DELETE" }));
  return button;
}

function chosenAdapters() {
  const used = rows.filter((row) => row.use.checked);
  return used.map(({ name, number }) => (number.value === "" ? { name } : { name, scale: Number(number.value) }));
}

async function addAdapter() {
  const files = [...loraFiles.files];
  const file = files.find((one) => one.name.endsWith(".safetensors"));
  const config = files.find((one) => one.name.endsWith(".json"));
  if (!file) return showError("An adapter is a safetensors file: choose one");
  const name = loraName.value.trim() || file.name.replace(/\.safetensors$/, "");
  const body = { model: chosenModel().id, name };
  const sent = [["file", file], ...(config ? [["config", config]] : [])];
  const isAdded = await changeAdapters(loraAdd, () => post("v1/loras", body, sent));
  if (isAdded) loraFiles.value = loraName.value = "";
  return isAdded;
}

// What else is in the form stays as it is.
async function changeAdapters(button, change) {
  const before = new Map(rows.map(({ name, use, number }) => [name, { isUsed: use.checked, scale: number.value }]));
  button.disabled = true;
  news.textContent = "changing the adapters";
  try {
    await change();
    await loadModels();
    showAdapters(chosenModel());
    for (const row of rows) {
      const { isUsed, scale } = before.get(row.name) ?? { isUsed: false, scale: row.number.value };
      row.use.checked = isUsed;
      row.number.value = scale;
    }
    news.textContent = "adapters changed";
    return true;
  } catch (error) {
    showError(error.message);
    return false;
  } finally {
    button.disabled = false;
  }
}

async function loadAdapters(listed) {
  addedLoras.clear();
  if (!listed.some((model) => model.takes_loras)) return;
  const { data } = await (await call("v1/loras")).json();
  data.sort((one, other) => one.is_own - other.is_own);  // an own one precedes a shared one of its name
  for (const lora of data) addedLoras.set(loraKey(lora.model, lora.name), lora);
}

function wireAdapters() {
  loraAdd.onclick = addAdapter;
  loraName.onkeydown = (event) => {
    if (event.key !== "Enter" || event.ctrlKey || event.metaKey) return;
    event.preventDefault();  // it would send the form
    addAdapter();
  };
}
