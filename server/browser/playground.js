"use strict";
// The playground: one conversation at a time, kept in this browser with those before it. The state is `messages`, of which the
// log is drawn anew after each change; only an answer that streams is drawn while it grows. Nothing that the server or a model
// says is read as HTML: markdown.js makes nodes of it, and everything else is set as text.
const $ = id => document.getElementById(id);
const KNOBS = ["temperature", "top_p", "top_k", "max_completion_tokens", "seed"];
const IDEAS = ["What is 17 + 25?", "Write a Python function that reads a file.", "What can you do?"]; // which the embedded model knows as well
const ENDS = {stop: "complete", length: "cut off at the limit of tokens", tool_calls: "asks for a tool", stopped: "stopped"};
const POINTS = 60, MAX_KEPT = 50, STORE = "fa_serve.playground", NEAR_END = 80;
let messages = [], model = null, card = null, running = null, editing = null, pictures = [], session = 0;
let kept = {current: null, theme: "light dark", knobs: {}, conversations: []};

function make(tag, options = {}, ...children) {
  const node = document.createElement(tag);
  const {name, ...own} = options;
  Object.assign(node, own);
  if (name) node.setAttribute("aria-label", name);
  node.append(...children);
  return node;
}
const button = (text, does, options = {}) => {
  const node = make("button", {type: "button", textContent: text, ...options});
  node.addEventListener("click", does);
  return node;
};
const say = text => { $("said").textContent = text; };
const headers = () => ($("key").value ? {authorization: `Bearer ${$("key").value}`} : {});

// What this browser keeps. Images are left out, and then the oldest conversations, when there is no room.
function load() {
  try { kept = {...kept, ...JSON.parse(localStorage.getItem(STORE) ?? "{}")}; } catch { /* it keeps nothing, or something else */ }
  const whole = each => each && typeof each.title === "string" && Array.isArray(each.messages) && each.messages.every(message => typeof message?.content === "string");
  kept.conversations = Array.isArray(kept.conversations) ? kept.conversations.filter(whole) : [];
}
function store() {
  const withoutImages = (key, value) => (key === "images" ? undefined : value);
  const write = (conversations, replacer) => {
    try { localStorage.setItem(STORE, JSON.stringify({...kept, conversations}, replacer)); return true; } catch { return false; }
  };
  if (write(kept.conversations)) return;
  for (let count = kept.conversations.length; count > 0; count--) if (write(kept.conversations.slice(0, count), withoutImages)) return;
}
function keep() {
  const old = kept.conversations.find(each => each.id === kept.current);
  kept.knobs = Object.fromEntries([...KNOBS, "system"].map(knob => [knob, $(knob).value]));
  if (messages.length) {
    const title = messages[0].content.trim().split("\n")[0].slice(0, 60) || "Image";
    const now = old ?? {id: crypto.randomUUID?.() ?? String(Date.now())};
    kept.conversations = [Object.assign(now, {title, messages}), ...kept.conversations.filter(each => each !== now)].slice(0, MAX_KEPT);
    kept.current = now.id;
  }
  store();
  drawHistory();
}
function drawHistory() {
  $("history").replaceChildren(...kept.conversations.map(each => {
    const open = button(each.title, () => show(each)), drop = button("×", () => forget(each), {name: `Forget ${each.title}`});
    if (each.id === kept.current) open.setAttribute("aria-current", "true");
    return make("li", {}, open, drop);
  }));
  $("clear").disabled = !kept.conversations.length;
}
function show(conversation) {
  begin();
  messages = conversation.messages;
  kept.current = conversation.id;
  draw();
  keep();
  close();
}
function forget(conversation) {
  kept.conversations = kept.conversations.filter(each => each !== conversation);
  if (conversation.id === kept.current) begin();
  keep();
  $("clear").focus();
}
function begin() {
  running?.abort();
  idle();
  session++;
  messages = [];
  kept.current = null;
  stopEditing();
  draw();
}

