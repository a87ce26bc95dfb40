"use strict";
// Draws the page from its data. Every text of the run is set as text, never as markup.
const data = JSON.parse(document.getElementById("data").textContent);
const SVG = "http://www.w3.org/2000/svg";
const COLOURS = {
  "decode": "#2e90fa", "prefill": "#1849a9", "decode and prefill": "#53b1fd", "publish": "#7a5af8",
  "pack": "#12b76a", "work": "#6ce9a6", "optimizer": "#6938ef", "supervised step": "#32d583",
  "sample": "#84caff", "queue": "#fdb022", "tool": "#f79009", "verifier": "#ee46bc", "environment open": "#b54708",
  "environment close": "#d0d5dd", "trajectory": "#f2f4f7", "at work": "#f79009",
};
const CAUSES = {
  "optimizer and publish": "#9b8afb", "shared core": "#667085", "start-up": "#b54708",
  "prefill of the next step": "#1849a9", "first texts": "#84caff", "straggler": "#f04438", "tool": "#f79009",
  "verifier": "#ee46bc", "sampling": "#b2ddff", "learner": "#12b76a", "hand-over": "#eaaa08", "nothing to do": "#d0d5dd",
};
const WORK = "#98a2b3";
const byId = (id) => document.getElementById(id);
const colourOf = (what) => what.startsWith("idle: ") ? CAUSES[what.slice(6)] || "#d0d5dd" : COLOURS[what] || "#475467";
const short = (id) => id.replace(/^step=(\d+)\/group=(\d+)\/member=(\d+)$/, "group $2 member $3");
const seconds = (s) => s >= 100 ? s.toFixed(0) + " s" : s >= 1 ? s.toFixed(2) + " s" : (1000 * s).toFixed(1) + " ms";
const percent = (share) => (100 * share).toFixed(0) + " %";

function html(tag, text, parent) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  if (parent) parent.append(made);
  return made;
}
function shape(tag, attributes, parent, text) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text !== undefined) made.textContent = text;
  parent.append(made);
  return made;
}
function legend(where, entries) {
  where.replaceChildren();
  for (const [name, colour] of entries) {
    const item = html("span", undefined, where);
    html("i", undefined, item).style.background = colour;
    item.append(name);
  }
}
const tip = byId("tip");
function hover(target, text) {
  target.addEventListener("mousemove", (event) => {
    tip.textContent = text();
    tip.hidden = false;
    tip.style.left = Math.min(event.clientX + 12, window.innerWidth - tip.offsetWidth - 8) + "px";
    tip.style.top = Math.min(event.clientY + 14, window.innerHeight - tip.offsetHeight - 8) + "px";
  });
  target.addEventListener("mouseleave", () => { tip.hidden = true; });
}

// -- timeline --------------------------------------------------------------------------------------------------------
const drawn = data.stretches.filter((stretch) => stretch.lanes);
const taskOf = new Map(data.trajectories.map((row) => [row.id, row]));
const view = { stretch: drawn.findLast((s) => s.step >= 0) || drawn[0], from: 0, to: 1 };
const LEFT = 150, WIDTH = 1200, ACTOR = 26, LANE = 15, TOP = 22;

