// ---- what is under the pointer ----

/** The span at a point of the canvas, up to 3 pixels beside it, or null. */
function spanAt(panel, px, py) {
  const index = Math.floor((py - TOP + panel.scroll) / panel.pitch);
  const rank = panel.ranks[index];
  if (!rank || py < TOP || px < LEFT || px > LEFT + panel.plotWidth) return null;
  for (const track of rank.tracks) {
    const at = place(panel, index, track.row);
    if (!at || py < at[0] || py > at[0] + at[1]) continue;
    return nearest(panel, track, px, (py - at[0]) / at[1], rank);
  }
  return null;
}

function nearest(panel, track, px, height, rank) {
  const time = timeAt(panel, px);
  const reach = timeAt(panel, px + 3) - time;
  let found = null;
  let least = Infinity;
  for (let i = firstAt(track, time - reach); i < track.start.length && track.start[i] <= time + reach; i++) {
    if (track.depth && track.depth[i] > 1 && Math.floor(height * track.depth[i]) !== track.level[i]) continue;
    const away = Math.max(track.start[i] - time, time - track.end[i], 0);
    if (away <= reach && away < least) {
      found = { panel, rank, track, index: i, kind: track.kind[i] };
      least = away;
    }
  }
  return found;
}

function hover(found) {
  const old = view.hover;
  if (old?.track === found?.track && old?.index === found?.index) return;
  view.hover = found;
  view.lit = view.same = null;
  if (!found) return;
  const name = kinds.name[found.kind];
  const microbatch = kinds.microbatch[found.kind];
  view.same = Uint8Array.from(kinds.name, (other) => (other === name ? 1 : 0));
  view.lit = microbatch < 0 ? view.same : Uint8Array.from(kinds.microbatch, (other) => (other === microbatch ? 1 : 0));
}

/** Durations of the same instruction in the other panel: of the same rank if it ran there, else of every rank. */
function elsewhere(found) {
  const other = panels.find((panel) => panel !== found.panel);
  if (!other || LINKED) return null;
  const all = other.ranks.map((r) => [
    r.rank,
    r.tracks.flatMap((t) => {
      const lengths = [];
      t.kind.forEach((kind, i) => {
        if (view.same[kind]) lengths.push(t.end[i] - t.start[i]);
      });
      return lengths;
    }),
  ]);
  const here =
    other.ranks.length === found.panel.ranks.length &&
    all.find(([rank, lengths]) => rank === found.rank.rank && lengths.length);
  const lengths = here ? here[1] : all.flatMap(([, some]) => some);
  return lengths.length ? [other.data.source, lengths] : null;
}

function compared(found, length) {
  const other = elsewhere(found);
  if (!other) return [];
  const [source, lengths] = other;
  const low = Math.min(...lengths);
  const high = Math.max(...lengths);
  if (low !== high) return [[source, `${duration(low)} to ${duration(high)}`]];
  const change =
    low > 0 && length > 0
      ? ` (here ${length >= low ? "+" : "−"}${Math.abs(100 * (length / low - 1)).toFixed(1)} %)`
      : "";
  return [[source, duration(low) + change]];
}

/** What is told of a span: [term, value] lines. */
function facts(panel, track, index) {
  const kind = track.kind[index];
  const rank = panel.ranks.find((r) => r.tracks.includes(track));
  const start = track.start[index];
  const length = track.end[index] - start;
  const number = (name) => (kinds[name][kind] < 0 ? [] : [[name, String(kinds[name][kind])]]);
  const chunk = rank.stages.indexOf(kinds.stage[kind]) + 1;
  const slot = panel.slot?.[track.first + index] ?? -1;
  return [
    ["rank", String(rank.rank)],
    ["lane", kinds.lane[kind]],
    ...number("stage"),
    ...(rank.stages.length > 1 && chunk ? [["chunk", `${chunk} of ${rank.stages.length}`]] : []),
    ...number("microbatch"),
    ...number("peer"),
    ...(slot < 0 ? [] : [["slot", String(slot)]]),
    ...(LINKED ? [] : [["step", String(panel.step.step)]]),
    ["start", duration(start)],
    ["end", duration(start + length)],
    ["duration", duration(length)],
  ];
}

/** The direct predecessors of a span as a line, the one that bound its start apart. */
function waitsFor(panel, n) {
  const leaves = tree(panel, n, true, 2);
  const name = (leaf) => kinds.name[kindOf(panel, leaf.n)];
  const held = leaves.filter((leaf) => leaf.bound).map(name);
  const names = [...leaves.slice(0, 6).map(name), ...(leaves.length > 6 ? [`${leaves.length - 6} more`] : [])];
  return [["waits for", names.join(", ") || "nothing"], ...(held.length ? [["bound by", held.slice(0, 3).join(", ")]] : [])];
}

function tell(event) {
  const tip = byId("tip");
  const found = view.hover;
  // Where there is little room, the section below the panels tells of the chosen one.
  tip.hidden = !found || event.pointerType === "touch" || (innerWidth < 600 && view.chosen);
  if (tip.hidden) return;
  const { track, index, kind, panel } = found;
  const head = make("p");
  const label = looks[kinds.op[kind]].label;
  head.append(swatch(PAINTS[track.paint[index]]), make("b", kinds.name[kind]), make("span", label));
  const length = track.end[index] - track.start[index];
  const linked = LINKED ? waitsFor(panel, track.first + index) : [];
  tip.replaceChildren(head, details([...facts(panel, track, index), ...compared(found, length), ...linked]));
  const { offsetWidth: wide, offsetHeight: tall } = tip;
  const fits = event.clientX + 18 + wide <= innerWidth - 8;
  tip.style.left = `${fits ? event.clientX + 18 : Math.max(8, event.clientX - wide - 18)}px`;
  tip.style.top = `${clamp(event.clientY + 14, 8, Math.max(8, innerHeight - tall - 8))}px`;
}
