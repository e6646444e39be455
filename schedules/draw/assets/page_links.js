// ---- what waits for what; spans go by their number in the panel ----

const isReceive = (panel, n) => kinds.lane[kindOf(panel, n)].startsWith("RECV");
const trackOf = (panel, n) => panel.tracks[panel.trackOf[n]];
const indexOf = (panel, n) => n - trackOf(panel, n).first;
const kindOf = (panel, n) => trackOf(panel, n).kind[indexOf(panel, n)];
const startOf = (panel, n) => trackOf(panel, n).start[indexOf(panel, n)];
const endOf = (panel, n) => trackOf(panel, n).end[indexOf(panel, n)];
const rankOf = (panel, n) => trackOf(panel, n).at;
/** When what waits for a span may start: the results of a pair's first half are there when the pair ends. */
const doneOf = (panel, n, why) => endOf(panel, why !== "order" && panel.pairs.has(n) ? panel.after[n] : n);
const membersOf = (panel, n) => panel.meets[panel.meetOf[n]] ?? [n];

/** Numbers the spans of a panel and links them: waits forth and back, neighbours on a lane, what runs as one event. */
function link(panel) {
  const { waits, meets, pairs, slot, critical } = panel.data.program;
  panel.tracks = panel.ranks.flatMap((rank, at) => rank.tracks.map((track) => Object.assign(track, { at })));
  let count = 0;
  for (const track of panel.tracks) {
    track.first = count;
    count += track.kind.length;
  }
  panel.trackOf = new Uint16Array(count);
  panel.tracks.forEach((track, i) => panel.trackOf.fill(i, track.first, track.first + track.kind.length));
  panel.pairs = new Set(pairs);
  panel.meets = meets;
  panel.meetOf = new Int32Array(count).fill(-1);
  meets.forEach((members, i) => members.forEach((n) => (panel.meetOf[n] = i)));
  Object.assign(panel, { count, slot, critical, ...lanes(panel, count) });
  panel.waits = { from: sums(waits.count), to: Uint32Array.from(waits.number) };
  panel.waiters = turned(panel.waits, count);
  panel.memory = decodeMemory(panel);
  remark(panel);
}

/** The span before and after each on its lane, -1 for none. */
function lanes(panel, count) {
  const before = new Int32Array(count).fill(-1);
  const after = new Int32Array(count).fill(-1);
  for (const track of panel.tracks) {
    const last = new Map();
    for (let i = 0; i < track.kind.length; i++) {
      const lane = kinds.lane[track.kind[i]];
      const n = track.first + i;
      if (last.has(lane)) {
        before[n] = last.get(lane);
        after[before[n]] = n;
      }
      last.set(lane, n);
    }
  }
  return { before, after };
}

function sums(counts) {
  const from = new Uint32Array(counts.length + 1);
  for (let i = 0; i < counts.length; i++) from[i + 1] = from[i] + counts[i];
  return from;
}

const listed = ({ from, to }, n) => to.subarray(from[n], from[n + 1]);

function turned(waits, count) {
  const counts = new Uint32Array(count);
  for (const n of waits.to) counts[n]++;
  const from = sums(counts);
  const next = from.slice();
  const to = new Uint32Array(waits.to.length);
  for (let n = 0; n < count; n++) for (const needed of listed(waits, n)) to[next[needed]++] = n;
  return { from, to };
}

/** What the event of a span waits for, or with `forth` false what waits for it: [number, why] of each. */
function neighbours(panel, n, forth) {
  const found = new Map(); // by event
  const add = (other, why) => {
    const event = panel.meetOf[other] < 0 ? -1 - other : panel.meetOf[other];
    if (!found.has(event)) found.set(event, [other, why]);
  };
  const links = forth ? panel.waits : panel.waiters;
  for (const m of membersOf(panel, n)) for (const other of listed(links, m)) add(other, reason(panel, m, other, forth));
  for (const m of membersOf(panel, n)) {
    const other = (forth ? panel.before : panel.after)[m];
    if (other >= 0 && !isReceive(panel, m)) add(other, "order"); // the lane of a receive is that of its send
  }
  return [...found.values()];
}

function reason(panel, n, other, forth) {
  const [needed, waiter] = forth ? [other, n] : [n, other];
  if (panel.meetOf[needed] >= 0) return "transfer";
  return isReceive(panel, waiter) ? "slot" : "data";
}

/** One leaf a neighbour; below a transfer or collective stands what is beyond it, so that ranks are crossed.
 *  `slack` is the time from the end of the one to the start of the other; with none, the one is `bound` to the other. */
function tree(panel, n, forth, depth = 0) {
  return neighbours(panel, n, forth)
    .filter(([other, why]) => !depth || why !== "order" || panel.meetOf[other] < 0)
    .map(([other, why]) => {
      const [first, then] = forth ? [other, n] : [n, other];
      const slack = startOf(panel, then) - doneOf(panel, first, why);
      const below = panel.meetOf[other] >= 0 && depth < 2 ? tree(panel, other, forth, depth + 1) : [];
      return { n: other, why, slack, bound: Math.abs(slack) <= 1, below };
    })
    .sort((a, b) => b.bound - a.bound);
}
