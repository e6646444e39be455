"use strict";
const { settings, trials } = JSON.parse(document.getElementById("data").textContent);
const dark = matchMedia("(prefers-color-scheme: dark)");
const NARROW = 640; // below which axes lie on top of each other
const RAMPS = [["#cfdcf7", "#5b82dd", "#14286f"], ["#27345c", "#5478e0", "#c8d8ff"]]; // light and dark, slow to fast
const NONE = "none"; // what the last axis has of trials that have measured nothing
const TEXTS = { measured: "measured", pruned: "pruned", memory: "out of memory", deadline: "over the deadline", hang: "hung", failed: "failed" };

const byId = (id) => document.getElementById(id);
const element = (name, more = {}, ...children) => {
  const made = document.createElement(name);
  const { dataset = {}, ...rest } = more;
  Object.assign(made, rest);
  Object.assign(made.dataset, dataset);
  made.append(...children);
  return made;
};
const shape = (name, attributes, ...children) => {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
};
const whole = (value) => Math.round(value).toLocaleString("en");
const duration = (seconds) => (seconds == null ? "" : seconds < 1 ? `${+(seconds * 1e3).toPrecision(3)} ms` : `${+seconds.toPrecision(3)} s`);
const percent = (share) => `${(100 * share).toFixed(1)} %`;
const bytes = (size) => (size >= 2 ** 30 ? `${(size / 2 ** 30).toFixed(1)} GiB` : `${(size / 2 ** 20).toFixed(0)} MiB`);
const kind = (trial) => (trial.outcome === "measured" || trial.outcome === "pruned" ? trial.outcome : "failed");

trials.forEach((trial, index) => (trial.index = index));
const measured = trials.filter((trial) => trial.tokens_per_second);
const hasMfu = measured.length > 0 && measured.every((trial) => trial.mfu != null);
const known = trials.filter((trial) => trial.model).sort((a, b) => a.parameters - b.parameters);
const models = [...new Set(known.map((trial) => trial.model))];
// Of one model a trial is as good as its tokens/s; those of several are not to be compared.
const byMfu = hasMfu && models.length > 1;
const pace = (trial) => (byMfu ? trial.mfu : trial.tokens_per_second);
const paceText = (value) => (byMfu ? percent(value) : whole(value));
measured.sort((a, b) => pace(b) - pace(a));
const score = (trial) => (hasMfu ? trial.mfu : trial.tokens_per_second / trial.ranks);
const scoreText = (trial) => (hasMfu ? percent(trial.mfu) : `${whole(score(trial))} tokens/s`);
const paces = measured.map(pace);
const [slowest, fastest] = [Math.min(...paces), Math.max(...paces)];

// ---- colours ----

