"use strict";
const DATA = JSON.parse(document.getElementById("data").textContent);
const { kinds, looks, rows: ROWS } = DATA;
// Pixels: the gutters of a panel, its axis, the least below its rows, a rank's tallest compute row.
const LEFT = 84;
const RIGHT = 58;
const TOP = 24;
const BOTTOM = 8;
const TALL = 36;
const VEIL = 0.8; // how far a hover hides the spans that it does not concern
const OPS = Object.keys(looks);
const OP = kinds.op.map((op) => OPS.indexOf(op));
const dark = matchMedia("(prefers-color-scheme: dark)");
const byId = (id) => document.getElementById(id);
const hidden = new Set();
const view = { from: 0, to: 1, first: 0, last: 1, cross: null, hover: null, lit: null, same: null };
let theme, step, panels;

// ---- data ----

function decode(track) {
  const count = track.kind.length;
  const start = new Float64Array(count);
  const end = new Float64Array(count);
  let at = 0;
  let longest = 0;
  for (let i = 0; i < count; i++) {
    start[i] = at += track.gap[i];
    end[i] = at + track.length[i];
    longest = Math.max(longest, track.length[i]);
  }
  return {
    row: track.row,
    kind: Uint32Array.from(track.kind),
    start,
    end,
    longest,
    level: track.level,
    depth: track.depth,
  };
}

/** A rank that holds several stages shows every second one paler, as schedules with chunks are drawn in papers. */
function paleStages(tracks) {
  const stages = new Set();
  for (const track of tracks) if (track.row === "compute") for (const kind of track.kind) stages.add(kinds.stage[kind]);
  stages.delete(-1);
  return new Set([...stages].sort((a, b) => a - b).filter((_, i) => i % 2));
}

function load(panel, wanted) {
  const steps = panel.data.steps;
  const found = steps.filter((s) => s.step <= wanted).at(-1) ?? steps[0];
  panel.step = found;
  panel.scroll = 0;
  panel.ranks = found.ranks.map((r) => {
    const tracks = r.tracks.map(decode);
    return { rank: r.rank, busy: r.busy, tracks, pale: paleStages(tracks) };
  });
  const bounds = panel.ranks.flatMap((r) =>
    r.tracks.flatMap((t) => [t.start[0], t.end.reduce((a, b) => Math.max(a, b))]),
  );
  panel.first = bounds.reduce((a, b) => Math.min(a, b));
  panel.last = bounds.reduce((a, b) => Math.max(a, b));
}

function choose(wanted) {
  const whole = view.to - view.from >= view.last - view.first;
  step = wanted;
  byId("step").value = String(wanted);
  view.hover = view.lit = view.cross = null;
  for (const panel of panels) {
    load(panel, wanted);
    headline(panel);
  }
  view.first = Math.min(...panels.map((p) => p.first));
  view.last = Math.max(...panels.map((p) => p.last));
  legend();
  if (whole) reset();
  else show(view.from, view.to);
  arrange();
}

// ---- words ----

const UNITS = [
  [1e9, "s"],
  [1e6, "ms"],
  [1e3, "µs"],
  [1, "ns"],
];
const unitOf = (ns) => UNITS.find(([size]) => Math.abs(ns) >= size) ?? UNITS[3];
function duration(ns) {
  const [size, unit] = unitOf(ns);
  const value = ns / size;
  return `${value.toFixed(size === 1 ? 0 : Math.max(0, 3 - Math.floor(Math.log10(Math.abs(value) || 1))))} ${unit}`;
}
const percent = (share) => `${(100 * share).toFixed(1)} %`;
const make = (tag, text, className) =>
  Object.assign(document.createElement(tag), { textContent: text ?? "", className: className ?? "" });
const fill = (op) => looks[op][dark.matches ? "dark" : "light"];
const ink = (op) => looks[op][dark.matches ? "darkInk" : "lightInk"];

function swatch(op) {
  const box = make("i");
  box.style.background = fill(op);
  return box;
}

function definitions(pairs, className) {
  const list = make("dl", "", className);
  for (const [term, values, title] of pairs) {
    const pair = make("div");
    const value = make("dd");
    value.append(...values);
    pair.append(make("dt", term), value);
    pair.title = title;
    list.append(pair);
  }
  return list;
}

function headline(panel) {
  const { step: s, data } = panel;
  const name = make("h2", data.source[0].toUpperCase() + data.source.slice(1));
  name.append(make("span", `step ${s.step}`));
  const figures = s.bubble
    ? [
        [
          "makespan",
          s.makespan,
          s.bubble.makespan,
          "First compute start to last compute end over all ranks; its bubble is what a step with a barrier pays",
        ],
        [
          "longest",
          s.longest,
          s.bubble.longest,
          "First compute start to last compute end of the busiest rank; its bubble holds where no barrier ends a step",
        ],
      ]
    : [];
  panel.header.replaceChildren(
    name,
    definitions(
      figures.map(([term, seconds, bubble, title]) => [
        term,
        [`${duration(seconds * 1e9)}`, make("span", "bubble"), percent(bubble)],
        title,
      ]),
      "figures",
    ),
  );
}

function legend() {
  const groups = new Map();
  for (const op of OPS) groups.set(looks[op].label, [...(groups.get(looks[op].label) ?? []), op]);
  byId("legend").replaceChildren(
    ...[...groups].map(([label, ops]) => {
      const item = make("li");
      item.append(...ops.map(swatch), ...(ops[0].length < 3 ? [make("b", ops[0])] : []), label);
      item.title = ops.join(", ");
      return item;
    }),
  );
  if (panels.some((p) => p.ranks.some((r) => r.pale.size)))
    byId("legend").append(make("li", "paler: second stage of a rank"));
}
