// ---- dependencies between spans, which go by their number in the panel ----

const isMeasured = (panel) => panel.data.source === "measured";
const isReceive = (panel, n) => kinds.lane[panel.kind[n]].startsWith("RECV");
/** When dependents of a span may start: the results of the first half of an overlapped pair are there when it ends. */
const doneAt = (panel, n, why) =>
  why === "order" && !isMeasured(panel) ? panel.end[n] : Math.max(panel.end[n], panel.end[panel.pair[n]]);
/** The spans that run as one event with a span: a send and its receive, or the members of a collective. */
const eventOf = (panel, n) => panel.events[panel.eventIndex[n]] ?? [n];

/** [number, why, via] of what the event of a span depends on if `upstream`, else of what depends on it, and the span of
 *  the event that it is linked with. */
function neighbours(panel, n, upstream) {
  const found = new Map(); // by event
  const add = (other, why, via) => {
    const event = panel.eventIndex[other] < 0 ? -1 - other : panel.eventIndex[other];
    if (!found.has(event)) found.set(event, [other, why, via]);
  };
  const links = upstream ? panel.dependencies : panel.dependents;
  for (const m of eventOf(panel, n))
    for (const other of linksOf(links, m)) add(other, reason(panel, m, other, upstream), m);
  for (const m of eventOf(panel, n)) {
    const other = (upstream ? panel.previous : panel.next)[m];
    if (other >= 0 && !isReceive(panel, m)) add(other, "order", m); // a receive is in the lane of its send
  }
  return [...found.values()];
}

function reason(panel, n, other, upstream) {
  const [source, target] = upstream ? [other, n] : [n, other];
  if (panel.eventIndex[source] >= 0) return "transfer";
  return isReceive(panel, target) ? "slot" : "data";
}

/** One node per neighbour; the children of a transfer or collective are what lies beyond it, on other ranks.
 *  `slack` is the time between the two, and a neighbour is `binding` if the later of the two waited for nothing longer. */
function dependencyTree(panel, n, upstream, depth = 0) {
  return neighbours(panel, n, upstream)
    .filter(([other, why]) => !depth || why !== "order" || panel.eventIndex[other] < 0)
    .map(([other, why, via]) => {
      const [source, target] = upstream ? [other, n] : [via, other];
      const done = doneAt(panel, source, why);
      const goesOn = panel.eventIndex[other] >= 0 && depth < 2;
      const children = goesOn ? dependencyTree(panel, other, upstream, depth + 1) : [];
      if (isMeasured(panel)) return { n: other, why, children, ...measuredWait(panel, target, source, done) };
      const slack = panel.start[target] - done;
      return { n: other, why, children, slack, binding: Math.abs(slack) <= 1 };
    })
    .sort((a, b) => b.binding - a.binding || (isMeasured(panel) ? a.slack - b.slack : 0));
}

/** What a measured span waited for until it could begin, and whose dependencies these are: those of a receive and its
 *  send, or of the last to start of a collective. A receive is posted early, and begins once they have ended. */
function lastNeeded(panel, n) {
  const event = eventOf(panel, n);
  const isTransfer = panel.program.transfers.has(panel.rowOf[n]);
  const needs = (m) => {
    const both = isReceive(panel, m) ? event : [m];
    const needed = both.flatMap((k) => [...linksOf(panel.dependencies, k)]);
    const half = panel.pair[m];
    if (half !== m) needed.push(...linksOf(panel.dependencies, half));
    if (panel.previous[m] >= 0) needed.push(panel.previous[m]);
    return needed;
  };
  const ends = (m) => needs(m).map((k) => [doneAt(panel, k), k]);
  const latest = (m) => ends(m).reduce((a, b) => (b[0] > a[0] ? b : a), [-Infinity, -1]);
  const members = isTransfer ? [n] : event;
  const last = members.reduce((a, b) => {
    const [first, second] = [panel.start[a], panel.start[b]];
    return second > first || (second === first && latest(b)[0] > latest(a)[0]) ? b : a;
  });
  return { via: last, ready: latest(last)[0], n: latest(last)[1] };
}

/** `slack` is how long the target took to begin, or a receive to end, after its last dependency; else how much earlier
 *  than that one the source ended. */
function measuredWait(panel, target, source, done) {
  const { via, ready, n } = lastNeeded(panel, target);
  const binding = n === source || panel.pair[n] === source || (n >= 0 && eventOf(panel, n).includes(source));
  if (!binding) return { binding, slack: ready - done };
  const took = isReceive(panel, target) ? "transfer" : "host";
  const begin = took === "transfer" ? panel.end[target] : Math.min(panel.start[via], panel.start[panel.pair[via]]);
  return { binding, slack: begin - ready, took };
}
