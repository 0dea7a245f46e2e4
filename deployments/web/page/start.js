"use strict";

// Start

fields.image.onchange = () => { checkFiles(); return takeShape().catch((error) => showError(error.message)); };
fields.mask.onchange = checkFiles;
making.onchange = fields.model.onchange = () => { showModel(); fields.image.onchange(); };
form.onsubmit = (event) => {
  event.preventDefault();
  const model = chosenModel();
  gallery.scrollTop = 0;
  (model.kind === "video" ? makeClip : drawPictures)(wanted(model), chosenFiles(model));
};
form.onkeydown = (event) => {
  if (event.key !== "Enter" || !(event.ctrlKey || event.metaKey) || event.isComposing) return;
  event.preventDefault();
  form.requestSubmit();
};
key.onchange = () => { sessionStorage.setItem("troupe-key", key.value); start(); };

async function start() {
  try {
    const { data } = await (await call("v1/models")).json();
    models.clear();
    for (const model of data) models.set(model.id, model);
    fields.model.replaceChildren(...data.map((model) => make("option", { value: model.id, textContent: model.id })));
    showModel();
    gallery.replaceChildren(make("p", { className: "empty faint", textContent: "What you make appears here." }));
    await showOldClips();
  } catch (error) {
    showError(error.message);
  }
}
