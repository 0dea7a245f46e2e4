"use strict";
// What happens on the page: its form is sent, its models are read, its server is watched.

fields.recipe.onchange = showRecipe;
making.onchange = fields.model.onchange = () => { showModel(); return changed(); };
form.onsubmit = (event) => {
  event.preventDefault();
  const model = chosenModel();
  gallery.scrollTop = 0;
  clearError();
  (model.kind === "video" ? makeClip : drawPictures)(wanted(model), chosenFiles(model));
};
form.onkeydown = (event) => {
  if (event.key !== "Enter" || !(event.ctrlKey || event.metaKey) || event.isComposing) return;
  event.preventDefault();
  form.requestSubmit();
};
key.onchange = () => { sessionStorage.setItem("troupe-key", key.value); start(); };

// Models with an adapter or a recipe behind their names are left out: the form has a control for each of both.
async function loadModels() {
  const { data } = await (await call("v1/models")).json();
  await loadAdapters(data);
  models.clear();
  for (const model of data) if (!model.parent) models.set(model.id, model);
}

async function start() {
  try {
    await loadModels();
    fields.model.replaceChildren(...[...models.keys()].map((id) => make("option", { value: id, textContent: id })));
    showModel();
    gallery.replaceChildren(make("p", { className: "empty faint", textContent: "What you make appears here." }));
    await showOldClips();
  } catch (error) {
    showError(error.message);
  }
}

addEventListener("load", () => {
  settings.open = !matchMedia("(max-width: 46rem)").matches;
  form.addEventListener("invalid", (event) => {
    const part = event.target.closest("details");
    if (part) part.open = true;  // a browser says nothing of a field that it cannot show
  }, true);
  document.addEventListener("visibilitychange", () => { if (!document.hidden) showHealth(); });
  wireFiles();
  wireAdapters();
  watchHealth();
  start();
});