function figures(stretch) {
  const idle = (actor) => {
    const of = stretch.actors[actor].idle_s;
    const parts = Object.entries(of).sort((a, b) => b[1] - a[1]).map(([cause, s]) => cause + " " + seconds(s));
    return actor + " busy " + seconds(stretch.actors[actor].busy_s) + ", idle: " + (parts.join(", ") || "never");
  };
  let text = seconds(stretch.seconds) + " in all. " + idle("engine") + ". " + idle("learner") + ".";
  if (stretch.gradient_s > 0) text += " Gradient work " + seconds(stretch.gradient_s) + ", " + percent(stretch.overlap)
    + " of it hidden, " + seconds(stretch.tail_s) + " after the last text.";
  if (stretch.step >= 0 && stretch.bound_s > 0) text += " Lower bound " + seconds(stretch.bound_s) + ", the step is "
    + percent(stretch.above_bound) + " above it; longest path: " + short(stretch.critical) + ", "
    + seconds(stretch.critical_s) + ".";
  if (stretch.wasted_s > 0) text += " Gradient work on groups that ended uniform: " + seconds(stretch.wasted_s) + ".";
  return text;
}
function drawTimeline() {
  const where = byId("timeline"), stretch = view.stretch;
  where.replaceChildren();
  if (!stretch) { html("p", "No events were recorded: there is no timeline.", where); return; }
  byId("figures").textContent = figures(stretch);
  const span = (view.to - view.from) * stretch.seconds || 1, begin = view.from * stretch.seconds;
  const x = (s) => LEFT + (s - begin) / span * (WIDTH - LEFT - 10);
  const heights = stretch.lanes.map((lane) => lane.is_actor ? ACTOR : LANE);
  const height = TOP + heights.reduce((a, b) => a + b, 0) + 6;
  const svg = shape("svg", { viewBox: `0 0 ${WIDTH} ${height}`, role: "img" }, where);
  for (let i = 0; i <= 8; i++) {
    const at = begin + span * i / 8;
    shape("line", { x1: x(at), x2: x(at), y1: TOP - 6, y2: height, class: "grid" }, svg);
    shape("text", { x: x(at), y: 12, "text-anchor": i === 8 ? "end" : "middle" }, svg, seconds(at));
  }
  let y = TOP;
  const seen = new Map();
  stretch.lanes.forEach((lane, number) => {
    const row = taskOf.get(lane.label);
    const group = shape("g", { class: "lane", "data-lane": lane.label }, svg);
    const label = shape("text", { x: 4, y: y + heights[number] - 5, class: lane.is_actor ? "actor" : "" }, group,
      lane.is_actor ? lane.label : short(lane.label));
    if (row) hover(label, () => `${row.task}\n${row.outcome}${row.reward === null ? "" : ", reward " + row.reward}`);
    for (const [what, from, to, tokens, detail] of lane.items) {
      if (to < begin || from > begin + span) continue;
      const isIdle = what.startsWith("idle: "), left = Math.max(x(from), LEFT), right = Math.min(x(to), WIDTH - 10);
      const inset = isIdle ? heights[number] * 0.55 : what === "trajectory" ? 2 : what === "queue" ? 5 : 3;
      const rect = shape("rect", {
        x: left, y: y + inset, width: Math.max(right - left, 0.6), height: Math.max(heights[number] - 2 - inset, 2),
        fill: colourOf(what), "fill-opacity": isIdle ? 0.55 : 1,
      }, group);
      seen.set(what, colourOf(what));
      hover(rect, () => `${lane.is_actor ? lane.label : short(lane.label)}: ${what}\n${seconds(to - from)}, from `
        + `${seconds(from)}${tokens ? "\n" + tokens + " tokens" : ""}${detail ? "\n" + detail : ""}`);
    }
    y += heights[number];
  });
  legend(byId("timeline-legend"), [...seen].sort());
  let grabbed = null;
  svg.addEventListener("wheel", (event) => {
    event.preventDefault();
    const box = svg.getBoundingClientRect();
    const at = Math.min(Math.max(((event.clientX - box.left) / box.width * WIDTH - LEFT) / (WIDTH - LEFT - 10), 0), 1);
    const middle = view.from + at * (view.to - view.from);
    const width = Math.min(Math.max((view.to - view.from) * (event.deltaY > 0 ? 1.25 : 0.8), 1e-4), 1);
    show(middle - at * width, width);
  }, { passive: false });
  svg.addEventListener("mousedown", (event) => { grabbed = [event.clientX, view.from]; });
  window.onmouseup = () => { grabbed = null; };
  window.onmousemove = (event) => {
    if (!grabbed) return;
    const width = view.to - view.from, box = byId("timeline").getBoundingClientRect();
    show(grabbed[1] - (event.clientX - grabbed[0]) / box.width * width, width, true);
  };
  if (drawTimeline.grabbed) grabbed = drawTimeline.grabbed;
  drawTimeline.keep = () => { drawTimeline.grabbed = grabbed; };
}
function show(from, width, isDrag) {
  view.from = Math.min(Math.max(from, 0), 1 - width);
  view.to = view.from + width;
  if (isDrag && drawTimeline.keep) drawTimeline.keep();
  const top = byId("timeline").scrollTop;
  drawTimeline();
  drawTimeline.grabbed = null;
  byId("timeline").scrollTop = top;
}
function choose(stretch) {
  view.stretch = stretch;
  byId("stretch").value = String(drawn.indexOf(stretch));
  show(0, 1);
}
drawn.forEach((stretch, number) => { html("option", stretch.name, byId("stretch")).value = String(number); });
byId("stretch").addEventListener("change", (event) => choose(drawn[Number(event.target.value)]));
const step = (by) => { const next = drawn[drawn.indexOf(view.stretch) + by]; if (next) choose(next); };
byId("earlier").addEventListener("click", () => step(-1));
byId("later").addEventListener("click", () => step(1));
byId("whole").addEventListener("click", () => show(0, 1));