// The log
function messageNode(message, index) {
  const mine = message.role === "user", node = make("article", {className: `message ${message.role}`, name: mine ? "You" : "Model"});
  const text = make("div", {className: "text"}), tools = make("div", {className: "tools"});
  if (message.images?.length) node.append(make("div", {className: "sent"}, ...message.images.map((src, i) => make("img", {src, alt: `Image ${i + 1}`}))));
  if (message.reasoning) node.append(thought(message.reasoning));
  if (mine) text.textContent = message.content;
  else text.append(markdown(message.content));
  node.append(text);
  if (message.error) {
    node.classList.add("error");
    node.append(make("p", {className: "problem", textContent: message.error}));
  }
  if (mine) tools.append(button("Edit", () => edit(index)));
  else {
    if (index === messages.length - 1) tools.append(button("Retry", () => retry(index)));
    if (message.content) tools.append(button("Copy", event => copy(message.content, event.target)));
    if (message.note) tools.append(make("span", {className: "note", textContent: message.note}));
  }
  node.append(tools);
  return node;
}
function thought(text) {
  const box = make("details", {}, make("summary", {textContent: "Thoughts"}), make("div", {className: "thought", textContent: text}));
  return box;
}
function draw() {
  $("log").replaceChildren(...(messages.length ? messages.map(messageNode) : [empty]));
  $("log").scrollTop = $("log").scrollHeight;
}
const empty = $("empty");
async function copy(text, from) {
  try {
    await navigator.clipboard.writeText(text);
  } catch { // a page without TLS has no clipboard, but what is selected can be copied
    const area = make("textarea", {value: text});
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
    from.focus();
  }
  say("Copied");
  const before = from.textContent;
  from.textContent = "Copied";
  setTimeout(() => { from.textContent = before; }, 1500);
}
$("log").addEventListener("click", event => {
  if (event.target.dataset.copies === "code") copy(event.target.closest(".code").querySelector("code").textContent, event.target);
});

// Requests
async function refusal(response) {
  const body = await response.json().catch(() => null);
  return new Error(body?.error?.message ?? `The server answered with status ${response.status}.`);
}
const reason = error => (error instanceof TypeError ? "The server can't be reached. Your message stays here: press Retry when it runs." : error.message);

async function* events(response) {
  const decoder = new TextDecoder(), reader = response.body.getReader();
  let rest = "";
  for (;;) {
    const {done, value} = await reader.read();
    if (done) return;
    const lines = (rest + decoder.decode(value, {stream: true})).split("\n\n");
    rest = lines.pop();
    for (const line of lines) {
      if (line === "data: [DONE]") return;
      const event = JSON.parse(line.slice(6));
      if (event.error) throw new Error(event.error.message);
      yield event;
    }
  }
}

// What is sent of the conversation: a question without an answer, which failed or was stopped, is left out.
function told() {
  const sent = [];
  messages.forEach((message, index) => {
    if (message.role === "assistant") {
      if (message.content) sent.push({role: "assistant", content: message.content});
      else sent.pop();
    } else {
      const images = (message.images ?? []).map(url => ({type: "image_url", image_url: {url}}));
      sent.push({role: "user", content: images.length ? [...images, {type: "text", text: message.content}] : message.content});
    }
  });
  const system = $("system").value.trim();
  return system ? [{role: "system", content: system}, ...sent] : sent;
}

async function answer() {
  const mine = session, reply = {role: "assistant", content: "", reasoning: ""};
  const body = {model, messages: told(), stream: true, stream_options: {include_usage: true}};
  for (const knob of KNOBS) if ($(knob).value !== "") body[knob] = Number($(knob).value);
  draw();
  const text = make("div", {className: "text"}), thoughts = make("div", {className: "thought"}), speed = make("span", {className: "speed"});
  const node = make("article", {className: "message assistant", name: "Model"}, thoughts, text);
  $("log").append(node);
  $("log").scrollTop = $("log").scrollHeight;
  $("log").setAttribute("aria-busy", "true");
  const start = performance.now();
  let first = null, usage = null, why = "stopped", pieces = 0, due = 0;
  const grow = force => {
    const now = performance.now();
    if (!force && now < due) return;
    const {scrollTop, clientHeight, scrollHeight} = $("log"), follows = scrollTop + clientHeight > scrollHeight - NEAR_END;
    thoughts.textContent = reply.reasoning;
    text.replaceChildren(markdown(reply.content));
    if (pieces > 1) { speed.textContent = `${((pieces - 1) * 1000 / (now - start - first)).toFixed(0)} tokens/s`; node.append(speed); }
    if (follows) $("log").scrollTop = $("log").scrollHeight;
    due = performance.now() + Math.max(40, 4 * (performance.now() - now)); // drawing takes a fifth of the time at most
  };
  running = new AbortController();
  $("send").disabled = true; $("stop").disabled = false;
  try {
    const response = await fetch("v1/chat/completions", {
      method: "POST", headers: {...headers(), "content-type": "application/json"}, body: JSON.stringify(body), signal: running.signal,
    });
    if (!response.ok) throw await refusal(response);
    for await (const event of events(response)) {
      usage = event.usage ?? usage;
      for (const choice of event.choices) {
        const {reasoning_content: thinks, content: says} = choice.delta;
        if (thinks || says) { first ??= performance.now() - start; pieces++; }
        reply.reasoning += thinks ?? "";
        reply.content += says ?? "";
        why = choice.finish_reason ?? why;
      }
      if (mine === session) grow(false);
    }
  } catch (error) {
    if (error.name !== "AbortError") {
      reply.error = reason(error);
      hello();
    }
  }
  if (mine !== session) return; // another conversation is shown, which may have begun an answer
  idle();
  const seconds = (performance.now() - start) / 1000, count = usage?.completion_tokens ?? pieces;
  const rate = count > 1 && first !== null ? (count - 1) / (seconds - first / 1000) : null;
  if (!reply.error) reply.note = [ENDS[why] ?? why, count && `${count} ${count === 1 ? "token" : "tokens"}`, first !== null && `first token after ${first.toFixed(0)} ms`, rate && `${rate.toFixed(rate < 10 ? 1 : 0)} tokens/s`, `${seconds.toFixed(2)} s`].filter(Boolean).join(" · ");
  messages.push(reply);
  draw();
  keep();
  say(reply.error ? `The answer failed: ${reply.error}` : "The answer is complete");
  $("question").focus();
}

