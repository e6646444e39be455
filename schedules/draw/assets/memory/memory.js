"use strict";
const { available, colours, ranks } = JSON.parse(document.getElementById("data").textContent);
const dark = matchMedia("(prefers-color-scheme: dark)");
const WIDTH = 1000, HEIGHT = 1000; // of a drawing, stretched to its frame
const MOST_UNITS = 6; // in a tooltip, the largest

const element = (name, more = {}, ...children) => {
  const made = document.createElement(name);
  Object.assign(made, more);
  made.append(...children);
  return made;
};
const shape = (name, attributes) => {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
};
const fill = (pair) => pair[dark.matches ? 1 : 0];
const bytes = (kib) => (kib >= 1 << 20 ? `${(kib / (1 << 20)).toFixed(1)} GiB` : kib >= 1024 ? `${(kib / 1024).toFixed(0)} MiB` : kib ? `${kib} KiB` : "0");
const duration = (us) => (us >= 1e6 ? `${(us / 1e6).toPrecision(3)} s` : us ? `${(us / 1e3).toPrecision(3)} ms` : "0");

/** Of all ranks alike, so that they can be compared. */
const highest = Math.max(...ranks.map(({ peak }) => peak));
const scales = {
  top: Math.max(highest, Math.min(available / 1024, 1.5 * highest)) * 1.04,
  first: Math.min(...ranks.map(({ time }) => time[0])),
  last: Math.max(...ranks.map(({ time }) => time.at(-1))),
};

/** The layers of a rank, lowest first: their names, fills and sizes by sample. */
function layersOf(rank) {
  const constant = (size) => rank.time.map(() => size);
  const layers = Object.entries(rank.fixed).map(([name, size], k) => ({ name, pair: colours.fixed[k], sizes: constant(size) }));
  const add = (name, pair, sizes, more = {}) => layers.push({ name, pair, sizes, ...more });
  add("weights of gathered units", colours.gathered, rank.gathered);
  add("gradients of units, unreduced", colours.summed, rank.summed);
  const idle = rank.time.map((_, i) => Math.max(0, rank.pools - rank.gathered[i] - rank.summed[i]));
  add("buffers of units, unused", colours.idle, idle);
  rank.units.forEach((name, k) => {
    const sizes = rank.saved.map((saved) => Math.max(0, saved[k]));
    add(`activations of ${/^\d/.test(name) ? `layer ${name}` : name}`, colours.activations[k % colours.activations.length], sizes, { unit: true });
  });
  add("workspace of an instruction", colours.workspace, rank.workspace);
  return layers.filter((layer) => layer.sizes.some((size) => size > 0));
}

/** A step function between two stacked sums, as a path. */
function area(rank, x, y, low, high) {
  const end = x(scales.last);
  const edge = (values) => values.map((value, i) => [x(rank.time[i]), i + 1 < values.length ? x(rank.time[i + 1]) : end, y(value)]);
  const upper = edge(high).map(([from, to, at]) => `${from} ${at}L${to} ${at}`);
  const lower = edge(low).reverse().map(([from, to, at]) => `${to} ${at}L${from} ${at}`);
  return `M${[...upper, ...lower].join("L")}Z`;
}