// -- idle bars -------------------------------------------------------------------------------------------------------
function drawBars() {
  const steps = data.stretches.filter((stretch) => stretch.step >= 0), where = byId("bars");
  if (!steps.length) { html("p", "No step was recorded.", where); return; }
  const most = Math.max(...steps.map((stretch) => stretch.seconds)) || 1, used = new Map([["work", WORK]]);
  for (const actor of data.actors) {
    const box = html("div", undefined, where);
    html("h3", actor, box);
    const width = 600, height = 190, svg = shape("svg", { viewBox: `0 0 ${width} ${height}` }, box);
    const each = (width - 64) / steps.length;
    for (const part of [0, 0.5, 1]) {
      const y = 170 - part * 160;
      shape("line", { x1: 60, x2: width, y1: y, y2: y, class: "grid" }, svg);
      shape("text", { x: 56, y: y + 4, "text-anchor": "end" }, svg, seconds(part * most));
    }
    steps.forEach((stretch, number) => {
      const of = stretch.actors[actor];
      let y = 170;
      const bar = shape("g", {}, svg);
      const parts = [["work", of.busy_s, WORK], ...data.causes.map((c) => [c, of.idle_s[c] || 0, CAUSES[c]])];
      for (const [name, s, colour] of parts) {
        if (s <= 0) continue;
        const tall = s / most * 160;
        y -= tall;
        const rect = shape("rect", { class: "bar", x: 60 + number * each + each * 0.08, y, width: each * 0.84,
          height: tall, fill: colour }, bar);
        hover(rect, () => `${stretch.name}, ${actor}\n${name}: ${seconds(s)} of ${seconds(stretch.seconds)}`);
        used.set(name, colour);
      }
      bar.addEventListener("click", () => { if (stretch.lanes) { choose(stretch); byId("timeline").scrollIntoView(); } });
      if (number % Math.ceil(steps.length / 12) === 0)
        shape("text", { x: 60 + (number + 0.5) * each, y: 185, "text-anchor": "middle" }, svg, stretch.step);
    });
  }
  legend(byId("bars-legend"), [...used]);
}

// -- curves ----------------------------------------------------------------------------------------------------------
const INK = ["#2e90fa", "#f79009", "#12b76a", "#ee46bc"];
function curve(title, keys, points, logarithmic) {
  const lines = keys.map((key) => data.steps.filter((row) => key in row).map((row) => [row.step, row[key]]));
  const all = [...lines.flat(), ...points];
  if (!all.length) return;
  const box = html("div", undefined, byId("curves"));
  html("h3", title, box);
  const scale = (v) => logarithmic ? Math.log10(Math.max(v, 1e-12)) : v;
  const xs = all.map((p) => p[0]), ys = all.map((p) => scale(p[1]));
  const [x0, x1] = [Math.min(...xs), Math.max(...xs, Math.min(...xs) + 1)];
  const least = logarithmic ? Math.min(...ys) : Math.min(0, ...ys);
  const [y0, y1] = [least, Math.max(...ys, keys.includes("pass_rate") ? 1 : least + 1e-9)];
  const width = 420, height = 190, svg = shape("svg", { viewBox: `0 0 ${width} ${height}` }, box);
  const x = (v) => 50 + (v - x0) / (x1 - x0) * (width - 62), y = (v) => 165 - (scale(v) - y0) / (y1 - y0 || 1) * 150;
  for (const part of [0, 0.5, 1]) {
    const at = y0 + part * (y1 - y0), level = 165 - part * 150;
    shape("line", { x1: 50, x2: width - 8, y1: level, y2: level, class: "grid" }, svg);
    shape("text", { x: 46, y: level + 4, "text-anchor": "end" }, svg,
      logarithmic ? (10 ** at).toExponential(1) : Number(at.toPrecision(3)).toString());
  }
  for (const at of [x0, x1]) shape("text", { x: x(at), y: 182, "text-anchor": "middle" }, svg, Math.round(at));
  lines.forEach((line, number) => {
    if (!line.length) return;
    shape("polyline", { points: line.map((p) => `${x(p[0])},${y(p[1])}`).join(" "), fill: "none",
      stroke: INK[number], "stroke-width": 1.6 }, svg);
    if (line.length < 60) for (const p of line)
      hover(shape("circle", { cx: x(p[0]), cy: y(p[1]), r: 2.6, fill: INK[number] }, svg),
        () => `${keys[number]}\nstep ${p[0]}: ${p[1]}`);
  });
  for (const p of points)
    hover(shape("circle", { cx: x(p[0]), cy: y(p[1]), r: 4, fill: INK[3] }, svg), () => `held-out, ${p[2]}: ${p[1]}`);
  const entries = keys.map((key, number) => [key, INK[number]]).filter((_, number) => lines[number].length);
  legend(html("div", undefined, box), points.length ? [...entries, ["held-out pass rate", INK[3]]] : entries);
  box.lastChild.className = "legend";
}
function drawCurves() {
  const heldOut = data.evaluations.filter((row) => "pass_rate" in row).map((row) => [row.step, row.pass_rate, row.name]);
  curve("reward and pass rate", ["reward_mean", "pass_rate"], heldOut);
  curve("mismatch (nats, log scale)", ["mismatch_max", "mismatch_mean"], [], true);
  curve("action tokens per trajectory", ["action_tokens_mean"], []);
  curve("turns per trajectory", ["turns_mean"], []);
  curve("seconds per step", ["step_s", "bound_s"], []);
  curve("idle seconds per step", ["idle_engine_s", "idle_learner_s"], []);
  curve("overlap, and share above the bound", ["overlap", "above_bound"], []);
  curve("sampled tokens per second", ["tokens_per_s"], []);
  if (!byId("curves").children.length) html("p", "No step has ended yet.", byId("curves"));
}

