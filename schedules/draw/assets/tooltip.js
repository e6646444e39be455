// ---- what is below the pointer ----

/** Number of the span at a point of the canvas, up to 3 pixels beside it, or -1. */
function spanAt(panel, px, py) {
  const rank = panel.ranks[Math.floor((py - TOP + panel.scroll) / panel.pitch)];
  if (!rank || py < TOP || px < LEFT || px > LEFT + panel.plotWidth) return -1;
  const time = timeAt(panel, px);
  const reach = timeAt(panel, px + 3) - time;
  const distance = (n) => Math.max(panel.start[n] - time, time - panel.end[n], 0);
  let found = -1;
  for (const track of rank.tracks) {
    const first = bisect(track.first, track.end, (n) => panel.start[n] < time - reach - track.longest);
    for (let n = first; n < track.end && panel.start[n] <= time + reach; n++) {
      const [, top, , tall] = barOf(panel, n) ?? [0, Infinity, 0, 0];
      const isHit = py >= top && py <= top + tall && distance(n) <= reach;
      if (isHit && (found < 0 || distance(n) < distance(found))) found = n;
    }
  }
  return found;
}

/** Related are the spans of the same microbatch; without a microbatch, those of the same name. */
function setHover(panel, n) {
  if (n < 0) view.hover = null;
  if (n < 0 || (view.hover?.panel === panel && view.hover.n === n)) return;
  const same = (column) => Uint8Array.from(kinds[column], (other) => other === kinds[column][panel.kind[n]]);
  const sameKind = same("name");
  const related = kinds.microbatch[panel.kind[n]] < 0 ? sameKind : same("microbatch");
  view.hover = { panel, n, sameKind, related };
}

/** [source, durations] of the same instruction in the other panel, on the same rank if both panels have the same ranks. */
function inOtherPanel({ panel, n, sameKind }) {
  const other = panels.find((p) => p !== panel);
  if (!other) return null;
  const all = [...other.kind.keys()].filter((m) => sameKind[other.kind[m]]);
  const rankIn = (p, m) => p.ranks[rankOf(p, m)].rank;
  const own = all.filter((m) => other.ranks.length === panel.ranks.length && rankIn(other, m) === rankIn(panel, n));
  const lengths = (own.length ? own : all).map((m) => other.end[m] - other.start[m]);
  return lengths.length ? [other.data.source, lengths] : null;
}

function comparisonFacts(hover) {
  const [source, lengths] = inOtherPanel(hover) ?? [];
  if (!lengths) return [];
  const length = hover.panel.end[hover.n] - hover.panel.start[hover.n];
  const low = Math.min(...lengths);
  const high = Math.max(...lengths);
  if (low !== high) return [[source, `${duration(low)} to ${duration(high)}`]];
  const sign = length >= low ? "+" : "−";
  const change = low > 0 && length > 0 ? ` (${sign}${Math.abs(100 * (length / low - 1)).toFixed(1)} % here)` : "";
  return [[source, duration(low) + change]];
}

/** [term, value] lines about a span. */
function factsOf(panel, n) {
  const [start, end, kind] = [panel.start[n], panel.end[n], panel.kind[n]];
  const rank = panel.ranks[rankOf(panel, n)];
  const column = (name) => (kinds[name][kind] < 0 ? [] : [[name, String(kinds[name][kind])]]);
  const chunk = rank.stages.indexOf(kinds.stage[kind]) + 1;
  const slot = panel.slots?.[n] ?? -1;
  return [
    ["rank", String(rank.rank)],
    ["lane", kinds.lane[kind]],
    ...column("stage"),
    ...(rank.stages.length > 1 && chunk ? [["chunk", `${chunk} of ${rank.stages.length}`]] : []),
    ...column("microbatch"),
    ...column("peer"),
    ...(slot < 0 ? [] : [["slot", String(slot)]]),
    ...(IS_SCHEDULE ? [] : [["step", String(panel.step.step)]]),
    ["start", duration(start)],
    ["end", duration(end)],
    ["duration", duration(end - start)],
  ];
}

/** The direct dependencies of a span, and which of them set its start. */
function dependencyFacts(panel, n) {
  const nodes = dependencyTree(panel, n, true, 2);
  const name = (node) => nameOf(panel, node.n);
  const binding = nodes.filter((node) => node.binding).map(name);
  const names = [...nodes.slice(0, 6).map(name), ...(nodes.length > 6 ? [`${nodes.length - 6} more`] : [])];
  const term = isMeasured(panel) ? "longest for" : "start set by";
  const start = binding.length ? [[term, binding.slice(0, 3).join(", ")]] : [];
  return [["waits for", names.join(", ") || "nothing"], ...start];
}

function showTip(event) {
  const tip = byId("tip");
  const { hover } = view;
  // On a narrow window the section below the panels describes the selected span.
  tip.hidden = !hover || event.pointerType === "touch" || (isNarrow() && view.selected !== null);
  if (tip.hidden) return;
  const { panel, n } = hover;
  const dependencies = panel.program ? dependencyFacts(panel, n) : [];
  const planned = messageFacts(panel, n).map(([term, value]) => [isMeasured(panel) ? `planned ${term}` : term, value]);
  const facts = [...factsOf(panel, n), ...planned, ...(IS_SCHEDULE ? [] : comparisonFacts(hover)), ...dependencies];
  tip.replaceChildren(spanTitle(panel, n), factList(facts));
  const { offsetWidth: wide, offsetHeight: tall } = tip;
  const fits = event.clientX + 18 + wide <= innerWidth - 8;
  tip.style.left = `${fits ? event.clientX + 18 : Math.max(8, event.clientX - wide - 18)}px`;
  tip.style.top = `${clamp(event.clientY + 14, 8, Math.max(8, innerHeight - tall - 8))}px`;
}

