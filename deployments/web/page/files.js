"use strict";

// Files that are dropped: into the field that they are dropped on, else the form's; a browser would open them

function dropField(target) {
  const field = target.closest?.("label")?.querySelector("input[type=file]") ?? fields.image;
  return field.disabled ? null : field;
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
  const field = dropField(event.target);
  if (field) putFiles(field, [...event.dataTransfer.files]);
};

function putFiles(field, dropped) {
  const strange = dropped.find((file) => !field.accept.split(",").includes(file.type));
  if (strange) return showError(`${strange.name} is no PNG, JPEG or WebP picture`);
  if (dropped.length > 1 && !field.multiple) return showError("one picture is taken here: drop one");
  const kept = new DataTransfer();
  for (const file of dropped) kept.items.add(file);
  field.files = kept.files;
  field.onchange?.();
}
