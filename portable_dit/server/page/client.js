// Talking to the server: JSON calls, server-sent events with an API key, and the question for that key.

export class Refused extends Error {}

async function send(method, path, body) {
  for (;;) {
    const headers = body === undefined ? {} : { "Content-Type": "application/json" };
    const key = sessionStorage.getItem("key");
    if (key) headers.Authorization = `Bearer ${key}`;
    const answer = await fetch(path, { method, headers, body: body && JSON.stringify(body) });
    if (answer.status !== 401) return answer;
    await askForKey();
  }
}

export async function ask(method, path, body) {
  const answer = await send(method, path, body);
  if (answer.status === 204) return null;
  const document_ = await answer.json().catch(() => null);
  if (!answer.ok) throw new Refused(document_?.error?.message ?? `The server answered ${answer.status}.`);
  return document_;
}

export async function askForBlob(path) {
  const answer = await send("GET", path);
  if (!answer.ok) throw new Refused("The picture has expired.");
  return answer.blob();
}

// Yields [name, data] of each event. Not EventSource, which cannot send a key.
export async function* eventsOf(path) {
  const answer = await send("GET", path);
  if (!answer.ok) throw new Refused((await answer.json()).error.message);
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    text += value;
    const blocks = text.split("\n\n");
    text = blocks.pop();
    for (const block of blocks) {
      const name = block.match(/^event: (.*)$/m)?.[1];
      const data = block.match(/^data: (.*)$/m)?.[1];
      if (data) yield [name, JSON.parse(data)];
    }
  }
}

let asking = null; // one question, however many calls wait for its answer

function askForKey() {
  asking ??= new Promise((done) => {
    const dialog = document.getElementById("key-dialog");
    dialog.addEventListener("close", () => {
      sessionStorage.setItem("key", document.getElementById("key").value.trim());
      asking = null;
      done();
    }, { once: true });
    dialog.showModal();
  });
  return asking;
}
