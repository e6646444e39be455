// ---- what is below the pointer ----

/** The span at a point of the canvas, up to 3 pixels beside it, or null. */
function spanAt(panel, px, py) {
  const index = Math.floor((py - TOP + panel.scroll) / panel.pitch);
  const rank = panel.ranks[index];
  if (!rank || py < TOP || px < LEFT || px > LEFT + panel.plotWidth) return null;
  for (const track of rank.tracks) {
    const place = rowPlace(panel, index, track.row);
    if (!place || py < place[0] || py > place[0] + place[1]) continue;
    return nearestSpan(panel, track, px, (py - place[0]) / place[1]);
  }
  return null;
}

/** `height` is the share of the row's height above the pointer. */
function nearestSpan(panel, track, px, height) {
  const time = timeAt(panel, px);
  const reach = timeAt(panel, px + 3) - time;
  let found = null;
  let least = Infinity;
  for (let i = firstAt(track, time - reach); i < track.start.length && track.start[i] <= time + reach; i++) {
    if (track.depth && track.depth[i] > 1 && Math.floor(height * track.depth[i]) !== track.level[i]) continue;
    const distance = Math.max(track.start[i] - time, time - track.end[i], 0);
    if (distance <= reach && distance < least) {
      found = { panel, track, index: i, kind: track.kind[i] };
      least = distance;
    }
  }
  return found;
}

/** Related are the spans of the same microbatch; without a microbatch, those of the same name. */
function setHover(found) {
  const old = view.hover;
  if (old?.track === found?.track && old?.index === found?.index) return;
  view.hover = found;
  if (!found) return;
  const name = kinds.name[found.kind];
  const microbatch = kinds.microbatch[found.kind];
  found.sameKind = Uint8Array.from(kinds.name, (other) => (other === name ? 1 : 0));
  const sameMicrobatch = () => Uint8Array.from(kinds.microbatch, (other) => (other === microbatch ? 1 : 0));
  found.related = microbatch < 0 ? found.sameKind : sameMicrobatch();
}

/** [source, durations] of the same instruction in the other panel, on the same rank if both panels have the same ranks. */
function inOtherPanel({ panel, track, sameKind }) {
  const other = panels.find((p) => p !== panel);
  if (!other || IS_SCHEDULE) return null;
  const { rank } = panel.ranks[track.rankIndex];
  const lengthsOf = (r) =>
    r.tracks.flatMap((t) => [...t.kind.keys()].filter((i) => sameKind[t.kind[i]]).map((i) => t.end[i] - t.start[i]));
  const sameRank = other.ranks.length === panel.ranks.length && other.ranks.find((r) => r.rank === rank);
  const own = sameRank ? lengthsOf(sameRank) : [];
  const lengths = own.length ? own : other.ranks.flatMap(lengthsOf);
  return lengths.length ? [other.data.source, lengths] : null;
}

function comparisonFacts(hover, length) {
  const other = inOtherPanel(hover);
  if (!other) return [];
  const [source, lengths] = other;
  const low = Math.min(...lengths);
  const high = Math.max(...lengths);
  if (low !== high) return [[source, `${duration(low)} to ${duration(high)}`]];
  const sign = length >= low ? "+" : "−";
  const change = low > 0 && length > 0 ? ` (${sign}${Math.abs(100 * (length / low - 1)).toFixed(1)} % here)` : "";
  return [[source, duration(low) + change]];
}

/** [term, value] lines about a span. */
function factsOf(panel, track, i) {
  const kind = track.kind[i];
  const rank = panel.ranks[track.rankIndex];
  const start = track.start[i];
  const length = track.end[i] - start;
  const column = (name) => (kinds[name][kind] < 0 ? [] : [[name, String(kinds[name][kind])]]);
  const chunk = rank.stages.indexOf(kinds.stage[kind]) + 1;
  const slot = panel.slots?.[track.first + i] ?? -1;
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
    ["end", duration(start + length)],
    ["duration", duration(length)],
  ];
}

/** The direct dependencies of a span, and which of them set its start. */
function dependencyFacts(panel, n) {
  const nodes = dependencyTree(panel, n, true, 2);
  const name = (node) => kinds.name[kindOf(panel, node.n)];
  const binding = nodes.filter((node) => node.binding).map(name);
  const names = [...nodes.slice(0, 6).map(name), ...(nodes.length > 6 ? [`${nodes.length - 6} more`] : [])];
  const start = binding.length ? [["start set by", binding.slice(0, 3).join(", ")]] : [];
  return [["waits for", names.join(", ") || "nothing"], ...start];
}

function showTip(event) {
  const tip = byId("tip");
  const { hover } = view;
  // On a narrow window the section below the panels describes the selected span.
  tip.hidden = !hover || event.pointerType === "touch" || (isNarrow() && view.selected !== null);
  if (tip.hidden) return;
  const { track, index, panel } = hover;
  const length = track.end[index] - track.start[index];
  const facts = [...factsOf(panel, track, index), ...comparisonFacts(hover, length)];
  if (IS_SCHEDULE) facts.push(...dependencyFacts(panel, track.first + index));
  tip.replaceChildren(spanTitle(track, index), factList(facts));
  const { offsetWidth: wide, offsetHeight: tall } = tip;
  const fits = event.clientX + 18 + wide <= innerWidth - 8;
  tip.style.left = `${fits ? event.clientX + 18 : Math.max(8, event.clientX - wide - 18)}px`;
  tip.style.top = `${clamp(event.clientY + 14, 8, Math.max(8, innerHeight - tall - 8))}px`;
}