// -- trajectories ----------------------------------------------------------------------------------------------------
const COLUMNS = ["id", "task", "kind", "outcome", "reason", "reward", "turns", "tokens", "seconds"];
const table = { key: "", down: false, shown: 200 };
function rowsWanted() {
  const words = byId("filter").value.toLowerCase().split(/\s+/).filter(Boolean), outcome = byId("outcome").value;
  const rows = data.trajectories.filter((row) => (!outcome || row.outcome === outcome)
    && words.every((word) => COLUMNS.some((key) => String(row[key]).toLowerCase().includes(word))));
  if (!table.key) return rows;
  const order = (a, b) => {
    const [left, right] = [a[table.key], b[table.key]];
    if (left === null || right === null) return (left !== null) - (right !== null);
    return typeof left === "number" ? left - right : left.localeCompare(right, undefined, { numeric: true });
  };
  return rows.sort((a, b) => table.down ? order(b, a) : order(a, b));
}
function drawTable() {
  const body = document.querySelector("#trajectories tbody"), rows = rowsWanted();
  body.replaceChildren();
  for (const row of rows.slice(0, table.shown)) {
    const line = html("tr", undefined, body);
    line.dataset.trajectory = row.id;
    for (const key of COLUMNS) {
      const value = row[key], isNumber = ["reward", "turns", "tokens", "seconds"].includes(key);
      const cell = html("td", value === null ? "none" : isNumber ? Number(value.toFixed(3)) : value, line);
      if (isNumber) cell.className = "number";
    }
  }
  byId("count").textContent = `${rows.length} of ${data.trajectories.length} trajectories`;
  byId("more").hidden = rows.length <= table.shown;
}
function startTable() {
  const head = html("tr", undefined, document.querySelector("#trajectories thead"));
  for (const key of COLUMNS) {
    const cell = html("th", key, head);
    cell.addEventListener("click", () => {
      table.down = table.key === key && !table.down;
      table.key = key;
      head.querySelectorAll("th").forEach((other) => other.removeAttribute("aria-sort"));
      cell.setAttribute("aria-sort", table.down ? "descending" : "ascending");
      drawTable();
    });
  }
  html("option", "all", byId("outcome")).value = "";
  for (const outcome of [...new Set(data.trajectories.map((row) => row.outcome))].sort())
    html("option", outcome, byId("outcome")).value = outcome;
  byId("filter").addEventListener("input", drawTable);
  byId("outcome").addEventListener("change", drawTable);
  byId("more").addEventListener("click", () => { table.shown += 1000; drawTable(); });
}

const ended = data.stretches.filter((stretch) => stretch.step >= 0);
byId("summary").textContent = `${Math.max(data.steps.length, ended.length)} steps, ${data.trajectories.length} trajectories`
  + (ended.length ? `, ${seconds(ended.reduce((sum, s) => sum + s.seconds, 0))} of steps` : "");
for (const note of data.notes) html("li", note, byId("notes"));
byId("config").textContent = data.config;
if (view.stretch) choose(view.stretch); else drawTimeline();
drawBars();
drawCurves();
startTable();
drawTable();
document.body.dataset.ready = "yes";
