// The page: a form that submits jobs, their events as they come, and a gallery of what the server keeps.

import { ask, askForBlob, eventsOf, Refused } from "/page/client.js";
import { closeViewer, openViewer } from "/page/viewer.js";
import { references } from "/page/references.js";

const $ = (id) => document.getElementById(id);
const SHAPES = [["1:1", "Square"], ["4:3", "Landscape"], ["3:2", "Landscape"], ["16:9", "Wide"], ["3:4", "Portrait"],
  ["2:3", "Portrait"], ["9:16", "Tall"]];

let facts = null; // of the model
let running = null; // {id, stopped} of the job that is shown
let asked = 0; // how often the gallery was asked for
let lastSeed = null;
let shown = null; // {url, format} of the picture on the stage

start();

async function start() {
  restoreTheme();
  wire();
  references.start({ limit: () => facts?.max_references ?? 0, complain: say });
  await Promise.allSettled([learnModel(), refreshGallery()]);
  watchReadiness();
}

function wire() {
  $("composer").addEventListener("submit", (event) => { event.preventDefault(); draw(); });
  $("stop").addEventListener("click", stop);
  $("theme").addEventListener("click", switchTheme);
  $("shape").addEventListener("change", () => { $("custom").hidden = $("shape").value !== "custom"; });
  $("clear-seed").addEventListener("click", () => { $("seed").value = ""; $("seed").focus(); });
  $("last-seed").addEventListener("click", () => { $("seed").value = lastSeed; });
  $("use-result").addEventListener("click", () => useAsReference(shown).catch((error) => say(error.message)));
  $("gallery").addEventListener("keydown", moveInGallery);
  document.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) { event.preventDefault(); draw(); }
    if (event.key === "Escape" && running && !document.querySelector("dialog[open]")) stop();
  });
}

async function learnModel() {
  const { data: [model] } = await ask("GET", "/v1/models");
  facts = model.portable_dit;
  $("model").textContent = model.id;
  const ratio = (text) => { const [w, h] = text.split(":").map(Number); return Math.max(w / h, h / w); };
  const shapes = SHAPES.filter(([text]) => ratio(text) <= facts.max_ratio);
  const size = facts.default_size.replace("x", " × ");
  $("shape").replaceChildren(
    new Option(`Automatic (${size})`, ""),
    ...shapes.map(([text, name]) => new Option(`${name} ${text}`, text)),
    new Option("Custom size…", "custom"),
  );
  $("resolution").replaceChildren(new Option("Default", ""), ...facts.resolutions.map((name) => new Option(name)));
  $("resolution-box").hidden = facts.resolutions.length === 0;
  for (const side of ["width", "height"]) {
    Object.assign($(side), { min: facts.min_side, max: facts.max_side, step: facts.multiple });
  }
  [$("width").value, $("height").value] = facts.default_size.split("x");
  $("count").max = facts.max_images;
  const most = facts.max_references;
  $("references-hint").textContent = most ? `up to ${most}; drawn from in this order` : "this model takes none";
  $("add").disabled = most === 0;
}

async function watchReadiness() {
  for (;;) {
    const state = await fetch("/ready").then((answer) => answer.json()).catch(() => null);
    const name = running ? "busy" : state?.ready ? "ready" : "away";
    $("dot").className = `dot ${name}`;
    $("dot").title = state?.ready ? "ready" : state?.reason ?? "the server does not answer";
    await new Promise((done) => setTimeout(done, state?.ready ? 4000 : 1000));
  }
}

function wishFromForm() {
  const wish = {
    prompt: $("prompt").value, n: Number($("count").value) || 1, output_format: $("format").value, previews: true,
  };
  const shape = $("shape").value;
  if (shape === "custom") wish.size = `${$("width").value}x${$("height").value}`;
  else if (shape) wish.aspect_ratio = shape;
  if ($("resolution").value && shape !== "custom") wish.resolution = $("resolution").value;
  const seed = $("seed").value.trim();
  if (seed) {
    if (!/^\d{1,15}$/.test(seed)) throw new Refused("Seed: a whole number of at most 15 digits.");
    wish.seed = Number(seed);
  }
  if (references.urls().length) wish.images = references.urls();
  return wish;
}

