// The operators' page. One stream of events brings all that it shows; every URL is relative, so that a prefix may stand
// before it. Text comes from the fleet and is only ever set as text.
"use strict";

const TOKEN = "coatcheck-admin-token";
const HOWS = [
  ["cached", "known here"], ["stored", "found in the store"], ["created", "new session"], ["none", "no session"],
  ["bypassed", "past a busy worker"], ["rebound", "moved from a lost worker"], ["degraded", "without the store"],
];
const $ = (id) => document.getElementById(id);

let shown = null;        // the snapshot, as merged so far
let skew = 0;            // seconds that the router's clock is ahead of ours
let look = { order: "state", page: 0, find: "" };
let stream = null;       // what ends the stream that is read now
let opened = null;       // the name of the worker whose dialog is open

// --- small tools ---------------------------------------------------------------------------------------------------

function el(tag, attributes = {}, ...children) {
  const svg = ["svg", "path", "rect", "text", "line", "g", "circle"].includes(tag);
  const node = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "text") node.textContent = value;
    else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child !== null));
  return node;
}

function put(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

function mark(node, name, value) {
  if (value === null ? node.hasAttribute(name) : node.getAttribute(name) !== value) {
    if (value === null) node.removeAttribute(name); else node.setAttribute(name, value);
  }
}

// Makes the children of `parent` those of `keys`, in their order; what stays keeps its node, and with it focus.
function sync(parent, keys, make, update) {
  const nodes = parent.kept ??= new Map();
  for (const [key, node] of nodes) if (!keys.includes(key)) { node.remove(); nodes.delete(key); }
  keys.forEach((key, at) => {
    let node = nodes.get(key);
    if (!node) nodes.set(key, node = make(key));
    if (parent.children[at] !== node) parent.insertBefore(node, parent.children[at] ?? null);
    update(node, key);
  });
}

// Made once: each takes longer to make than a row to draw.
const NUMBERS = new Intl.NumberFormat("en-US"), MINUTES = timeFormat(), SECONDS = timeFormat("2-digit");
const number = (value) => NUMBERS.format(value);
const few = (value) => value >= 100 || Number.isInteger(value) ? number(Math.round(value)) : value.toFixed(1);
const percent = (value) => value == null ? "–" : value === 100 ? "100%" : `${value.toFixed(1)}%`;

function duration(ms) {
  if (ms == null) return "–";
  if (ms < 10) return `${ms.toFixed(1)} ms`;
  return ms < 1000 ? `${Math.round(ms)} ms` : ms < 10000 ? `${(ms / 1000).toFixed(2)} s` : `${(ms / 1000).toFixed(1)} s`;
}

function span(seconds) {
  const whole = Math.max(0, Math.floor(seconds));
  for (const [unit, length, smaller, part] of [["d", 86400, "h", 3600], ["h", 3600, "m", 60], ["m", 60, "s", 1]]) {
    if (whole >= length) {
      const rest = Math.floor(whole % length / part);
      return `${Math.floor(whole / length)}${unit}${rest && whole < 10 * length ? ` ${rest}${smaller}` : ""}`;
    }
  }
  return `${whole}s`;
}

const now = () => Date.now() / 1000 + skew;
const clock = (at, exact = false) => (exact ? SECONDS : MINUTES).format(at * 1000);

function timeFormat(second) {
  return new Intl.DateTimeFormat([], { hour: "2-digit", minute: "2-digit", second, hour12: false });
}

function merge(into, changes) {
  for (const [name, value] of Object.entries(changes)) {
    if (value === null) delete into[name];
    else if (isObject(value) && isObject(into[name])) merge(into[name], value);
    else into[name] = value;
  }
}
const isObject = (value) => typeof value === "object" && value !== null && !Array.isArray(value);

// --- asking --------------------------------------------------------------------------------------------------------

const proof = () => {
  const token = sessionStorage.getItem(TOKEN);
  return token ? { "x-coatcheck-admin-token": token } : {};
};

async function ask(method, path, query = {}) {
  const words = new URLSearchParams(Object.entries(query).filter(([, value]) => value !== "" && value != null));
  const answer = await fetch(`${path}${words.size ? `?${words}` : ""}`, {
    method, headers: proof(), cache: "no-store", credentials: "same-origin",
  });
  const said = await answer.json().catch(() => ({}));
  if (!answer.ok) throw Object.assign(new Error(said.error?.message ?? `status ${answer.status}`), { status: answer.status });
  return said;
}

function alive(state, text) {
  mark($("live"), "class", `live ${state}`);
  put($("live"), text);
  $("main").classList.toggle("stale", state === "off");
}

async function follow() {
  stream?.abort();
  const mine = stream = new AbortController();
  let wait = 500;
  while (!mine.signal.aborted) {
    try {
      const query = new URLSearchParams({ order: look.order, page: look.page, find: look.find });
      const answer = await fetch(`stream?${query}`, {
        headers: { accept: "text/event-stream", ...proof() }, signal: mine.signal, cache: "no-store",
      });
      if (!answer.ok) {
        const said = await answer.json().catch(() => ({}));
        refuse(answer.status, said.error?.message ?? `The router answered ${answer.status}.`);
        if (answer.status === 403) return;
        throw new Error("refused");
      }
      await read(answer.body.pipeThrough(new TextDecoderStream()).getReader(), () => { wait = 500; });
    } catch (error) {
      if (mine.signal.aborted) return;
    }
    alive("off", "reconnecting");
    await new Promise((done) => setTimeout(done, wait));
    wait = Math.min(2 * wait, 5000);
  }
}

async function read(reader, came) {
  let text = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    text += value.replaceAll("\r", "");
    for (let end; (end = text.indexOf("\n\n")) >= 0; text = text.slice(end + 2)) {
      const lines = text.slice(0, end).split("\n");
      const field = (name) => lines.filter((line) => line.startsWith(`${name}: `)).map((line) => line.slice(name.length + 2)).join("\n");
      const data = field("data");
      if (!data) continue;
      if (field("event") === "snapshot") shown = JSON.parse(data); else merge(shown, JSON.parse(data));
      skew = shown.at - Date.now() / 1000;
      came();
      try { if (document.hidden) entitle(); else draw(); } catch (error) { console.error(error); }  // the next may be drawn
      mark($("live"), "data-beat", $("live").dataset.beat === "1" ? "2" : "1");
    }
  }
}