function idle() {
  running = null;
  $("send").disabled = false; $("stop").disabled = true;
  $("log").removeAttribute("aria-busy");
}
function ask(content, images) {
  if (editing !== null) messages.length = editing;
  stopEditing();
  messages.push(images.length ? {role: "user", content, images} : {role: "user", content});
  keep();
  return answer();
}
function retry(index) {
  if (running) return;
  messages.length = index;
  answer();
}
function edit(index) {
  if (running) return;
  editing = index;
  $("question").value = messages[index].content;
  pictures = [...(messages[index].images ?? [])];
  drawPictures();
  $("editing").hidden = false;
  $("question").focus();
}
function stopEditing() {
  if (editing === null) return;
  editing = null;
  $("editing").hidden = true;
  $("question").value = "";
  pictures = [];
  drawPictures();
}

// Images of the next message, where the model takes some
const sees = () => card?.input_modalities?.includes("image") ?? false;
function add(files) {
  for (const file of files) {
    if (!file.type.startsWith("image/")) continue;
    if (!sees()) { say("This model takes no images."); continue; }
    const reader = new FileReader();
    reader.addEventListener("load", () => { pictures.push(reader.result); drawPictures(); });
    reader.readAsDataURL(file);
  }
}
function drawPictures() {
  $("pictures").replaceChildren(...pictures.map((src, i) => make("li", {},
    make("img", {src, alt: `Image ${i + 1}`}), button("Remove", () => { pictures.splice(i, 1); drawPictures(); $("question").focus(); }, {name: `Remove image ${i + 1}`}))));
}

$("form").addEventListener("submit", event => {
  event.preventDefault();
  const question = $("question").value.trim();
  if ((!question && !pictures.length) || running) return;
  if (!model) { say("The server does not answer yet. Your text stays here."); return; }
  const images = pictures;
  $("question").value = "";
  pictures = [];
  drawPictures();
  ask(question, images);
});
$("question").addEventListener("keydown", event => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); $("form").requestSubmit(); }
});
$("question").addEventListener("paste", event => add(event.clipboardData.files));
$("form").addEventListener("dragover", event => { event.preventDefault(); $("form").classList.add("over"); });
$("form").addEventListener("dragleave", () => $("form").classList.remove("over"));
$("form").addEventListener("drop", event => { event.preventDefault(); $("form").classList.remove("over"); add(event.dataTransfer.files); });
$("attach").addEventListener("click", () => $("file").click());
$("file").addEventListener("change", () => { add($("file").files); $("file").value = ""; });
$("keep").addEventListener("click", () => { stopEditing(); $("question").focus(); });
document.addEventListener("keydown", event => {
  if (event.key !== "Escape") return;
  if (running) running.abort();
  else if (document.body.classList.contains("open")) close();
  else stopEditing();
});
$("stop").addEventListener("click", () => running?.abort());
$("reset").addEventListener("click", () => { begin(); keep(); $("question").focus(); });
$("clear").addEventListener("click", () => { kept.conversations = []; begin(); keep(); $("question").focus(); });
$("key").addEventListener("change", hello);
$("adapter").addEventListener("change", () => { model = $("adapter").value; });
for (const knob of [...KNOBS, "system"]) $(knob).addEventListener("change", keep);
$("theme").addEventListener("change", () => { kept.theme = $("theme").value; document.documentElement.style.colorScheme = kept.theme; store(); });