const channels = (hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
function mix(share) {
  const [low, middle, high] = RAMPS[dark.matches ? 1 : 0].map(channels);
  const [from, to, part] = share < 0.5 ? [low, middle, 2 * share] : [middle, high, 2 * share - 1];
  return from.map((value, i) => Math.round(value + (to[i] - value) * part));
}
const share = (value, low, high) => (high > low ? (value - low) / (high - low) : 1);
const rgb = (parts) => `rgb(${parts.join(" ")})`;
const lineColour = (trial) => rgb(mix(0.15 + 0.85 * share(pace(trial), slowest, fastest)));
const isLight = ([red, green, blue]) => 0.299 * red + 0.587 * green + 0.114 * blue > 145;

// ---- the best of each model and number of GPUs ----

function map() {
  const cells = trials.filter((trial) => trial.ranks);
  const ranks = [...new Set(cells.map((trial) => trial.ranks))].sort((a, b) => a - b);
  const best = (model, size) => measured.filter((trial) => trial.model === model && trial.ranks === size).sort((a, b) => score(b) - score(a))[0];
  const found = models.flatMap((model) => ranks.map((size) => best(model, size))).filter(Boolean).map(score);
  const [low, high] = [Math.min(...found), Math.max(...found)];
  const cell = (model, size) => {
    const trial = best(model, size);
    if (!trial) {
      const tried = cells.filter((each) => (each.model === model || !each.model) && each.ranks === size);
      const why = tried.length ? `${tried.length} tried, none measured` : "not tried";
      return element("td", { className: "none" }, element("b", {}, "–"), element("small", {}, why));
    }
    const parts = mix(share(score(trial), low, high));
    const made = element("td", {}, element("b", {}, scoreText(trial)), element("small", {}, trial.layout));
    made.style.background = rgb(parts);
    made.style.color = isLight(parts) ? "#16191f" : "#ffffff";
    hover(made, trial);
    return made;
  };
  const name = (size) => `${size} ${size === 1 ? settings.ranks.replace(/s$/, "") : settings.ranks}`;
  const head = element("thead", {}, element("tr", {}, element("th"), ...ranks.map((size) => element("th", { scope: "col" }, name(size)))));
  const rows = models.map((model) => element("tr", {}, element("th", { scope: "row" }, model), ...ranks.map((size) => cell(model, size))));
  byId("map").replaceChildren(head, element("tbody", {}, ...rows));
  byId("unit").textContent = hasMfu ? "MFU" : `tokens/s per ${settings.ranks.replace(/s$/, "")}`;
}

// ---- lines across the axes ----

/** The settings in which trials differ, each with its values in order; and last the pace. */
const order = (a, b) => (typeof a === "number" && typeof b === "number" ? a - b : models.indexOf(a) - models.indexOf(b) || String(a).localeCompare(String(b)));
const valueOf = (trial, key) => trial[key] ?? "?";
const textOf = (value) => (value === "" ? "?" : String(value));
const axes = Object.entries(settings)
  .map(([key, name]) => ({ key, name, values: [...new Set(trials.map((trial) => valueOf(trial, key)))].sort(order) }))
  .filter(({ values }) => values.filter((value) => textOf(value) !== "?").length > 1);
axes.push({ key: "", name: byMfu ? "MFU" : "tokens/s" });
const brushes = new Map(); // [low, high] by axis, as shares of its length
let paths = [], over = null;

/** Where on an axis a trial is, from 0 to 1; trials with the same value lie beside each other. */
function place(axis, trial) {
  if (!axis.values) return trial.tokens_per_second ? 0.16 + 0.84 * share(pace(trial), Math.min(slowest, fastest * 0.98), fastest) : 0;
  const spread = 0.5 / axis.values.length;
  const beside = trials.length > 1 ? (trial.index / (trials.length - 1) - 0.5) * Math.min(0.12, spread) : 0;
  return middle(axis, axis.values.indexOf(valueOf(trial, axis.key))) + beside;
}
const middle = (axis, at) => (at + 0.5) / axis.values.length;
const isChosen = (trial) => [...brushes].every(([axis, [low, high]]) => place(axis, trial) >= low && place(axis, trial) <= high);

function lines() {
  const width = byId("lines").clientWidth;
  const down = innerWidth < NARROW;
  const [start, end] = down ? [18, width - 18] : [34, 340];
  const first = axes[0].values?.map((value) => 20 + 6.6 * textOf(value).length) ?? [];
  const left = Math.max(20, 4 + 3.8 * axes[0].name.length, ...first); // its name is in bold, across the axis
  const gap = down ? 66 : Math.min(210, (width - left - 80) / Math.max(1, axes.length - 1));
  const at = (number) => (down ? 40 + number * gap : left + number * gap);
  const height = down ? at(axes.length - 1) + 34 : 352;
  const along = (part) => (down ? start + part * (end - start) : end - part * (end - start));
  const point = (number, part) => (down ? [along(part), at(number)] : [at(number), along(part)]);
  const svg = shape("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": "trials by their settings", ...(down ? { class: "down" } : {}) });

  const curve = (trial) =>
    axes
      .map((axis, number) => {
        const [x, y] = point(number, place(axis, trial));
        if (!number) return `M${x} ${y}`;
        const [px, py] = point(number - 1, place(axes[number - 1], trial));
        return down ? `C${px} ${(py + y) / 2} ${x} ${(py + y) / 2} ${x} ${y}` : `C${(px + x) / 2} ${py} ${(px + x) / 2} ${y} ${x} ${y}`;
      })
      .join("");
  axes.forEach((axis, number) => {
    const [[x1, y1], [x2, y2]] = [point(number, 0), point(number, 1)];
    svg.append(shape("line", { class: "axis", x1, y1, x2, y2 }));
  });
  const drawn = [...trials].sort((a, b) => rank(a) - rank(b));
  paths = drawn.map((trial) => {
    const path = shape("path", { class: `line ${kind(trial)}`, d: curve(trial) });
    if (trial.tokens_per_second) path.style.stroke = lineColour(trial);
    return { trial, path };
  });
  svg.append(...paths.map(({ path }) => path));
  axes.forEach((axis, number) => axisOf(svg, axis, number, { down, along, at, start, end, point, width }));
  for (const { trial, path } of paths) {
    const hit = shape("path", { class: "hit", d: path.getAttribute("d") });
    hover(hit, trial);
    svg.insertBefore(hit, svg.querySelector(".grip"));
  }
  byId("lines").replaceChildren(svg);
  choose();
}
const rank = (trial) => (trial.tokens_per_second ? 1 + pace(trial) : trial.outcome === "pruned" ? 0 : 0.5);