function refuse(status, message) {
  if (status === 403 && sessionStorage.getItem(TOKEN)) {
    sessionStorage.removeItem(TOKEN);
    askForToken("That is not this router's admin token.");
    follow();
    return;
  }
  alive("off", status === 403 ? "no access" : "refused");
  notices([["bad", `${message[0].toUpperCase()}${message.slice(1)}.`]]);
}

// --- drawing -------------------------------------------------------------------------------------------------------

function draw() {
  const { fleet, access } = shown;
  $("main").hidden = false;
  alive(fleet.draining ? "off" : "on", fleet.draining ? "draining" : "live");
  $("main").classList.remove("stale");
  put($("who"), `replica ${shown.replica}`);
  entitle();
  $("unlock").hidden = !access.token;
  put($("unlock"), access.whole ? "Lock" : "Unlock");
  for (const node of document.querySelectorAll(".whole")) node.hidden = !access.whole;
  drawNotices();
  drawTiles();
  drawHow();
  drawTtft();
  drawWorkers();
  drawReplicas();
  if (access.whole) { drawTenants(); drawEvents(); }
  if (opened) drawWorker();
  put($("foot"), `coatcheck ${shown.version} · numbers of all replicas, brought every ${shown.every} s`);
}

// All that is seen of a tab behind others.
function entitle() {
  const { fleet } = shown;
  document.title = `${fleet.available}/${fleet.workers} up · coatcheck`;
}

function notices(list) {
  sync($("notices"), list.map(([kind, text]) => `${kind} ${text}`), (key) => {
    const kind = key.slice(0, key.indexOf(" "));
    return el("p", { class: `notice ${kind}`, text: key.slice(kind.length + 1) });
  }, () => {});
}

function drawNotices() {
  const { fleet, access } = shown;
  const list = (shown.troubles ?? []).map((line) => ["warn", line]);
  if (!access.whole && !fleet.agree) list.push(["warn", "Replicas differ in what must agree."]);
  if (fleet.store !== "up") list.push(["bad", `The claim store is ${fleet.store}: known sessions go on, new ones are placed without it.`]);
  if (fleet.draining) list.push(["warn", "This replica is being stopped."]);
  if (!fleet.available) list.push(["bad", "No worker may be given a new session."]);
  if (!access.whole) list.push(["calm", "You may look. Reasons, tenants, sessions and actions are for whoever has the admin token."]);
  notices(list);
}

