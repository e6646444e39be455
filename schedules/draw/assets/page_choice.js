// ---- the chosen instruction ----

const WHY = { data: "its result", transfer: "what it brings", slot: "its slot", order: "its turn on the lane" };
const MOST = 200; // lines of a list

/** Chooses a span, or none with n = -1. */
function pick(panel, n) {
  for (const p of panels) {
    p.chosen = p === panel && n >= 0 ? { n, needs: tree(p, n, true), waiters: tree(p, n, false) } : null;
    remark(p);
  }
  view.chosen = panels.find((p) => p.chosen) ?? null;
  if (view.chosen) reveal(panel, n);
  if (innerWidth < 600) byId("tip").hidden = true;
  explain();
  draw();
}

/** Which spans stay clear: the chosen one with its neighbours, and the critical path if it is asked for. */
function remark(panel) {
  const { chosen, critical } = panel;
  const asked = byId("critical").checked;
  panel.marked = chosen || asked ? new Uint8Array(panel.count) : null;
  if (asked) for (const n of critical.number) panel.marked[n] = 1;
  if (!chosen) return;
  const mark = (leaves) =>
    leaves.forEach(({ n, below }) => {
      for (const m of membersOf(panel, n)) panel.marked[m] = 1;
      mark(below);
    });
  for (const m of membersOf(panel, chosen.n)) panel.marked[m] = 1;
  mark(chosen.needs);
  mark(chosen.waiters);
}

/** Shows the row of a span and moves the view so that it is in it. */
function reveal(panel, n) {
  if (hidden.has(trackOf(panel, n).row)) toggle(trackOf(panel, n).row, true);
  const [start, end, width] = [startOf(panel, n), endOf(panel, n), view.to - view.from];
  if (start < view.from || end > view.to) show((start + end - width) / 2, (start + end + width) / 2);
  const top = rankOf(panel, n) * panel.pitch - panel.scroll;
  const shown = panel.height - TOP - BOTTOM;
  if (top < 0) scroll(panel, top);
  else if (top + panel.pitch > shown) scroll(panel, top + panel.pitch - shown);
}

/** Chooses the next span of the row, or the one at the same time of the next rank. */
function walk(along, across) {
  const panel = view.chosen ?? panels[0];
  if (!panel.chosen) {
    const track = panel.ranks[visibleRanks(panel)[0]].tracks[0];
    const at = [...track.start.keys()].find((i) => track.start[i] >= view.from) ?? 0;
    return pick(panel, track.first + at);
  }
  const { n } = panel.chosen;
  const track = trackOf(panel, n);
  if (along) {
    const at = indexOf(panel, n) + along;
    return at >= 0 && at < track.kind.length ? pick(panel, track.first + at) : undefined;
  }
  const rank = panel.ranks[track.at + across];
  const other = rank?.tracks.find((t) => t.row === track.row) ?? rank?.tracks[0];
  if (!other) return;
  const middle = (startOf(panel, n) + endOf(panel, n)) / 2;
  const away = (i) => Math.max(other.start[i] - middle, middle - other.end[i], 0);
  let best = 0;
  for (let i = 1; i < other.start.length; i++) if (away(i) < away(best)) best = i;
  pick(panel, other.first + best);
}

/** Fills the section below the panels. */
function explain() {
  const panel = view.chosen;
  const box = byId("chosen");
  if (!panel) {
    const hint = "Click an instruction, or press an arrow key, to see what it waits for and what waits for it.";
    return box.replaceChildren(make("p", hint, "hint"));
  }
  const { n, needs, waiters } = panel.chosen;
  const track = trackOf(panel, n);
  const about = make("div");
  const head = make("p", "", "head");
  const label = looks[kinds.op[kindOf(panel, n)]].label;
  head.append(swatch(PAINTS[track.paint[indexOf(panel, n)]]), make("b", kinds.name[kindOf(panel, n)]), label);
  about.append(head, details(facts(panel, track, indexOf(panel, n))));
  box.replaceChildren(about, list(panel, "Waits for", needs, true), list(panel, "Waits for it", waiters, false));
}

function details(lines) {
  const list = make("dl");
  for (const [term, value] of lines) list.append(make("dt", term), make("dd", value));
  return list;
}

function list(panel, title, leaves, forth) {
  const box = make("div");
  const rows = make("ul");
  const add = (leaf, depth) => {
    if (rows.childElementCount < MOST) rows.append(line(panel, leaf, depth, forth));
    for (const below of leaf.below) add(below, depth + 1);
  };
  for (const leaf of leaves) add(leaf, 0);
  if (!leaves.length) rows.append(make("li", forth ? "nothing: it is the first" : "nothing: it is the last", "hint"));
  box.append(make("h3", title), rows);
  return box;
}

function line(panel, { n, why, slack, bound }, depth, forth) {
  const item = make("li");
  const button = make("button", "", bound ? "bound" : "");
  button.style.marginLeft = `${depth * 16}px`;
  const [start, end, done] = [startOf(panel, n), endOf(panel, n), doneOf(panel, n, why)];
  const times = `${duration(start)} to ${duration(end)}${forth && done > end ? `, its pair to ${duration(done)}` : ""}`;
  const when = `rank ${panel.ranks[rankOf(panel, n)].rank}, ${times}`;
  const said = forth ? ["bound its start", "sooner"] : ["starts at once", "later"];
  const gap = bound ? said[0] : `${duration(slack)} ${said[1]}`;
  const name = make("b", kinds.name[kindOf(panel, n)]);
  button.append(swatch(PAINTS[trackOf(panel, n).paint[indexOf(panel, n)]]), name, make("span", when));
  button.append(make("em", gap));
  button.title = WHY[why];
  button.addEventListener("click", () => pick(panel, n));
  item.append(button);
  return item;
}
