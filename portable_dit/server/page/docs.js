// The calls of this server, read from its own OpenAPI document.

import { ask } from "/page/client.js";

const api = await ask("GET", "/openapi.json");
document.getElementById("about").textContent = `${api.info.title} ${api.info.version}. ${api.info.description}`;
for (const [path, verbs] of Object.entries(api.paths)) {
  for (const [verb, call] of Object.entries(verbs)) document.getElementById("calls").append(describe(path, verb, call));
}

function describe(path, verb, call) {
  const card = node("article", "card");
  const title = node("h2");
  title.append(node("span", "verb", verb.toUpperCase()), node("code", "", path));
  card.append(title, node("p", "", call.summary ?? ""));
  if (call.description && call.description !== call.summary) card.append(node("p", "hint", call.description));
  const fields = fieldsOf(call);
  if (fields.length) {
    const table = node("table");
    for (const [name, schema, required] of fields) {
      const row = node("tr");
      row.append(cell("code", required ? `${name} *` : name), cell("span", typeOf(schema)), cell("span", schema.description ?? ""));
      table.append(row);
    }
    card.append(table);
  }
  return card;
}

function fieldsOf(call) {
  const fields = (call.parameters ?? []).map((one) => [one.name, { ...one.schema, description: one.description }, one.required]);
  const content = call.requestBody?.content ?? {};
  for (const { schema } of Object.values(content)) {
    const whole = resolved(schema);
    for (const [name, inner] of Object.entries(whole.properties ?? {})) {
      fields.push([name, inner, whole.required?.includes(name)]);
    }
  }
  return fields.sort((one, other) => Boolean(other[2]) - Boolean(one[2]));
}

function resolved(schema) {
  return schema.$ref ? api.components.schemas[schema.$ref.split("/").pop()] : schema;
}

function typeOf(schema) {
  const one = resolved(schema);
  if (one.anyOf) return one.anyOf.map(typeOf).filter((text) => text !== "null").join(" or ");
  if (one.enum) return one.enum.join(", ");
  if (one.const !== undefined) return String(one.const);
  const range = [one.minimum !== undefined && `from ${one.minimum}`, one.maximum !== undefined && `to ${one.maximum}`];
  return [one.type ?? one.title, ...range.filter(Boolean)].join(" ");
}

function node(kind, className = "", text = "") {
  return Object.assign(document.createElement(kind), { className, textContent: text });
}

function cell(kind, text) {
  const outer = node("td");
  outer.append(node(kind, "", text));
  return outer;
}