function drawTiles() {
  const { fleet, slot } = shown;
  const unwell = fleet.workers - fleet.available;
  const states = Object.entries(fleet.states).filter(([state]) => state !== "up").map(([state, count]) => `${count} ${state}`);
  const sessions = fleet.sessions_least === fleet.sessions_most ? number(fleet.sessions_most)
    : `${number(fleet.sessions_least)}–${number(fleet.sessions_most)}`;
  const tiles = [
    ["Workers", `${number(fleet.available)}`, `/ ${number(fleet.workers)}`, states.join(", ") || "all up",
      !fleet.available ? "bad" : unwell ? "warn" : "", "That may be given new sessions"],
    ["Turns", few(fleet.turns_per_second), "/s", `${number(fleet.running)} running${fleet.waiting ? `, ${number(fleet.waiting)} wait` : ""}`, "",
      "Of all replicas, in the last ten seconds"],
    ["Failed", fleet.failed && !fleet.failed_percent ? "<0.1%" : percent(fleet.failed_percent), "", `${number(fleet.failed)} of ${number(fleet.turns)}/min`,
      fleet.failed_percent >= 5 ? "bad" : fleet.failed ? "warn" : "", "By a worker's or the router's fault, in the last minute"],
    ["First token", duration(fleet.ttft_p50_ms), "", `p95 ${duration(fleet.ttft_p95_ms)}`, "", "Half of the last minute's turns had it within that"],
    ["Kept", percent(fleet.kept_percent), "", "of known sessions", fleet.kept_percent != null && fleet.kept_percent < 95 ? "warn" : "",
      "Turns of known sessions that went to the worker that has their cache, in the last minute"],
    ["Cached tokens", percent(fleet.cached_percent), "", fleet.cached_percent == null ? "not told by workers" : "of prompts", "",
      "Of the tokens of prompts what workers had in their caches, as they say themselves"],
    ["Sessions", sessions, "", "known", "",
      "Each replica counts those that it knows, so that one that two know counts twice: the truth lies between"],
    ["Store", fleet.store, "", fleet.store_ms == null ? "no call in 1 min" : `p95 ${duration(fleet.store_ms)}`, fleet.store === "up" ? "" : "bad",
      "The claim store, and what its calls took in the last minute"],
  ];
  sync($("tiles"), tiles.map(([label]) => label), (label) => el("div", { class: "tile" },
    el("div", { class: "label", text: label }), el("div", { class: "value" }, el("span"), el("small")), el("div", { class: "sub" })),
  (node, label) => {
    const [, value, unit, sub, kind, title] = tiles.find((tile) => tile[0] === label);
    put(node.querySelector("span"), value);
    put(node.querySelector("small"), unit);
    put(node.querySelector(".sub"), sub);
    mark(node, "class", `tile ${kind}`);
    mark(node, "title", title);
  });
}

// --- charts --------------------------------------------------------------------------------------------------------

const LEFT = 48, BOTTOM = 20, TOP = 6;

function plot(id, most, unit, paint, hover) {
  const box = $(id), width = Math.max(200, box.clientWidth), height = box.clientHeight || 190;
  const { seconds, count } = shown.slot;
  const last = Math.floor(shown.at / seconds), step = (width - LEFT) / count, high = height - TOP - BOTTOM;
  const x = (slot) => LEFT + (count - 1 - (last - slot)) * step;
  const scale = nice(most), y = (value) => TOP + high * (1 - value / scale);
  let svg = box.querySelector("svg");
  if (!svg) {
    svg = el("svg", { "aria-hidden": "true" });  // its legend says the numbers
    box.append(svg, el("div", { class: "quiet" }));
    const at = (event) => {
      const from = svg.getBoundingClientRect(), cell = (svg.clientWidth - LEFT) / shown.slot.count;
      const slot = Math.floor(shown.at / shown.slot.seconds) - (shown.slot.count - 1) + Math.floor((event.clientX - from.left - LEFT) / cell);
      point(event.clientX - from.left < LEFT ? null : slot);
    };
    const point = (slot) => {
      if (box.slot === slot) return;
      box.slot = slot;
      ({ how: drawHow, ttft: drawTtft })[id]();
    };
    svg.addEventListener("pointermove", at);
    svg.addEventListener("pointerleave", () => point(null));
  }
  mark(svg, "viewBox", `0 0 ${width} ${height}`);
  const nodes = [];
  for (const share of [0, 0.5, 1]) {
    nodes.push(el("line", { class: "gridline", x1: LEFT, x2: width, y1: y(scale * share), y2: y(scale * share) }));
    nodes.push(el("text", { x: LEFT - 7, y: y(scale * share) + 4, "text-anchor": "end", text: share ? unit(scale * share) : "0" }));
  }
  const every = width < 420 ? 30 : 18;
  for (let slot = last; slot > last - count; slot--) {
    if (slot % every === 0 && x(slot) > LEFT + 14 && x(slot) < width - 14)
      nodes.push(el("text", { x: x(slot), y: height - 4, "text-anchor": "middle", text: clock(slot * seconds) }));
  }
  const meant = box.slot != null && shown.chart[box.slot] ? box.slot : null;
  if (meant !== null) nodes.push(el("rect", { class: "cursor", x: x(meant), y: TOP, width: step, height: high }));
  nodes.push(...paint(x, y, step, last));
  svg.replaceChildren(...nodes);
  hover(meant, last);
}