// Views, and the settings on a narrow screen
function close() {
  document.body.classList.remove("open");
  $("panel").setAttribute("aria-expanded", "false");
  if (document.activeElement === document.body) $("panel").focus();
}
$("panel").addEventListener("click", () => {
  const open = document.body.classList.toggle("open");
  $("panel").setAttribute("aria-expanded", String(open));
});
function turn() {
  const encodes = card && card.task !== "generate", names = ["chat", "try", "about"];
  const wanted = location.hash.slice(1), view = names.includes(wanted) && !(wanted === "try" && !encodes) && !(wanted === "chat" && encodes) ? wanted : encodes ? "try" : "chat";
  $("to-chat").hidden = Boolean(encodes);
  $("to-try").hidden = !encodes;
  for (const name of names) {
    $(name).hidden = name !== view;
    $(`to-${name}`).toggleAttribute("aria-current", name === view);
    if (name === view) $(`to-${name}`).setAttribute("aria-current", "page");
  }
}
addEventListener("hashchange", () => { turn(); close(); });

let greeting = 0;
async function hello() {
  clearTimeout(greeting);
  try {
    const response = await fetch("v1/models", {headers: headers()});
    if (!response.ok) throw await refusal(response);
    const cards = (await response.json()).data;
    card = cards[0];
    model = cards.some(each => each.id === model) ? model : card.id;
    $("model").value = card.id;
    $("adapter").replaceChildren(...cards.map((each, i) => make("option", {value: each.id, textContent: i ? each.id : "none", selected: each.id === model})));
    $("adapter-label").hidden = cards.length < 2;
    $("model").classList.remove("lost");
    $("attach").hidden = !sees();
    about(cards, (await (await fetch("version", {headers: headers()})).json()).version);
    prepareTrial();
    turn();
  } catch (error) {
    $("model").value = error instanceof TypeError ? "the server can't be reached" : error.message;
    $("model").classList.add("lost");
    clearTimeout(greeting);
    greeting = setTimeout(hello, 3000);
  }
}

function about([first, ...adapters], version) {
  const facts = {
    Name: first.id, "Made for": {generate: "chats and completions", embed: "embeddings", score: "scores of pairs of texts", classify: "classes of texts"}[first.task] ?? first.task,
    Takes: first.input_modalities.join(" and "), Context: `${first.max_model_len} tokens`, Adapters: adapters.map(each => each.id).join(", ") || "none",
    Server: `fa_serve ${version}`, Since: new Date(1000 * first.created).toLocaleString(),
  };
  $("facts").replaceChildren(...Object.entries(facts).flatMap(([name, value]) => [make("dt", {textContent: name}), make("dd", {textContent: value})]));
}

// A view for encoders: similarities of embeddings, a ranking, or classes
const TRIALS = {
  embed: ["Similarity of texts", "A dog sleeps.\nA puppy naps.\nStocks fell.", async texts => {
    const {data} = await post("v1/embeddings", {model, input: texts});
    const vectors = data.map(each => each.embedding), norms = vectors.map(v => Math.hypot(...v));
    const cosine = (i, j) => vectors[i].reduce((sum, x, k) => sum + x * vectors[j][k], 0) / (norms[i] * norms[j]);
    return grid(["", ...texts.map((_, i) => String(i + 1))], texts.map((text, i) => [`${i + 1}. ${text}`, ...texts.map((_, j) => cosine(i, j))]), `${vectors[0].length} numbers a text; cosine similarity`);
  }],
  score: ["Rank texts for a query", "Cats are animals.\nParis is in France.", async texts => {
    const {results} = await post("v1/rerank", {model, query: $("query").value, documents: texts});
    return grid(["Text", "Score"], results.map(each => [texts[each.index], each.relevance_score]), "The best text first");
  }],
  classify: ["Classes of texts", "I love it.\nIt broke at once.", async texts => {
    const {data} = await post("classify", {model, input: texts});
    return grid(["Text", "Class", "Probability"], data.map(each => [texts[each.index], each.label, Math.max(...each.probs)]), "");
  }],
};
async function post(path, body) {
  const response = await fetch(path, {method: "POST", headers: {...headers(), "content-type": "application/json"}, body: JSON.stringify(body)});
  if (!response.ok) throw await refusal(response);
  return response.json();
}
function grid(head, rows, note) {
  const cell = value => (typeof value === "number" ? make("td", {className: "number", textContent: value.toFixed(3)}) : make("td", {textContent: value}));
  const table = make("table", {}, make("thead", {}, make("tr", {}, ...head.map(text => make("th", {textContent: text})))), make("tbody", {}, ...rows.map(row => make("tr", {}, ...row.map(cell)))));
  return make("div", {}, table, make("p", {className: "note", textContent: note}));
}
function prepareTrial() {
  if (card.task === "generate" || $("trial-title").textContent) return;
  const [title, sample] = TRIALS[card.task] ?? [`This page has no view for ${card.task}: the API reference shows its route`, ""];
  $("trial-title").textContent = title;
  $("texts").value = sample;
  $("query-label").hidden = card.task !== "score";
  $("compute").disabled = !TRIALS[card.task];
}
$("trial").addEventListener("submit", async event => {
  event.preventDefault();
  const texts = $("texts").value.split("\n").map(line => line.trim()).filter(Boolean);
  if (!texts.length || !TRIALS[card?.task]) return;
  $("compute").disabled = true;
  try { $("result").replaceChildren(await TRIALS[card.task][2](texts)); }
  catch (error) { $("result").replaceChildren(make("p", {className: "problem", textContent: reason(error)})); }
  finally { $("compute").disabled = false; }
});

