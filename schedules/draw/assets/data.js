"use strict";
const DATA = JSON.parse(document.getElementById("data").textContent);
const { looks, rows: ROWS } = DATA;
const kinds = decodeKinds(DATA.kinds); // distinct instructions, as columns
const OPS = Object.keys(looks);
const FILLS = OPS.flatMap((op) => looks[op].light.map((_, chunk) => [op, chunk])); // an op in the shade of a chunk
const FIRST_FILL = Object.fromEntries(OPS.map((op) => [op, FILLS.findIndex((fill) => fill[0] === op)]));
const CHUNKS = Math.max(...OPS.map((op) => looks[op].light.length));
const IS_SCHEDULE = !DATA.unit; // of simulated programs, else of the steps of a run
const programs = DATA.programs.map(decodeProgram);
const STEPS = [...new Set(DATA.panels.flatMap((panel) => panel.steps.map((s) => s.step)))].sort((a, b) => a - b);
const dark = matchMedia("(prefers-color-scheme: dark)");
const byId = (id) => document.getElementById(id);
const hiddenRows = new Set(IS_SCHEDULE ? ROWS.filter((row) => row !== "compute") : []);
// Times are in nanoseconds: `from` and `to` are visible, `first` and `last` the step's, `cursor` is below the pointer.
const view = { from: 0, to: 1, first: 0, last: 1, cursor: null, hover: null, selected: null, curveRank: null };
let theme, currentStep, panels;

// ---- decoding ----

function decodeKinds({ ops, lanes, names, op, lane, stage, microbatch, peer }) {
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

/** Decodes a step of a panel, or the last one before it. Its spans are numbered by rank, row and time, and the panel has
 *  columns of them; `depth` is the number of overlapping spans that share a row's height, of which a span has a `level`. */
function loadStep(panel, step) {
  const steps = panel.data.steps;
  panel.step = steps.filter((s) => s.step <= step).at(-1) ?? steps[0];
  panel.count = panel.step.ranks.flatMap((rank) => rank.tracks).reduce((sum, track) => sum + track.kind.length, 0);
  const columns = { start: Float64Array, end: Float64Array, kind: Uint32Array, fill: Uint16Array };
  Object.assign(columns, { level: Uint8Array, depth: Uint8Array, track: Array });
  for (const [name, Column] of Object.entries(columns)) panel[name] = new Column(panel.count);
  let first = 0;
  panel.ranks = panel.step.ranks.map((rank, rankIndex) => {
    const tracks = rank.tracks.map((packed) => {
      const track = { row: packed.row, rankIndex, first, end: first + packed.kind.length, longest: 0 };
      decodeTrack(panel, track, packed, rank.stages);
      first = track.end;
      return track;
    });
    return { ...rank, tracks };
  });
  panel.tracks = panel.ranks.flatMap((rank) => rank.tracks);
  panel.first = Math.min(...panel.tracks.map((track) => panel.start[track.first]));
  panel.last = panel.end.reduce((a, b) => Math.max(a, b));
  const lengths = panel.end.map((end, n) => (panel.track[n].row === "compute" ? end - panel.start[n] : 0));
  const ordered = lengths.filter((length) => length > 0).sort();
  panel.usualLength = ordered[ordered.length >> 2] ?? 0;
  panel.scroll = 0;
  panel.selected = panel.matches = panel.highlighted = null;
  linkSpans(panel);
}

/** Fills the columns of a track's spans, `first` up to `end`. */
function decodeTrack(panel, track, { kind, gap, length, level, depth }, stages) {
  let time = 0;
  kind.forEach((of, i) => {
    const n = track.first + i;
    const shades = looks[kinds.op[of]].light.length;
    const chunk = Math.max(stages.indexOf(kinds.stage[of]), 0);
    panel.start[n] = time += gap[i];
    panel.end[n] = time + length[i];
    panel.kind[n] = of;
    panel.fill[n] = FIRST_FILL[kinds.op[of]] + Math.min(chunk, shades - 1);
    panel.level[n] = level ? level[i] : 0;
    panel.depth[n] = depth ? depth[i] : 1;
    panel.track[n] = track;
    track.longest = Math.max(track.longest, length[i]);
  });
}

const rankOf = (panel, n) => panel.track[n].rankIndex;
const middleOf = (panel, n) => (panel.start[n] + panel.end[n]) / 2;
const nameOf = (panel, n) => kinds.name[panel.kind[n]];

function showStep(step) {
  const all = view.to - view.from >= view.last - view.first;
  currentStep = step;
  byId("step").value = String(step);
  view.hover = view.cursor = view.selected = null;
  for (const panel of panels) loadStep(panel, step);
  panels.forEach(showHeader);
  panels.forEach(updateHighlights);
  view.first = Math.min(...panels.map((p) => p.first));
  view.last = Math.max(...panels.map((p) => p.last));
  find(byId("find").value);
  if (all) showAll();
  else show(view.from, view.to);
  arrange();
  showSelection();
}

function changeStep(by) {
  const step = STEPS[STEPS.indexOf(currentStep) + by];
  if (step !== undefined) showStep(step);
}