/** Name and values of an axis, and its brush. */
function axisOf(svg, axis, number, { down, along, at, start, end, point, width }) {
  const text = (content, x, y, name, anchor) => svg.append(shape("text", { x, y, class: name, "text-anchor": anchor }, content));
  const last = number === axes.length - 1;
  if (down) text(axis.name, start - 8, at(number) - 22, "name", "start");
  else text(axis.name, at(number), 16, "name", last ? "start" : "middle");
  const value = (content, part) => {
    const [x, y] = point(number, part);
    if (down) text(content, Math.max(start, Math.min(x, width - 16)), last ? y + 16 : y - 7, "value", part > 0.9 ? "end" : part < 0.06 ? "start" : "middle");
    else text(content, number ? x + 9 : x - 10, y + 4, "value", number ? "start" : "end");
  };
  if (axis.values) axis.values.forEach((each, k) => value(textOf(each), middle(axis, k)));
  else {
    if (trials.some((trial) => !trial.tokens_per_second)) value(NONE, 0);
    if (measured.length) value(paceText(fastest), 1);
    if (measured.length && slowest < fastest * 0.98) value(paceText(slowest), 0.16);
  }
  const half = 11;
  const box = (low, high) => {
    const [a, b] = [along(low), along(high)].sort((p, q) => p - q);
    return down ? { x: a, y: at(number) - half, width: b - a, height: 2 * half } : { x: at(number) - half, y: a, width: 2 * half, height: b - a };
  };
  const brush = shape("rect", { class: "brush", rx: 3 });
  const grip = shape("rect", { class: "grip", ...box(-0.05, 1.05), tabindex: 0, role: "slider", "aria-label": axis.name, "aria-valuetext": "all" });
  const show = () => {
    const range = brushes.get(axis);
    brush.style.display = range ? "" : "none";
    if (range) for (const [key, size] of Object.entries(box(...range))) brush.setAttribute(key, size);
  };
  let from = null;
  const partAt = (event) => {
    const frame = svg.getBoundingClientRect();
    const part = down ? (event.clientX - frame.left - start) / (end - start) : (end - (event.clientY - frame.top)) / (end - start);
    return Math.max(-0.05, Math.min(1.05, part));
  };
  grip.addEventListener("pointerdown", (event) => {
    grip.setPointerCapture(event.pointerId);
    from = partAt(event);
    event.preventDefault();
  });
  grip.addEventListener("pointermove", (event) => {
    if (from === null) return;
    const to = partAt(event);
    if (Math.abs(to - from) > 0.02) brushes.set(axis, [Math.min(from, to), Math.max(from, to)]);
    show();
    choose();
  });
  const finish = (event) => {
    if (from !== null && Math.abs(partAt(event) - from) <= 0.02) brushes.delete(axis);
    from = null;
    show();
    choose();
  };
  grip.addEventListener("pointerup", finish);
  grip.addEventListener("pointercancel", () => (from = null));
  // Arrow keys select one value after the other.
  grip.addEventListener("keydown", (event) => {
    const by = { ArrowUp: 1, ArrowRight: 1, ArrowDown: -1, ArrowLeft: -1 }[event.key];
    if (event.key === "Escape") brushes.delete(axis);
    else if (by && axis.values) {
      const parts = axis.values.length, now = brushes.get(axis);
      const next = now ? Math.max(0, Math.min(parts - 1, Math.round(now[0] * parts) + by)) : by > 0 ? 0 : parts - 1;
      brushes.set(axis, [next / parts, (next + 1) / parts]);
      grip.setAttribute("aria-valuetext", textOf(axis.values[next]));
    } else return;
    event.preventDefault();
    show();
    choose();
  });
  show();
  svg.append(brush, grip);
}

// ---- what is selected ----

function choose() {
  for (const { trial, path } of paths) {
    path.classList.toggle("out", !isChosen(trial));
    path.classList.toggle("over", trial === over);
  }
  byId("clear").hidden = !brushes.size;
  table();
}

function point(trial) {
  over = trial;
  for (const each of paths) each.path.classList.toggle("over", each.trial === over);
  for (const row of byId("trials").rows) row.classList.toggle("over", over !== null && +row.dataset.index === over.index);
}

function hover(target, trial) {
  target.addEventListener("pointermove", (event) => tip(trial, event));
  target.addEventListener("pointerdown", (event) => tip(trial, event));
  target.addEventListener("pointerleave", () => {
    byId("tip").hidden = true;
    point(null);
  });
}