function nice(most) {
  if (!(most > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(most));
  return [1, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10].map((each) => each * power).find((each) => each >= most * 0.999);
}

// The last slot is not over; it counts for the part of it that is.
const length = (slot) => Math.min(shown.slot.seconds, Math.max(2 * shown.every, shown.at - slot * shown.slot.seconds));
const column = (name) => shown.slot.series.indexOf(name);

function drawHow() {
  const slots = Object.entries(shown.chart).map(([slot, row]) => [Number(slot), row]);
  const rates = new Map(slots.map(([slot, row]) => [slot, Object.fromEntries(
    [...HOWS.map(([how]) => how), "failed"].map((name) => [name, (row[column(name)] ?? 0) / length(slot)]))]));
  const sum = (rate) => HOWS.reduce((total, [how]) => total + rate[how], 0);
  const most = Math.max(0, ...[...rates.values()].map((rate) => Math.max(sum(rate), rate.failed)));
  plot("how", most, (value) => few(value), (x, y, step) => {
    const gap = step > 5 ? 1 : 0, paths = Object.fromEntries([...HOWS.map(([how]) => how), "failed"].map((name) => [name, ""]));
    for (const [slot, rate] of rates) {
      let below = 0;
      for (const [how] of HOWS) {
        if (!rate[how]) continue;
        const top = y(below + rate[how]), foot = y(below);
        paths[how] += `M${x(slot).toFixed(1)} ${foot.toFixed(1)}V${top.toFixed(1)}h${(step - gap).toFixed(1)}V${foot.toFixed(1)}z`;
        below += rate[how];
      }
      if (rate.failed) paths.failed += `M${x(slot).toFixed(1)} ${y(rate.failed).toFixed(1)}h${(step - gap).toFixed(1)}v2.5h${(gap - step).toFixed(1)}z`;
    }
    return Object.entries(paths).map(([name, d]) => el("path", { class: `c-${name}`, d }));
  }, (meant, last) => {
    const rows = meant === null ? slots.map(([, row]) => row) : [shown.chart[meant]];
    const total = (name) => rows.reduce((all, row) => all + (row[column(name)] ?? 0), 0);
    put($("how-note"), meant === null ? "per second, last 15 minutes" : `${clock(meant * shown.slot.seconds, true)}, ${shown.slot.seconds} s`);
    const all = HOWS.reduce((whole, [how]) => whole + total(how), 0);
    put($("how").querySelector(".quiet"), all ? "" : "No turn yet.");
    const names = [...HOWS, ["failed", "failed"]].map(([how]) => how);
    sync($("how-legend"), names, (how) => el("li", { title: how }, el("span", { class: `key c-${how}` }),
      el("span", { text: ([...HOWS, ["failed", "failed"]].find(([name]) => name === how))[1] }), el("b")), (node, how) => {
      put(node.querySelector("b"), number(total(how)));
      node.classList.toggle("idle", !total(how));
    });
  });
}

function drawTtft() {
  const slots = Object.entries(shown.chart).map(([slot, row]) => [Number(slot), row]).sort(([a], [b]) => a - b);
  const values = slots.flatMap(([, row]) => [row[column("ttft_p50")], row[column("ttft_p95")]]).filter((value) => value != null);
  plot("ttft", Math.max(0, ...values), (value) => value >= 1000 ? `${few(value / 1000)} s` : `${few(value)} ms`, (x, y, step) => ["p95", "p50"].map((name) => {
    let d = "", before = null;
    for (const [slot, row] of slots) {
      const value = row[column(`ttft_${name}`)];
      if (value == null) { before = null; continue; }
      const at = `${(x(slot) + step / 2).toFixed(1)} ${y(value).toFixed(1)}`;
      d += before === slot - 1 ? `L${at}` : `M${at}h.01`;
      before = slot;
    }
    return el("path", { class: `line c-${name}`, d });
  }), (meant) => {
    put($("ttft-note"), meant === null ? "last 15 minutes" : `${clock(meant * shown.slot.seconds, true)}, ${shown.slot.seconds} s`);
    put($("ttft").querySelector(".quiet"), values.length ? "" : "No turn yet.");
    sync($("ttft-legend"), ["p50", "p95"], (name) => el("li", {}, el("span", { class: `key c-${name}` }), el("span", { class: "what" }), el("b")), (node, name) => {
      put(node.querySelector(".what"), meant === null ? `${name} in 1 min` : name);
      put(node.querySelector("b"), duration(meant === null ? shown.fleet[`ttft_${name}_ms`] : shown.chart[meant][column(`ttft_${name}`)]));
    });
  });
}

// --- workers -------------------------------------------------------------------------------------------------------

function cell(name, attributes = {}) {
  return el("td", { class: name, ...attributes });
}

function bar() {
  return el("span", { class: "amount" }, el("b"), el("svg", { viewBox: "0 0 100 7", preserveAspectRatio: "none", "aria-hidden": "true" },
    el("rect", { class: "track", width: 100, height: 7, rx: 2 }), el("rect", { class: "fill", height: 7, rx: 2, width: 0 })));
}

function makeRow(name) {
  return el("tr", { "data-worker": name },
    el("td", { class: "first" }, el("span", { class: "name", text: name }), el("span", { class: "under models" })),
    el("td", { class: "state" }, el("span", { class: "pill" }), el("span", { class: "under since" })),
    cell("n turns", { "data-label": "Turns/min" }), cell("n flight", { "data-label": "In flight" }),
    el("td", { class: "wide sessions", "data-label": "Sessions" }, bar()),
    cell("n errors", { "data-label": "Failed/min" }), cell("n ttft", { "data-label": "TTFT p95" }),
    cell("n cached", { "data-label": "Cached" }), cell("n moved", { "data-label": "Moved in/out" }),
    el("td", { class: "act" }, el("button", { type: "button", class: "quiet", text: "Details", "aria-label": `Details of ${name}`, onclick: () => openWorker(name) })));
}

function count(node, value, text, hot = false) {
  put(node, text);
  node.classList.toggle("zero", !value);
  node.classList.toggle("hot", Boolean(hot && value));
}

function updateRow(node, name) {
  const row = shown.workers.rows[name];
  if (!row) return;
  const get = (part) => node.querySelector(part);
  mark(get(".pill"), "class", `pill ${row.state}`);
  put(get(".pill"), row.state);
  put(get(".since"), `for ${span(now() - row.since)}`);
  const sick = row.error && (row.state !== "up" || row.errors_per_minute);
  const models = (row.models ?? []).join(", ") + (row.more_models ? ` and ${row.more_models} more` : "");
  const under = sick ? row.error : models;
  put(get(".models"), under || (shown.access.whole ? "no model listed" : ""));
  mark(get(".models"), "class", `under models${sick ? " bad" : ""}`);
  mark(get(".models"), "title", under);
  mark(get(".pill"), "title", row.why ?? "");
  count(get(".turns"), row.turns_per_minute, few(row.turns_per_minute));
  count(get(".flight"), row.in_flight + row.queued, number(row.in_flight) + (row.limit ? `/${row.limit}` : "") + (row.queued ? ` +${row.queued}` : ""));
  count(get(".amount b"), row.sessions, number(row.sessions));
  mark(get(".fill"), "width", String(shown.workers.most_sessions ? 100 * row.sessions / shown.workers.most_sessions : 0));
  count(get(".errors"), row.errors_per_minute, number(row.errors_per_minute), true);
  count(get(".ttft"), row.ttft_p95_ms, duration(row.ttft_p95_ms));
  count(get(".cached"), row.cached_percent, percent(row.cached_percent));
  count(get(".moved"), row.moved_in + row.moved_out, `${number(row.moved_in)} / ${number(row.moved_out)}`);
  get("button").hidden = !shown.access.whole;
}

function drawWorkers() {
  const { workers, fleet } = shown;
  sync($("workers").tBodies[0], workers.order.filter((name) => workers.rows[name]), makeRow, updateRow);
  put($("workers-note"), look.find ? `${number(workers.found)} of ${number(fleet.workers)}` : `${number(fleet.workers)}`);
  $("workers").hidden = !workers.found;
  $("workers-empty").hidden = Boolean(workers.found);
  put($("workers-empty"), look.find ? "No worker is like that." : "There is no worker. Name some with --worker, or have them register at the claims.");
  $("pager").hidden = workers.pages < 2;
  put($("page"), `page ${workers.page + 1} of ${workers.pages}`);
  $("before").disabled = workers.page < 1;
  $("after").disabled = workers.page + 1 >= workers.pages;
  const absent = shown.access.whole ? shown.absent : {};
  sync($("absent"), Object.keys(absent), (name) => el("li", { "data-worker": name }, el("span"),
    el("button", { type: "button", class: "quiet", text: "Put back", "aria-label": `Put ${name} back`, onclick: () => act(name, "uncordon", {}).catch((error) => notices([["bad", error.message]])) })),
  (node, name) => put(node.querySelector("span"), `${name} was ${absent[name].mark} by ${absent[name].by}`));
}

function openWorker(name) {
  const sure = $("worker-acts").querySelector("[data-act=remove]");  // of this worker nobody is sure yet
  sure.classList.remove("sure");
  put(sure, "Remove");
  opened = name;
  put($("worker-said"), "");
  drawWorker();
  $("worker").showModal();
}

function facts(list, pairs) {
  const rows = pairs.filter(([, value]) => value !== "" && value != null);
  sync(list, rows.flatMap(([name]) => [`dt ${name}`, `dd ${name}`]), (key) => el(key.slice(0, 2)), (node, key) => {
    const name = key.slice(3);
    put(node, key.startsWith("dt") ? name : String(rows.find(([each]) => each === name)[1]));
  });
}

function drawWorker() {
  const row = shown.workers.rows[opened];
  put($("worker-name"), opened);
  mark($("worker-state"), "class", `pill ${row?.state ?? "gone"}`);
  put($("worker-state"), row?.state ?? "not on this page");
  for (const button of $("worker-acts").querySelectorAll("button")) button.disabled = !row;
  if (!row) return;
  facts($("worker-facts"), [
    ["Address", row.url],
    ["Named by", row.source],
    ["Models", (row.models ?? []).join(", ") + (row.more_models ? ` and ${row.more_models} more` : "")],
    ["Ranks", row.ranks || ""],
    ["Phase", row.phase === "both" ? "" : `${row.phase} only`],
    ["State", `${row.state} for ${span(now() - row.since)}`],
    ["Reason", row.why],
    ["Decided", row.by && `${row.mark} by ${row.by}${row.deadline ? `; sessions move at ${clock(row.deadline, true)}` : ""}`],
    ["Last error", row.error && `${row.error}${row.error_at ? `, ${span(now() - row.error_at)} ago` : ""}`],
    ["Turns", `${few(row.turns_per_minute)} a minute, ${number(row.in_flight)} in flight${row.queued ? `, ${number(row.queued)} wait` : ""}`],
    ["Sessions", `${number(row.sessions)}, of which this replica knows ${number(row.sessions_here)}`],
    ["Moved", `${number(row.moved_in)} turns came from lost workers, ${number(row.moved_out)} left it when it was lost`],
  ]);
  const button = (word) => $("worker-acts").querySelector(`[data-act=${word}]`);
  button("uncordon").hidden = row.mark === "none";
  button("cordon").hidden = row.mark === "cordoned";
  button("release").disabled = !row.sessions_here;
}

async function act(name, word, query) {
  return ask("POST", `workers/${encodeURIComponent(name)}/${word}`, query);
}

async function onAct(event) {
  const button = event.target.closest("button[data-act]");
  if (!button) return;
  const word = button.dataset.act, name = opened, said = $("worker-said");
  if (word === "remove" && !button.classList.contains("sure")) {
    button.classList.add("sure");
    put(button, "Remove it now?");
    setTimeout(() => { button.classList.remove("sure"); put(button, "Remove"); }, 4000);
    return;
  }
  button.disabled = true;
  mark(said, "class", "said");
  put(said, "…");
  try {
    if (word === "release") {
      let released = 0, pending = 0, left = 1;
      for (let round = 0; left && round < 200; round++) {
        const one = await act(name, word, {});
        released += one.released;
        pending = one.pending;
        left = one.released ? one.left : 0;
        put(said, `${number(released)} sessions are released…`);
      }
      put(said, `${number(released)} sessions are released${pending ? `, ${number(pending)} when their turns end` : ""}.`);
    } else {
      await act(name, word, { by: "the page", deadline: word === "drain" ? $("deadline").value : "" });
      put(said, { cordon: "No new sessions go there.", drain: "It is draining.", remove: "It is removed.", uncordon: "It is in use again." }[word]);
    }
  } catch (error) {
    mark(said, "class", "said bad");
    put(said, error.message);
  }
  button.disabled = false;
}

// --- replicas, tenants, events -------------------------------------------------------------------------------------

function drawReplicas() {
  const rows = shown.replicas, names = Object.keys(rows);
  const order = names.sort((a, b) => rows[b].this - rows[a].this || rows[a].replica.localeCompare(rows[b].replica));
  put($("replicas-note"), names.length > 1 ? (shown.fleet.agree ? "all agree" : "they differ") : "");
  sync($("replicas").tBodies[0], order, () => el("tr", {},
    el("td", {}, el("span", { class: "name" }), el("span", { class: "under" })),
    el("td", { class: "agrees" }, el("span", { class: "pill" })),
    cell("n turns minor"), cell("n sessions"), cell("n lag minor"), cell("n store")), (node, key) => {
    const row = rows[key], get = (part) => node.querySelector(part);
    put(get(".name"), row.replica);
    put(get(".under"), `${row.this ? "this one · " : ""}up ${span(now() - row.since)}${row.silent_seconds ? ` · silent for ${span(row.silent_seconds)}` : ""}${row.version === shown.version ? "" : ` · version ${row.version}`}`);
    const differs = row.differs.length;
    mark(get(".pill"), "class", `pill ${differs ? "no" : row.silent_seconds ? "suspect" : "yes"}`);
    put(get(".pill"), differs ? row.differs.join(", ") : row.silent_seconds ? "silent" : names.length > 1 ? "agrees" : "alone");
    mark(get(".pill"), "title", (row.how ?? []).filter(Boolean).join("; "));
    count(get(".turns"), row.turns, number(row.turns));
    count(get(".sessions"), row.sessions, number(row.sessions));
    count(get(".lag"), row.lag_ms, duration(row.lag_ms), row.lag_ms > 250);
    put(get(".store"), row.store === "up" ? duration(row.store_ms) : row.store);
    get(".store").classList.toggle("hot", row.store !== "up");
    get(".store").classList.toggle("zero", row.store === "up" && row.store_ms == null);
  });
}

function drawTenants() {
  const rows = shown.tenants, names = Object.keys(rows);
  if (names.length) $("tenants-card").seen = true;
  $("tenants-card").hidden = !$("tenants-card").seen;
  $("tenants").hidden = !names.length;
  $("tenants-empty").hidden = Boolean(names.length);
  sync($("tenants").tBodies[0], names.sort((a, b) => rows[b].running - rows[a].running || a.localeCompare(b)), (name) => el("tr", {},
    el("td", { class: "name", text: name }), cell("n running"), cell("n waiting"), cell("n limit")), (node, name) => {
    count(node.querySelector(".running"), rows[name].running, number(rows[name].running));
    count(node.querySelector(".waiting"), rows[name].waiting, number(rows[name].waiting));
    put(node.querySelector(".limit"), rows[name].limit ? number(rows[name].limit) : "–");
  });
}

// Whom an event is about, where it does not say so itself.
function about({ message, fields }) {
  const names = [["worker", "at"], ["session", "session"], ["tenant", "tenant"]].filter(([name]) => fields[name] && !message.includes(fields[name]));
  return names.length ? el("span", { class: "about", text: names.map(([name, word]) => `${word} ${fields[name]}`).join(", ") }) : null;
}

function drawEvents() {
  const keys = Object.keys(shown.events).sort((a, b) => b - a);
  $("events-empty").hidden = Boolean(keys.length);
  sync($("events"), keys, (key) => {
    const event = shown.events[key];
    return el("li", { class: event.level }, el("time", { text: clock(event.at, true), title: new Date(event.at * 1000).toLocaleString() }),
      el("span", { class: "kind", text: event.kind.replaceAll("_", " ") }), el("span", { class: "text", text: event.message }, about(event)));
  }, () => {});
}

// --- sessions ------------------------------------------------------------------------------------------------------

const isHash = (text) => /^[0-9a-f]{12,40}$/.test(text);  // or its first digits, as lists and the log show it

async function onSearch(event) {
  event?.preventDefault();
  const id = $("session").value.trim(), worker = $("at").value.trim();
  try {
    if (id) {
      const tenant = $("tenant").value.trim();
      const hashed = isHash(id) && !tenant ? await ask("GET", "session", { session: id, hashed: "true" }).catch(() => null) : null;
      const query = hashed ? { session: hashed.session, hashed: "true" } : { session: id, tenant };
      found(explained(hashed ?? await ask("GET", "session", query), query));
    } else {
      found(...await listed(worker, ""));
    }
  } catch (error) {
    found(el("p", { class: "empty", text: error.status === 404 ? "No such session is bound: its next turn is its first, and is placed anew." : error.message }));
  }
}

function found(...nodes) {
  $("found").replaceChildren(...nodes);
}

const SOURCES = {
  memory: "this replica knows its claim, and the store's watch shows that it stands: the next turn here goes there without a call to the store",
  store: "its claim stands in the store; this replica has not served it yet, or reads it again with the next turn",
  unproven: "this replica remembers its claim and cannot show now that it still stands: it is read again before it is used",
  degraded: "it was placed without the store, and is claimed when that is back",
  unreadable: "what stands at its key is no claim that can be read; it goes where the hash says",
};

function explained(session, query) {
  const where = session.worker + (session.rank == null ? "" : `, rank ${session.rank}`);
  const list = el("dl");
  facts(list, [
    ["Hash", session.session],
    ["Why", SOURCES[session.source] ?? session.source],
    ["Worker", session.known_worker ? "" : "is not in this replica's fleet: the next turn moves the session"],
    ["Bound", session.age_seconds == null ? "" : `${span(session.age_seconds)} ago, by ${session.created_by ?? "a replica"}`],
    ["Moved", session.generation ? `${session.generation} times` : "never"],
    ["Turns here", session.active_here],
    ["Ends", session.expires_in_seconds == null ? "" : session.expires_in_seconds <= 0 ? "now, if no other replica has renewed it" : `in ${span(session.expires_in_seconds)} without another turn`],
  ]);
  return el("div", { class: "explained", tabindex: "-1" }, el("p", {}, "The session is at ", el("b", { text: where }), "."), list,
    el("div", { class: "acts" }, closing(query, (text) => found(el("p", { class: "empty", text })))));
}

function closing(query, then, name = null) {
  return el("button", { type: "button", class: "danger", text: "Close", "aria-label": name && `Close session ${name}`, title: "Its claim goes: the next turn is its first", onclick: async (event) => {
    event.target.disabled = true;
    try {
      const { outcome } = await ask("DELETE", "session", query);
      then({ closed: "It is closed.", pending: "It is closed when its turns here have ended, or the store is back.", gone: "It was closed already." }[outcome] ?? outcome);
    } catch (error) {
      event.target.disabled = false;
      event.target.after(el("span", { class: "said bad", text: error.message }));
    }
  } });
}

async function listed(worker, after) {
  const { sessions, next, total } = await ask("GET", "sessions", { worker, after, limit: 25 });
  if (!sessions.length) return [el("p", { class: "empty", text: worker ? `This replica knows no session at ${worker}.` : "This replica knows no session." })];
  const body = el("tbody");
  for (const session of sessions) {
    const query = { session: session.session, hashed: "true" };
    const row = el("tr", {},
      el("td", {}, el("button", { type: "button", class: "quiet mono", text: session.session.slice(0, 12), title: session.session, onclick: () => {
        found(explained(session, query));
        $("found").firstChild.focus();  // what had it is gone
      } })),
      el("td", { text: session.worker + (session.rank == null ? "" : ` / ${session.rank}`) }),
      el("td", { class: "minor", text: session.source }), el("td", { class: "n", text: String(session.active_here) }),
      el("td", { class: "n minor", text: session.age_seconds == null ? "–" : span(session.age_seconds) }),
      el("td", { class: "act" }, closing(query, () => row.remove(), session.session.slice(0, 12))));
    body.append(row);
  }
  const head = el("tr", {}, el("th", { text: "Session" }), el("th", { text: "Worker" }), el("th", { class: "minor", text: "Known by" }),
    el("th", { class: "n", text: "Turns" }), el("th", { class: "n minor", text: "Age" }), el("th", {}, el("span", { class: "sr", text: "More" })));
  const pager = el("div", { class: "pager" }, el("span", { text: `of ${number(total)} that this replica knows` }),
    next ? el("button", { type: "button", class: "quiet", text: "Next", onclick: async () => found(...await listed(worker, next)) }) : null);
  return [el("table", { class: "grid list", "aria-label": "Sessions" }, el("thead", {}, head), body), pager];
}

// --- what people do ------------------------------------------------------------------------------------------------

function askForToken(said = "") {
  put($("ask-said"), said);
  $("token").value = "";
  if (!$("ask").open) $("ask").showModal();
}

let typing = 0;
$("find").addEventListener("input", () => {
  clearTimeout(typing);
  typing = setTimeout(() => { look = { ...look, find: $("find").value.trim(), page: 0 }; follow(); }, 250);
});
$("order").addEventListener("change", () => { look = { ...look, order: $("order").value, page: 0 }; follow(); });
$("before").addEventListener("click", () => { look = { ...look, page: Math.max(0, shown.workers.page - 1) }; follow(); });
$("after").addEventListener("click", () => { look = { ...look, page: shown.workers.page + 1 }; follow(); });
$("worker-acts").addEventListener("click", onAct);
$("worker").addEventListener("close", () => { opened = null; });
for (const dialog of [$("worker"), $("ask")]) dialog.addEventListener("click", (event) => { if (event.target === dialog) dialog.close(); });
$("search").addEventListener("submit", onSearch);
$("unlock").addEventListener("click", () => {
  if (!shown?.access.whole) { askForToken(); return; }
  sessionStorage.removeItem(TOKEN);
  follow();
});
$("ask-form").addEventListener("submit", (event) => {
  if (event.submitter?.value !== "yes" || !$("token").value.trim()) return;
  sessionStorage.setItem(TOKEN, $("token").value.trim());
  follow();
});
addEventListener("resize", () => { if (shown) draw(); });
document.addEventListener("visibilitychange", () => { if (shown && !document.hidden) draw(); });
follow();