async function draw() {
  if (running) return;
  say("");
  if (!$("prompt").value.trim()) {
    say("Say what to draw first.");
    $("prompt").focus();
    return;
  }
  running = { id: null, stopped: false };
  setBusy(true);
  try {
    const job = await ask("POST", "/v1/jobs", wishFromForm());
    running.id = job.id;
    $("status").textContent = "Waiting for the device…";
    if (running.stopped) await stop();
    let latest = null;
    for await (const [name, data] of eventsOf(`/v1/jobs/${job.id}/events`)) show(latest = name, data);
    if ([null, "queued", "step"].includes(latest)) {
      throw new Refused("The server has stopped. What waited goes on when it is back.");
    }
  } catch (error) {
    say(error instanceof Refused ? error.message : "The server does not answer.");
    clearStage();
  } finally {
    await refreshGallery().catch(() => {});
    running = null;
    setBusy(false);
  }
}

function show(name, data) {
  if (name === "queued") {
    $("status").textContent = data.position ? `${data.position} before you` : "Next in line…";
  } else if (name === "step") {
    $("progress").value = data.progress;
    $("status").textContent = `Step ${data.step} of ${data.steps}`;
    if (data.preview) showPreview(data.preview);
  } else if (name === "finished") {
    showResult(data);
  } else {
    clearStage();
    say(name === "cancelled" ? "" : data.error?.message ?? "No picture came of it.");
    $("status").textContent = name === "cancelled" ? "Stopped." : "Ready when you are.";
  }
}

function showPreview(url) {
  $("welcome").hidden = true;
  $("canvas").className = "drawing";
  const picture = $("canvas").querySelector("img");
  $("canvas").replaceChildren(picture, $("welcome"));
  Object.assign(picture, { src: url, hidden: false, alt: "Preview" });
  $("result-actions").hidden = true;
}

function showResult(job) {
  const pictures = job.images.map((image) => {
    const picture = new Image();
    return Object.assign(picture, { src: local(image.url), alt: job.request.prompt });
  });
  $("welcome").hidden = true;
  $("canvas").className = pictures.length > 1 ? "several" : "";
  pictures[0].id = "picture";
  $("canvas").replaceChildren(...pictures, $("welcome"));
  lastSeed = job.images[0].seed;
  $("last-seed").disabled = false;
  const seconds = job.portable_dit.seconds.total.toFixed(1);
  $("status").textContent = `${job.images[0].size.replace("x", " × ")}, seed ${lastSeed}, ${seconds} s`;
  shown = { url: local(job.images[0].url), format: job.request.output_format ?? "png" };
  Object.assign($("save-result"), { href: shown.url, download: fileName(job, 0) });
  $("result-actions").hidden = false;
}

// Back to the last picture, or to the empty stage.
function clearStage() {
  const picture = $("canvas").querySelector("img");
  if (shown) picture.src = shown.url;
  picture.hidden = !shown;
  $("welcome").hidden = Boolean(shown);
  $("result-actions").hidden = !shown;
  $("canvas").className = shown ? "" : "empty";
}

async function stop() {
  if (running) running.stopped = true; // for a job that the server is only being told of
  if (running?.id) await ask("POST", `/v1/jobs/${running.id}/cancel`).catch(() => {});
}

function setBusy(busy) {
  $("go").disabled = busy;
  $("stop").disabled = !busy;
  $("progress").hidden = !busy;
  $("progress").value = 0;
  $("dot").className = busy ? "dot busy" : "dot ready";
}