// Charts of /metrics, which is read once a second. Rates and means are over the time since the last reading.
const CHARTS = [
  ["Generated tokens", "/s", (now, was, seconds) => (now.generation_tokens_total - was.generation_tokens_total) / seconds],
  ["Time to first token", " ms", mean("time_to_first_token_seconds")],
  ["Time between tokens", " ms", mean("inter_token_latency_seconds")],
  ["Running sequences", "", now => now.num_requests_running, 0],
  ["Waiting sequences", "", now => now.num_requests_waiting, 0],
  ["KV cache in use", " %", now => 100 * now.kv_cache_usage_perc],
];
function mean(name) {
  return (now, was) => {
    const count = now[`${name}_count`] - was[`${name}_count`];
    return count > 0 ? 1000 * (now[`${name}_sum`] - was[`${name}_sum`]) / count : null;
  };
}
const charts = CHARTS.map(([title, unit, value, digits = 1]) => {
  const figure = document.createElement("figure"), caption = document.createElement("figcaption"), output = document.createElement("output");
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg"), line = document.createElementNS(svg.namespaceURI, "polyline");
  svg.setAttribute("viewBox", `0 0 ${POINTS - 1} 1`);
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("aria-hidden", "true");
  svg.append(line); caption.append(title, output); figure.append(caption, svg); $("charts").append(figure);
  const points = [];
  return (now, was, seconds) => {
    const latest = value(now, was, seconds);
    points.push(latest ?? points.at(-1) ?? 0);
    if (points.length > POINTS) points.shift();
    const top = Math.max(...points, 1e-9);
    line.setAttribute("points", points.map((y, i) => `${POINTS - points.length + i},${1 - 0.95 * y / top}`).join(" "));
    output.value = `${points.at(-1).toFixed(points.at(-1) < 10 ? digits : 0)}${unit}`;
  };
});
let was = null, then = 0;
async function look() {
  try {
    const response = await fetch("metrics", {headers: headers()});
    if (response.ok && !document.hidden) {
      const now = {}, time = performance.now();
      for (const [, name, labels, value] of (await response.text()).matchAll(/^fa_serve:(\w+){(.*)} (\S+)$/gm))
        if (!labels.includes("le=")) now[name] = Number(value);
      for (const name of ["time_to_first_token_seconds", "inter_token_latency_seconds"]) { now[`${name}_count`] ??= 0; now[`${name}_sum`] ??= 0; }
      if (was) for (const draw of charts) draw(now, was, (time - then) / 1000);
      was = now; then = time;
    }
  } catch { // the server has gone
    if (!$("model").classList.contains("lost")) hello();
  } finally {
    setTimeout(look, 1000);
  }
}

load();
for (const [knob, value] of Object.entries(kept.knobs)) if ([...KNOBS, "system"].includes(knob)) $(knob).value = value;
$("theme").value = kept.theme;
document.documentElement.style.colorScheme = $("theme").value;
$("ideas").append(...IDEAS.map(idea => make("li", {}, button(idea, () => { $("question").value = idea; $("form").requestSubmit(); }))));
const last = kept.conversations.find(each => each.id === kept.current);
if (last) messages = last.messages;
draw();
drawHistory();
hello();
look();
