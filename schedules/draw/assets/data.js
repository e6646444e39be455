"use strict";
const DATA = JSON.parse(document.getElementById("data").textContent);
const { looks, rows: ROWS } = DATA;
const kinds = decodeKinds(DATA.kinds); // distinct instructions, as columns
const OPS = Object.keys(looks);
const FILLS = OPS.flatMap((op) => looks[op].light.map((_, chunk) => [op, chunk])); // an op in the shade of a chunk
const FIRST_FILL = Object.fromEntries(OPS.map((op) => [op, FILLS.findIndex((fill) => fill[0] === op)]));
const CHUNKS = Math.max(...OPS.map((op) => looks[op].light.length));
const IS_SCHEDULE = DATA.panels.every((panel) => panel.program); // dependencies are known
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

function decodeTrack(track, stages) {
  const count = track.kind.length;
  const start = new Float64Array(count);
  const end = new Float64Array(count);
  const fill = new Uint16Array(count);
  const chunkOf = new Map(stages.map((stage, i) => [stage, i]));
  let time = 0;
  let longest = 0;
  for (let i = 0; i < count; i++) {
    start[i] = time += track.gap[i];
    end[i] = time + track.length[i];
    longest = Math.max(longest, track.length[i]);
    const op = kinds.op[track.kind[i]];
    const chunk = chunkOf.get(kinds.stage[track.kind[i]]) ?? 0;
    fill[i] = FIRST_FILL[op] + Math.min(chunk, looks[op].light.length - 1);
  }
  const kind = Uint32Array.from(track.kind);
  return { row: track.row, kind, start, end, fill, longest, level: track.level, depth: track.depth };
}

/** Decodes a step of a panel, or the last one before it, and numbers its spans by rank, row and time. */
function loadStep(panel, step) {
  const steps = panel.data.steps;
  panel.step = steps.filter((s) => s.step <= step).at(-1) ?? steps[0];
  panel.scroll = 0;
  panel.ranks = panel.step.ranks.map(({ rank, busy, stages, tracks }) => ({
    rank,
    busy,
    stages,
    tracks: tracks.map((track) => decodeTrack(track, stages)),
  }));
  panel.tracks = panel.ranks.flatMap((rank, index) =>
    rank.tracks.map((track) => Object.assign(track, { rankIndex: index })),
  );
  panel.count = 0;
  panel.first = Infinity;
  panel.last = -Infinity;
  const lengths = [];
  for (const track of panel.tracks) {
    track.first = panel.count;
    panel.count += track.kind.length;
    panel.first = Math.min(panel.first, track.start[0]);
    for (let i = 0; i < track.end.length; i++) {
      panel.last = Math.max(panel.last, track.end[i]);
      if (track.row === "compute" && track.end[i] > track.start[i]) lengths.push(track.end[i] - track.start[i]);
    }
  }
  panel.trackIndex = new Uint32Array(panel.count);
  panel.tracks.forEach((track, i) => panel.trackIndex.fill(i, track.first, track.first + track.kind.length));
  panel.usualLength = Float64Array.from(lengths).sort()[lengths.length >> 2] ?? 0;
  panel.selected = panel.matches = panel.highlighted = null;
  if (panel.data.program) linkSpans(panel);
}

const trackOf = (panel, n) => panel.tracks[panel.trackIndex[n]];
const indexOf = (panel, n) => n - trackOf(panel, n).first;
const kindOf = (panel, n) => trackOf(panel, n).kind[indexOf(panel, n)];
const startOf = (panel, n) => trackOf(panel, n).start[indexOf(panel, n)];
const endOf = (panel, n) => trackOf(panel, n).end[indexOf(panel, n)];
const rankOf = (panel, n) => trackOf(panel, n).rankIndex;

function showStep(step) {
  const all = view.to - view.from >= view.last - view.first;
  currentStep = step;
  byId("step").value = String(step);
  view.hover = view.cursor = view.selected = null;
  for (const panel of panels) loadStep(panel, step);
  panels.forEach(showHeader);
  view.first = Math.min(...panels.map((p) => p.first));
  view.last = Math.max(...panels.map((p) => p.last));
  find(byId("find").value);
  if (all) showAll();
  else show(view.from, view.to);
  arrange();
  if (IS_SCHEDULE) showSelection();
}

function changeStep(by) {
  const step = STEPS[STEPS.indexOf(currentStep) + by];
  if (step !== undefined) showStep(step);
}

