// ---- dependencies between spans, which go by their number in the panel ----

const isReceive = (panel, n) => kinds.lane[panel.kind[n]].startsWith("RECV");
/** When dependents of a span may start: the results of the first half of an overlapped pair are there when it ends. */
const doneAt = (panel, n, why) => panel.end[why !== "order" && panel.overlapped.has(n) ? panel.next[n] : n];
/** The spans that run as one event with a span: a send and its receive, or the members of a collective. */
const eventOf = (panel, n) => panel.events[panel.eventIndex[n]] ?? [n];

function linkSpans(panel) {
  const { dependencies, events, overlapped, slots, critical } = panel.data.program;
  const { count } = panel;
  panel.overlapped = new Set(overlapped);
  panel.eventIndex = new Int32Array(count).fill(-1);
  events.forEach((members, i) => members.forEach((n) => (panel.eventIndex[n] = i)));
  Object.assign(panel, { events, slots, critical, ...laneNeighbours(panel) });
  panel.dependencies = { from: offsets(dependencies.count), to: Uint32Array.from(dependencies.number) };
  panel.dependents = reversed(panel.dependencies, count);
  panel.activations = decodeActivations(panel);
  updateHighlights(panel);
}

/** The span before and after each span on its lane, or -1. */
function laneNeighbours(panel) {
  const previous = new Int32Array(panel.count);
  const next = new Int32Array(panel.count).fill(-1);
  for (const track of panel.tracks) {
    const last = new Map();
    for (let n = track.first; n < track.end; n++) {
      const lane = kinds.lane[panel.kind[n]];
      previous[n] = last.get(lane) ?? -1;
      if (previous[n] >= 0) next[previous[n]] = n;
      last.set(lane, n);
    }
  }
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

/** [number, why] of what the event of a span depends on if `upstream`, else of what depends on it. */
function neighbours(panel, n, upstream) {
  const found = new Map(); // by event
  const add = (other, why) => {
    const event = panel.eventIndex[other] < 0 ? -1 - other : panel.eventIndex[other];
    if (!found.has(event)) found.set(event, [other, why]);
  };
  const links = upstream ? panel.dependencies : panel.dependents;
  for (const m of eventOf(panel, n)) for (const other of linksOf(links, m)) add(other, reason(panel, m, other, upstream));
  for (const m of eventOf(panel, n)) {
    const other = (upstream ? panel.previous : panel.next)[m];
    if (other >= 0 && !isReceive(panel, m)) add(other, "order"); // a receive is in the lane of its send
  }
  return [...found.values()];
}

function reason(panel, n, other, upstream) {
  const [source, target] = upstream ? [other, n] : [n, other];
  if (panel.eventIndex[source] >= 0) return "transfer";
  return isReceive(panel, target) ? "slot" : "data";
}

/** One node per neighbour; the children of a transfer or collective are what lies beyond it, on other ranks.
 *  `slack` is the time from the end of the one to the start of the other; without slack the dependency is `binding`. */
function dependencyTree(panel, n, upstream, depth = 0) {
  return neighbours(panel, n, upstream)
    .filter(([other, why]) => !depth || why !== "order" || panel.eventIndex[other] < 0)
    .map(([other, why]) => {
      const [source, target] = upstream ? [other, n] : [n, other];
      const slack = panel.start[target] - doneAt(panel, source, why);
      const goesOn = panel.eventIndex[other] >= 0 && depth < 2;
      const children = goesOn ? dependencyTree(panel, other, upstream, depth + 1) : [];
      return { n: other, why, slack, binding: Math.abs(slack) <= 1, children };
    })
    .sort((a, b) => b.binding - a.binding);
}