function tip(trial, { clientX, clientY }) {
  point(trial);
  const facts = [`${TEXTS[trial.outcome]}${trial.cause ? `: ${trial.cause}` : ""}`];
  if (trial.tokens_per_second) {
    facts[0] = `${whole(trial.tokens_per_second)} tokens/s${trial.mfu == null ? "" : `, ${percent(trial.mfu)} MFU`}`;
    facts.push(`${duration(trial.step_seconds)} a step, predicted ${duration(trial.predicted_seconds)}`);
    if (trial.peak_bytes) facts.push(`${bytes(trial.peak_bytes)} on the fullest rank, predicted ${bytes(trial.predicted_bytes)}`);
  }
  const box = byId("tip");
  box.replaceChildren(element("b", {}, trial.layout || trial.settings), ...facts.map((fact) => element("p", {}, fact)), element("p", {}, element("code", {}, trial.command)));
  box.hidden = false;
  box.style.left = `${Math.max(8, Math.min(clientX + 14, innerWidth - box.offsetWidth - 8))}px`;
  box.style.top = `${clientY + 16 + box.offsetHeight > innerHeight ? Math.max(8, clientY - box.offsetHeight - 12) : clientY + 16}px`;
}

function table() {
  const chosen = trials.filter(isChosen);
  const rest = chosen.filter((trial) => !trial.tokens_per_second).sort((a, b) => rank(b) - rank(a));
  const rows = [...measured.filter(isChosen), ...rest];
  byId("count").textContent = chosen.length < trials.length ? `${chosen.length} of ${trials.length}` : "";
  const number = (text, name) => element("td", { className: "number", dataset: text ? { name } : {} }, text);
  const body = rows.map((trial) => {
    const mark = element("i", { className: "swatch" });
    mark.style.background = trial.tokens_per_second ? lineColour(trial) : `var(--${kind(trial)})`;
    const name = element("td", {}, mark, trial.layout || trial.settings || trial.command);
    const isMeasured = trial.outcome === "measured";
    const figures = [
      number(isMeasured ? whole(trial.tokens_per_second) : "", "tokens/s"),
      number(isMeasured ? percent(pace(trial) / fastest) : "", "of the best"),
      ...(hasMfu ? [number(trial.mfu == null ? "" : percent(trial.mfu), "MFU")] : []),
      number(duration(trial.step_seconds), "a step"),
      number(duration(trial.predicted_seconds), "predicted"),
      number(trial.step_seconds ? `${(trial.predicted_seconds / trial.step_seconds).toFixed(2)} x` : "", "predicted / measured"),
    ];
    if (models.length > 1) name.append(element("small", {}, trial.model));
    if (!isMeasured) name.append(element("small", { className: "cause" }, `${TEXTS[trial.outcome]}: ${trial.cause}`));
    const row = element("tr", { className: kind(trial), dataset: { index: trial.index } }, name, ...figures);
    row.addEventListener("pointerenter", () => point(trial));
    row.addEventListener("pointerleave", () => point(null));
    return row;
  });
  const heads = ["trial", "tokens/s", "of the best", ...(hasMfu ? ["MFU"] : []), "a step", "predicted", "predicted / measured"];
  const head = element("tr", {}, ...heads.map((each, k) => element("th", { className: k ? "number" : "" }, each)));
  byId("trials").replaceChildren(element("thead", {}, head), element("tbody", {}, ...body));
}

function legend() {
  const item = (mark, text) => element("li", {}, mark, text);
  const mark = (background, className = "") => {
    const made = element("i", { className: `swatch ${className}` });
    made.style.background = background;
    return made;
  };
  const items = [];
  if (measured.length > 1) {
    const stops = [0, 0.5, 1].map((part) => rgb(mix(0.15 + 0.85 * part)));
    items.push(item(mark(`linear-gradient(to right, ${stops.join(", ")})`, "ramp"), `${paceText(slowest)} to ${paceText(fastest)} ${axes.at(-1).name}`));
  }
  if (trials.some((trial) => kind(trial) === "failed")) items.push(item(mark("var(--failed)"), "failed"));
  if (trials.some((trial) => trial.outcome === "pruned")) items.push(item(mark("var(--pruned)"), "pruned before it ran"));
  byId("legend").replaceChildren(...items);
}

function paint() {
  map();
  legend();
  lines();
}
byId("clear").addEventListener("click", () => {
  brushes.clear();
  lines();
});
dark.addEventListener("change", paint);
addEventListener("resize", lines);
paint();
