"use strict";
const DATA = JSON.parse(document.getElementById("data").textContent);
const { looks, rows: ROWS } = DATA;
const kinds = spellOut(DATA.kinds);
const OPS = Object.keys(looks);
const PAINTS = OPS.flatMap((op) => looks[op].light.map((_, chunk) => [op, chunk])); // an op in the shade of a chunk
const FIRST_PAINT = Object.fromEntries(OPS.map((op) => [op, PAINTS.findIndex((paint) => paint[0] === op)]));
const CHUNKS = Math.max(...OPS.map((op) => looks[op].light.length));
const LINKED = DATA.panels.every((panel) => panel.program); // the page of schedules: it knows what waits for what
const dark = matchMedia("(prefers-color-scheme: dark)");
const byId = (id) => document.getElementById(id);
const hidden = new Set(LINKED ? ROWS.filter((row) => row !== "compute") : []);
const view = { from: 0, to: 1, first: 0, last: 1, cross: null, hover: null, lit: null, same: null, rank: null };
let theme, step, panels;

// ---- data ----

/** Gives every kind its op, lane and name as text. */
function spellOut({ ops, lanes, names, op, lane, stage, microbatch, peer }) {
  const number = (value) => (value < 0 ? "" : value);
  return {
    op: op.map((i) => ops[i]),
    lane: lane.map((i) => lanes[i]),
    name: op.map((i, kind) => names[kind] ?? `${number(stage[kind])}${ops[i]}${number(microbatch[kind])}`),
    stage,
    microbatch,
    peer,
  };
}

function decode(track, stages) {
  const count = track.kind.length;
  const start = new Float64Array(count);
  const end = new Float64Array(count);
  const paint = new Uint16Array(count);
  const chunk = new Map(stages.map((stage, i) => [stage, i]));
  let at = 0;
  let longest = 0;
  for (let i = 0; i < count; i++) {
    start[i] = at += track.gap[i];
    end[i] = at + track.length[i];
    longest = Math.max(longest, track.length[i]);
    const op = kinds.op[track.kind[i]];
    const shade = chunk.get(kinds.stage[track.kind[i]]) ?? 0;
    paint[i] = FIRST_PAINT[op] + Math.min(shade, looks[op].light.length - 1);
  }
  const kind = Uint32Array.from(track.kind);
  return { row: track.row, kind, start, end, paint, longest, level: track.level, depth: track.depth };
}

function load(panel, wanted) {
  const steps = panel.data.steps;
  const found = steps.filter((s) => s.step <= wanted).at(-1) ?? steps[0];
  panel.step = found;
  panel.scroll = 0;
  panel.ranks = found.ranks.map((r) => ({
    rank: r.rank,
    busy: r.busy,
    stages: r.stages,
    tracks: r.tracks.map((track) => decode(track, r.stages)),
  }));
  const lengths = [];
  panel.first = Infinity;
  panel.last = -Infinity;
  for (const track of panel.ranks.flatMap((r) => r.tracks)) {
    panel.first = Math.min(panel.first, track.start[0]);
    for (let i = 0; i < track.end.length; i++) {
      panel.last = Math.max(panel.last, track.end[i]);
      if (track.row === "compute" && track.end[i] > track.start[i]) lengths.push(track.end[i] - track.start[i]);
    }
  }
  panel.usual = Float64Array.from(lengths).sort()[lengths.length >> 2] ?? 0;
  if (panel.data.program) link(panel);
}

function choose(wanted) {
  const whole = view.to - view.from >= view.last - view.first;
  step = wanted;
  byId("step").value = String(wanted);
  view.hover = view.lit = view.cross = null;
  for (const panel of panels) load(panel, wanted);
  panels.forEach(headline);
  view.first = Math.min(...panels.map((p) => p.first));
  view.last = Math.max(...panels.map((p) => p.last));
  legend();
  if (whole) reset();
  else show(view.from, view.to);
  arrange();
}
