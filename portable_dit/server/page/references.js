// References: dropped, pasted, chosen, or a result; shown in their order, which prompts may speak of.

const $ = (id) => document.getElementById(id);
let list = []; // data URLs
let limit = () => 0;
let complain = () => {};

export const references = {
  start(options) {
    ({ limit, complain } = options);
    $("add").addEventListener("click", () => $("files").click());
    $("files").addEventListener("change", () => { addAll($("files").files); $("files").value = ""; });
    addEventListener("dragenter", (event) => { if (hasFiles(event)) veil(true); });
    addEventListener("dragover", (event) => { if (hasFiles(event)) event.preventDefault(); });
    addEventListener("dragleave", (event) => { if (!event.relatedTarget) veil(false); });
    addEventListener("drop", (event) => {
      veil(false);
      if (!hasFiles(event)) return;
      event.preventDefault();
      addAll(event.dataTransfer.files);
    });
    addEventListener("paste", (event) => addAll(event.clipboardData.files));
  },
  urls: () => list,
  add: (blob) => addAll([blob]),
};

async function addAll(files) {
  for (const file of files) {
    if (!file.type.startsWith("image/")) {
      complain(`${file.name}: not a picture.`);
      continue;
    }
    const url = await dataUrl(file); // others may come while it is read
    if (list.length >= limit()) {
      complain(limit() ? `This model takes at most ${limit()} references.` : "This model takes no references.");
      break;
    }
    list = [...list, url];
  }
  show();
}

function dataUrl(blob) {
  return new Promise((done, fail) => {
    const reader = new FileReader();
    reader.onload = () => done(reader.result);
    reader.onerror = () => fail(reader.error);
    reader.readAsDataURL(blob);
  });
}

function show() {
  $("references").replaceChildren(...list.map((url, place) => {
    const entry = document.createElement("li");
    const picture = Object.assign(new Image(), { src: url, alt: `Reference ${place + 1}` });
    const number = Object.assign(document.createElement("span"), { className: "number", textContent: place + 1 });
    const remove = Object.assign(document.createElement("button"), { type: "button", textContent: "×" });
    remove.setAttribute("aria-label", `Remove reference ${place + 1}`);
    remove.addEventListener("click", () => { list = list.filter((_, other) => other !== place); show(); });
    entry.append(picture, number, remove);
    return entry;
  }));
}

function hasFiles(event) {
  return [...(event.dataTransfer?.types ?? [])].includes("Files");
}

function veil(on) {
  $("veil").hidden = !on;
  $("drop").classList.toggle("over", on);
}