function draw(rank) {
  const layers = layersOf(rank);
  const { top, first, last } = scales;
  const x = (time) => +(((time - first) / (last - first || 1)) * WIDTH).toFixed(1);
  const y = (size) => +(HEIGHT - (size / top) * HEIGHT).toFixed(1);
  const svg = shape("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img", tabindex: 0 });
  svg.setAttribute("aria-label", `memory of the ranks of pp${rank.pp}: at most ${bytes(rank.peak)}`);
  let low = rank.time.map(() => 0);
  for (const layer of layers) {
    const high = low.map((value, i) => value + layer.sizes[i]);
    svg.append(shape("path", { d: area(rank, x, y, low, high), fill: fill(layer.pair) }));
    low = high;
  }
  const labels = element("div", { className: "bytes" });
  const label = (size, className = "") => {
    const text = element("span", { className }, bytes(size));
    text.style.bottom = `${(size / top) * 100}%`;
    labels.append(text);
  };
  const limit = available / 1024;
  const step = 2 ** Math.floor(Math.log2(top / 3));
  for (let size = 0; size < top; size += step) {
    svg.append(shape("path", { class: "grid", d: `M0 ${y(size)}H${WIDTH}` }));
    if (limit >= top || Math.abs(size - limit) > step / 3) label(size);
  }
  if (limit < top) {
    svg.append(shape("path", { class: "limit", d: `M0 ${y(limit)}H${WIDTH}` }));
    label(limit, "limit");
  }
  const cursor = shape("path", { class: "cursor", d: "" });
  svg.append(cursor);
  const show = (index, event) => {
    cursor.setAttribute("d", `M${x(rank.time[index])} 0V${HEIGHT}`);
    tip(rank, layers, index, low[index], event ?? svg.getBoundingClientRect());
  };
  const indexAt = (event) => {
    const box = svg.getBoundingClientRect();
    const time = first + ((event.clientX - box.left) / box.width) * (last - first);
    return Math.max(0, rank.time.findLastIndex((each) => each <= time));
  };
  let at = low.indexOf(Math.max(...low));
  svg.addEventListener("pointermove", (event) => show((at = indexAt(event)), event));
  svg.addEventListener("pointerdown", (event) => show((at = indexAt(event)), event));
  svg.addEventListener("pointerleave", () => hide(cursor));
  svg.addEventListener("blur", () => hide(cursor));
  svg.addEventListener("focus", () => show(at));
  svg.addEventListener("keydown", (event) => {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (by) show((at = Math.min(rank.time.length - 1, Math.max(0, at + by))));
    if (event.key === "Escape") hide(cursor);
  });
  const peak = element("b", { className: rank.peak > limit ? "over" : "" }, bytes(rank.peak));
  const heading = element("header", {}, element("h2", {}, `pp${rank.pp}`), element("span", {}, "at most ", peak));
  const axis = element("div", { className: "time" }, ...[0, 0.5, 1].map((part) => element("span", {}, duration(part * (last - first)))));
  return element("section", {}, heading, element("div", { className: "plot" }, labels, svg, axis));
}

function hide(cursor) {
  cursor.setAttribute("d", "");
  document.getElementById("tip").hidden = true;
}

/** What a rank holds at a sample: all kinds, and the units with most activations. */
function tip(rank, layers, index, total, place) {
  const held = layers.map((layer) => ({ ...layer, size: layer.sizes[index] })).filter(({ size }) => size > 0);
  const units = held.filter(({ unit }) => unit).sort((a, b) => b.size - a.size);
  const rest = units.slice(MOST_UNITS).reduce((sum, { size }) => sum + size, 0);
  const shown = held.filter((layer) => !layer.unit || units.indexOf(layer) < MOST_UNITS).reverse();
  const row = (name, size, pair) => {
    const mark = element("i", { className: "swatch" });
    mark.style.background = pair ? fill(pair) : "transparent";
    return element("tr", {}, element("td", {}, mark, ` ${name}`), element("td", {}, bytes(size)));
  };
  const table = element("table", {}, ...shown.map(({ name, size, pair }) => row(name, size, pair)));
  if (rest) table.append(row(`activations of ${units.length - MOST_UNITS} more`, rest, colours.activations[1]));
  const box = document.getElementById("tip");
  box.replaceChildren(element("b", {}, `${bytes(total)} at ${duration(rank.time[index] - scales.first)}`), table);
  box.hidden = false;
  const [left, topEdge] = [place.clientX ?? place.left + 60, place.clientY ?? place.top + 20];
  box.style.left = `${Math.max(8, Math.min(left + 14, innerWidth - box.offsetWidth - 8))}px`;
  box.style.top = `${Math.max(8, Math.min(topEdge + 14, innerHeight - box.offsetHeight - 8))}px`;
}

function legend() {
  const items = new Map();
  for (const rank of ranks) for (const { name, pair, unit } of layersOf(rank)) items.set(unit ? "activations, by unit" : name, pair);
  return [...items].map(([name, pair]) => {
    const mark = element("i", { className: "swatch" });
    mark.style.background = fill(pair);
    return element("li", {}, mark, name);
  });
}

function paint() {
  document.getElementById("legend").replaceChildren(...legend());
  document.getElementById("ranks").replaceChildren(...ranks.map(draw));
}

dark.addEventListener("change", paint);
paint();
