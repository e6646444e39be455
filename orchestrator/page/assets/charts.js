// ---- curves: one figure a quantity; a pointer or the arrow keys read values ----

import { byId, bytes, draw, make, number, say } from "./dom.js";

const CHARTS = {
  loss: ["Loss", "nats per token", number],
  grad_norm: ["Gradient norm", "before clipping", number],
  tokens_per_second: ["Throughput", "tokens per second", (value) => number(value, 3)],
  peak_bytes: ["Peak memory", "of the fullest rank", bytes],
};
const [LEFT, RIGHT, TOP, BOTTOM, HEIGHT] = [62, 12, 10, 22, 168];
const SPIKE = 5; // times what 98 % of the values do not exceed
let curves = null;

export function showCurves(found) {
  curves = found;
  for (const key of Object.keys(CHARTS)) {
    const hasValues = found[key].some((value) => value !== null && (key !== "peak_bytes" || value > 0));
    const chart = byId(`chart-${key}`) ?? (hasValues ? open(key) : null);
    if (chart) paint(chart, key);
  }
  const width = found.width > 1 ? `means of ${found.width} steps` : "";
  byId("window").textContent = found.step.length ? width : "no step yet";
}

function open(key) {
  const [name, unit] = CHARTS[key];
  const figure = make("figure", "", "chart");
  figure.id = `chart-${key}`;
  const head = make("figcaption");
  head.append(make("b", name), make("span", unit, "soft"), make("output"));
  const plot = draw("svg", { tabindex: 0, role: "img", height: HEIGHT });
  plot.addEventListener("pointermove", (event) => read(figure, key, indexAt(plot, event.clientX)));
  plot.addEventListener("pointerleave", () => read(figure, key, null));
  plot.addEventListener("blur", () => read(figure, key, null));
  plot.addEventListener("keydown", (event) => onKey(event, figure, key));
  figure.append(head, plot);
  byId("charts").append(figure);
  return figure;
}

/** Bytes begin at 0, in steps of binary units. A few spikes may leave the figure, or nothing else could be seen. */
function scaleOf(values, isBytes) {
  const known = values.filter((value) => value !== null).sort((a, b) => a - b);
  const [least, usual, most] = [known[0], known[Math.floor(0.98 * (known.length - 1))], known.at(-1)];
  const [low, high] = [isBytes ? 0 : least, usual > 0 && most > SPIKE * usual ? 1.5 * usual : most];
  const unit = isBytes ? 1024 ** Math.floor(Math.log2(Math.max(1, high / 4)) / 10) : 1;
  const gap = unit * nice((high - low || Math.abs(high) || 1) / 4 / unit);
  return { low: Math.floor(low / gap) * gap, high: Math.max(Math.ceil(high / gap) * gap, Math.floor(low / gap) * gap + gap), gap };
}

/** 1, 2 or 5 times a power of ten, at least `value`. */
function nice(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].find((n) => n * power >= value * (1 - 1e-9)) * power;
}

function xOf(plot, index) {
  return LEFT + ((plot.clientWidth - LEFT - RIGHT) * index) / Math.max(1, curves.step.length - 1);
}

function paint(figure, key) {
  const plot = figure.querySelector("svg");
  const values = curves[key];
  const { low, high, gap } = scaleOf(values, CHARTS[key][2] === bytes);
  const y = (value) => HEIGHT - BOTTOM - ((HEIGHT - TOP - BOTTOM) * (Math.min(value, high) - low)) / (high - low);
  const format = CHARTS[key][2];
  plot.replaceChildren();
  for (let value = low; value <= high + gap / 2; value += gap) {
    plot.append(draw("path", { class: "grid", d: `M${LEFT} ${y(value)}H${plot.clientWidth - RIGHT}` }));
    plot.append(draw("text", { x: LEFT - 8, y: y(value) + 4, "text-anchor": "end" }, format(Math.abs(value) < gap / 1e6 ? 0 : value)));
  }
  const last = curves.step.length - 1;
  for (const [index, anchor] of last ? [[0, "start"], [last, "end"]] : [[0, "start"]])
    plot.append(draw("text", { x: xOf(plot, index), y: HEIGHT - 6, "text-anchor": anchor }, `step ${curves.step[index]}`));
  let path = "";
  values.forEach((value, index) => {
    if (value === null) return;
    path += `${index && values[index - 1] !== null ? "L" : "M"}${xOf(plot, index).toFixed(1)} ${y(value).toFixed(1)}`;
    if (last === 0) path += "h1";
  });
  const most = Math.max(...values);
  const beyond = most > high ? `, up to ${format(most)} in step ${curves.step[values.indexOf(most)]}` : "";
  say(figure.querySelector(".soft"), CHARTS[key][1] + beyond);
  plot.append(draw("path", { class: "line", d: path }), draw("path", { class: "cursor" }), draw("circle", { class: "at", r: 3.5 }));
  plot.setAttribute("aria-label", `${CHARTS[key][0]}, ${number(curves.step.length)} points, last ${format(values.at(-1))}`);
  figure.scale = y;
  read(figure, key, figure.at ?? null);
}

function indexAt(plot, clientX) {
  const x = clientX - plot.getBoundingClientRect().left;
  const share = (x - LEFT) / (plot.clientWidth - LEFT - RIGHT);
  return Math.round(Math.max(0, Math.min(1, share)) * (curves.step.length - 1));
}

/** Shows the value of a point, null: the last one, without a mark. */
function read(figure, key, index) {
  figure.at = index;
  const plot = figure.querySelector("svg");
  const at = Math.min(index ?? Infinity, curves.step.length - 1);
  const value = curves[key][at];
  const where = index === null ? "" : `step ${curves.step[at]}: `;
  figure.querySelector("output").textContent = `${where}${CHARTS[key][2](value)}`;
  const marked = index !== null && value !== null;
  plot.querySelector(".cursor").setAttribute("d", marked ? `M${xOf(plot, at)} ${TOP}V${HEIGHT - BOTTOM}` : "");
  const dot = plot.querySelector(".at");
  dot.style.display = marked ? "" : "none";
  if (marked) Object.entries({ cx: xOf(plot, at), cy: figure.scale(value) }).forEach(([name, v]) => dot.setAttribute(name, v));
}

function onKey(event, figure, key) {
  const last = curves.step.length - 1;
  const at = figure.at ?? last;
  const next = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: last }[event.key];
  if (next === undefined) return;
  event.preventDefault();
  read(figure, key, Math.max(0, Math.min(last, next)));
}