async function refreshGallery() {
  const turn = ++asked;
  const { data: jobs } = await ask("GET", "/v1/jobs?limit=60");
  if (turn !== asked) return; // a later one shows what is so now
  const items = jobs.flatMap((job) => job.images.map((image, index) => ({ job, image, index })));
  const focused = $("gallery").contains(document.activeElement) ? document.activeElement.name : null;
  $("gallery-empty").hidden = items.length > 0;
  $("gallery").replaceChildren(...items.map((item, place) => tile(item, place, items)));
  $("gallery").setAttribute("aria-busy", "false");
  const tiles = [...$("gallery").querySelectorAll("button")];
  const current = tiles.find((other) => other.name === focused);
  (current ?? tiles[0])?.setAttribute("tabindex", "0");
  current?.focus(); // whoever was moving through the tiles goes on from the same picture
}

function tile({ job, image, index }, place, items) {
  const entry = document.createElement("li");
  const name = `${job.id}-${index}`;
  const button = Object.assign(document.createElement("button"), { type: "button", name, tabIndex: -1 });
  button.setAttribute("aria-label", `Open: ${job.request.prompt}`);
  const picture = Object.assign(new Image(), { src: local(image.url), alt: "", loading: "lazy" });
  const caption = Object.assign(document.createElement("span"), { className: "caption", textContent: job.request.prompt });
  button.append(picture, caption);
  button.addEventListener("click", () => view(items, place));
  entry.append(button);
  return entry;
}

function view(items, place) {
  openViewer({
    items: items.map((item) => ({ ...item, url: local(item.image.url), name: fileName(item.job, item.index) })),
    place,
    use: (item) => useAsReference({ url: item.url }),
    again: (item) => takeSettings(item),
    forget: async (item) => { await ask("DELETE", `/v1/jobs/${item.job.id}`); await refreshGallery(); },
    complain: say,
  });
}

function moveInGallery(event) {
  const tiles = [...$("gallery").querySelectorAll("button")];
  const here = tiles.indexOf(document.activeElement);
  const across = tiles.filter((other) => other.offsetTop === tiles[0]?.offsetTop).length;
  const moves = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: across, ArrowUp: -across };
  const next = tiles[here + moves[event.key]];
  if (here < 0 || !next) return;
  event.preventDefault();
  tiles[here].tabIndex = -1;
  next.tabIndex = 0;
  next.focus();
}

async function useAsReference({ url }) {
  await references.add(await askForBlob(url));
  closeViewer();
  $("prompt").focus();
  $("prompt").select();
}

function takeSettings({ job, image }) {
  const wish = job.request;
  $("prompt").value = wish.prompt;
  $("count").value = wish.n ?? 1;
  $("format").value = wish.output_format ?? "png";
  const ratio = wish.aspect_ratio ?? "";
  const isListed = [...$("shape").options].some((option) => option.value === ratio);
  const size = wish.size && wish.size !== "auto" ? wish.size : isListed ? null : image.size;
  $("shape").value = size ? "custom" : ratio;
  $("custom").hidden = !size;
  if (size) [$("width").value, $("height").value] = size.split("x");
  $("resolution").value = wish.resolution ?? "";
  $("seed").value = image.seed;
  closeViewer();
  $("prompt").focus();
}

function say(text) {
  $("message").textContent = text;
}

// Pictures come under the name that the server was called by; behind a proxy only the path is sure.
function local(url) {
  return new URL(url).pathname;
}

function fileName(job, index) {
  const words = job.request.prompt.toLowerCase().match(/[\p{L}\p{N}]+/gu)?.slice(0, 6).join("-") || "picture";
  return `${words}-${job.images[index].seed}.${job.request.output_format ?? "png"}`;
}

function restoreTheme() {
  const theme = localStorage.getItem("theme");
  if (theme) document.documentElement.dataset.theme = theme;
}

function switchTheme() {
  const dark = matchMedia("(prefers-color-scheme: dark)").matches;
  const now = document.documentElement.dataset.theme ?? (dark ? "dark" : "light");
  document.documentElement.dataset.theme = now === "dark" ? "light" : "dark";
  localStorage.setItem("theme", document.documentElement.dataset.theme);
}
