// The viewer: one picture large, with what made it, and what can be done with it.

const $ = (id) => document.getElementById(id);
let open = null; // {items, place, use, again, forget, complain}

$("viewer-close").addEventListener("click", closeViewer);
$("viewer-use").addEventListener("click", () => act("use"));
$("viewer-again").addEventListener("click", () => act("again"));
$("viewer-forget").addEventListener("click", async () => { await act("forget"); closeViewer(); });
$("viewer").addEventListener("click", (event) => { if (event.target === $("viewer")) closeViewer(); });
$("viewer").addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "ArrowRight") show(open.place + 1);
  if (event.key === "ArrowLeft") show(open.place - 1);
  if (event.key.toLowerCase() === "d") $("viewer-save").click();
  if (event.key.toLowerCase() === "r") act("use");
});

export function openViewer(options) {
  open = options;
  show(options.place);
  $("viewer").showModal();
}

export function closeViewer() {
  if ($("viewer").open) $("viewer").close();
}

async function act(name) {
  try {
    await open[name](open.items[open.place]);
  } catch (error) {
    open.complain(error.message);
    closeViewer();
  }
}

function show(place) {
  const item = open.items[place];
  if (!item) return;
  open.place = place;
  const { job, image, url, name } = item;
  Object.assign($("viewer-picture"), { src: url, alt: job.request.prompt });
  Object.assign($("viewer-save"), { href: url, download: name });
  $("viewer-prompt").textContent = job.request.prompt;
  const seconds = job.portable_dit?.seconds ?? {};
  const parts = ["queue", "text_encode", "prepare", "denoise", "vae_decode", "encode_png"];
  const rows = [
    ["Size", image.size.replace("x", " × ")],
    ["Seed", image.seed],
    ["Drawn", new Date(job.created * 1000).toLocaleString()],
    ["Kept until", new Date(job.expires * 1000).toLocaleString()],
    ...parts.filter((part) => seconds[part] >= 0.0005).map((part) => [part, `${(seconds[part] * 1e3).toFixed(0)} ms`]),
  ];
  if (job.portable_dit?.peak_bytes) rows.push(["Peak memory", `${(job.portable_dit.peak_bytes / 2 ** 20).toFixed(0)} MiB`]);
  $("viewer-facts").replaceChildren(...rows.flatMap(([label, value]) => [
    Object.assign(document.createElement("dt"), { textContent: label }),
    Object.assign(document.createElement("dd"), { textContent: value }),
  ]));
  const notes = job.portable_dit?.notes ?? [];
  $("viewer-notes").replaceChildren(...notes.map((text) => Object.assign(document.createElement("li"), { textContent: text })));
}
