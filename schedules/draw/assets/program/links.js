// ---- the program of a step: which span is which instruction, and what that is linked with ----

/** Finds the spans of the step's program; without one, no span has a dependency. */
function linkSpans(panel) {
  const program = panel.step.path ? programs[panel.data.program] : null;
  Object.assign(panel, { program, memory: null, slots: null, events: [], eventIndex: [] });
  panel.critical = panel.step.path ? decodePath(panel.step.path) : null;
  if (!program) return;
  const { spanOf, rowOf } = matchRows(panel, program);
  panel.rowOf = rowOf;
  panel.slots = rowOf.map((row) => program.slots[row]);
  linkEvents(panel, program, spanOf);
  linkPairs(panel, program, spanOf);
  panel.dependencies = linkWaits(panel, program, spanOf);
  panel.dependents = reversed(panel.dependencies, panel.count);
  Object.assign(panel, laneNeighbours(panel, program, spanOf));
  if (program.memory) panel.memory = decodeMemory(panel, program, spanOf);
}

/** The pieces of a critical path: their spans, kinds, starts and ends. */
function decodePath({ begin, number, part, length }) {
  let at = begin;
  return number.map((n, i) => ({ n, part: DATA.parts[part[i]], start: at, end: (at += length[i]) }));
}

/** A program with, for each of its pipeline ranks, its first row, and the rows of names. */
function decodeProgram(program) {
  let row = 0;
  const ranks = program.counts.map((count) => {
    const [first, rowOfName] = [row, new Map()];
    for (; row < first + count; row++) rowOfName.set(kinds.name[program.kind[row]], row);
    return { first, count, rowOfName };
  });
  const waits = offsets(program.dependencies.count);
  const [pairs, transfers] = [new Set(program.overlapped), new Set(program.events.transfers.flat())];
  return { ...program, ranks, waits, pairs, transfers, messages: decodeMessages(program.messages) };
}

/** `spanOf[rank][row - first row of its pipeline rank]` is a span, `rowOf[span]` its row. */
function matchRows(panel, program) {
  const rowOf = new Int32Array(panel.count);
  const spanOf = panel.ranks.map(({ rank, tracks }) => {
    const { first, count, rowOfName } = program.ranks[panel.data.groups.pp[rank]];
    const spans = new Int32Array(count);
    for (const track of tracks) {
      for (let n = track.first; n < track.end; n++) {
        rowOf[n] = rowOfName.get(nameOf(panel, n));
        spans[rowOf[n] - first] = n;
      }
    }
    return spans;
  });
  return { spanOf, rowOf };
}

/** Calls `visit` with each rank's first row and spans. */
function eachRank(panel, program, spanOf, visit) {
  panel.ranks.forEach(({ rank }, index) => {
    const { pp } = panel.data.groups;
    visit(program.ranks[pp[rank]].first, spanOf[index], rank);
  });
}

function linkEvents(panel, program, spanOf) {
  const { replica, collective } = panel.data.groups;
  const scopes = { transfers: (rank) => replica[rank], collectives: (rank) => collective[rank], everyone: () => 0 };
  panel.events = [];
  panel.eventIndex = new Int32Array(panel.count).fill(-1);
  for (const [scope, groupOf] of Object.entries(scopes)) {
    const eventOfRow = new Map();
    program.events[scope].forEach((rows, event) => rows.forEach((row) => eventOfRow.set(row, event)));
    const members = new Map(); // by event and group of ranks
    eachRank(panel, program, spanOf, (first, spans, rank) =>
      spans.forEach((n, at) => {
        const event = eventOfRow.get(first + at);
        if (event === undefined) return;
        const key = `${event} ${groupOf(rank)}`;
        if (!members.has(key)) members.set(key, []);
        members.get(key).push(n);
      }),
    );
    for (const spans of members.values()) {
      if (spans.length < 2) continue;
      for (const n of spans) panel.eventIndex[n] = panel.events.length;
      panel.events.push(spans);
    }
  }
}

/** `pair[n]` is the other half of the overlapped pair that a span is a half of, else the span itself. */
function linkPairs(panel, program, spanOf) {
  panel.pair = Int32Array.from({ length: panel.count }, (_, n) => n);
  eachRank(panel, program, spanOf, (first, spans) =>
    spans.forEach((n, at) => {
      if (program.pairs.has(first + at)) [panel.pair[n], panel.pair[spans[at + 1]]] = [spans[at + 1], n];
    }),
  );
}

function linkWaits(panel, program, spanOf) {
  const { count, before } = program.dependencies;
  const from = offsets(panel.rowOf.map((row) => count[row]));
  const to = new Uint32Array(from[panel.count]);
  eachRank(panel, program, spanOf, (first, spans) =>
    spans.forEach((n, at) => {
      const wait = program.waits[first + at];
      for (let k = 0; k < count[first + at]; k++) to[from[n] + k] = spans[at - before[wait + k]];
    }),
  );
  return { from, to };
}

/** The span before and after each span on its lane, or -1. The halves of a measured pair run beside each other. */
function laneNeighbours(panel, program, spanOf) {
  const previous = new Int32Array(panel.count);
  const next = new Int32Array(panel.count).fill(-1);
  eachRank(panel, program, spanOf, (_, spans) => {
    const last = new Map();
    for (const n of spans) {
      const lane = kinds.lane[panel.kind[n]];
      const before = last.get(lane) ?? -1;
      const isBeside = isMeasured(panel) && before >= 0 && panel.pair[n] === before;
      previous[n] = isBeside ? previous[before] : before;
      if (before >= 0 && !isBeside) next[before] = n;
      if (before >= 0 && isMeasured(panel) && panel.pair[before] !== before && !isBeside) next[panel.pair[before]] = n;
      last.set(lane, n);
    }
  });
  return { previous, next };
}

function offsets(counts) {
  const found = new Uint32Array(counts.length + 1);
  for (let i = 0; i < counts.length; i++) found[i + 1] = found[i] + counts[i];
  return found;
}

const linksOf = ({ from, to }, n) => to.subarray(from[n], from[n + 1]);

function reversed(links, count) {
  const counts = new Uint32Array(count);
  for (const n of links.to) counts[n]++;
  const from = offsets(counts);
  const next = from.slice();
  const to = new Uint32Array(links.to.length);
  for (let n = 0; n < count; n++) for (const other of linksOf(links, n)) to[next[other]++] = n;
  return { from, to };
}
