// ---- the selected instruction and what is highlighted ----

const WHY = { data: "its result", transfer: "what it transfers", slot: "its receive buffer", order: "order on the lane" };
const MOST_LINES = 200; // of a list

/** Selects a span and lists its dependencies and dependents; n = -1 selects none. */
function select(panel, n) {
  for (const p of panels) {
    const isSelected = p === panel && n >= 0;
    p.selected = isSelected
      ? { n, dependencies: dependencyTree(p, n, true), dependents: dependencyTree(p, n, false) }
      : null;
    updateHighlights(p);
  }
  view.selected = panels.find((p) => p.selected) ?? null;
  if (view.selected) reveal(panel, n);
  if (isNarrow()) byId("tip").hidden = true;
  showSelection();
  draw();
}

/** Highlights the selected span with its neighbours, the critical path if it is shown, and what a search matches. */
function updateHighlights(panel) {
  const { selected, critical, matches } = panel;
  const showsPath = IS_SCHEDULE && byId("critical").checked;
  panel.highlighted = selected || showsPath || matches ? new Uint8Array(panel.count) : null;
  if (matches) panel.highlighted.set(matches);
  if (showsPath) for (const n of critical.number) panel.highlighted[n] = 1;
  if (!selected) return;
  const mark = (n) => eventOf(panel, n).forEach((m) => (panel.highlighted[m] = 1));
  const markAll = (nodes) =>
    nodes.forEach(({ n, children }) => {
      mark(n);
      markAll(children);
    });
  mark(selected.n);
  markAll(selected.dependencies);
  markAll(selected.dependents);
}

/** Shows the row of a span and moves the view to it. */
function reveal(panel, n) {
  if (hiddenRows.has(trackOf(panel, n).row)) toggleRow(trackOf(panel, n).row, true);
  const [start, end, width] = [startOf(panel, n), endOf(panel, n), view.to - view.from];
  if (start < view.from || end > view.to) show((start + end - width) / 2, (start + end + width) / 2);
  const top = rankOf(panel, n) * panel.pitch - panel.scroll;
  const shown = panel.height - TOP - BOTTOM;
  if (top < 0) scroll(panel, top);
  else if (top + panel.pitch > shown) scroll(panel, top + panel.pitch - shown);
}

/** Selects the span `along` steps further in its row, or the one at the same time `across` ranks below. */
function walk(along, across) {
  const panel = view.selected ?? panels[0];
  if (!panel.selected) {
    const track = panel.ranks[visibleRanks(panel)[0]].tracks[0];
    const at = [...track.start.keys()].find((i) => track.start[i] >= view.from) ?? 0;
    return select(panel, track.first + at);
  }
  const { n } = panel.selected;
  const track = trackOf(panel, n);
  if (along) {
    const at = indexOf(panel, n) + along;
    return at >= 0 && at < track.kind.length ? select(panel, track.first + at) : undefined;
  }
  const rank = panel.ranks[track.rankIndex + across];
  const other = rank?.tracks.find((t) => t.row === track.row) ?? rank?.tracks[0];
  if (!other) return;
  const middle = (startOf(panel, n) + endOf(panel, n)) / 2;
  const distance = (i) => Math.max(other.start[i] - middle, middle - other.end[i], 0);
  let best = 0;
  for (let i = 1; i < other.start.length; i++) if (distance(i) < distance(best)) best = i;
  select(panel, other.first + best);
}

/** Fills the section below the panels. */
function showSelection() {
  const panel = view.selected;
  const box = byId("selection");
  box.classList.toggle("empty", !panel);
  if (!panel) {
    const hint = "Click an instruction, or press an arrow key, to see what it waits for and what waits for it.";
    return box.replaceChildren(make("p", hint, "hint"));
  }
  const { n, dependencies, dependents } = panel.selected;
  const track = trackOf(panel, n);
  const about = make("div");
  about.append(spanTitle(track, indexOf(panel, n)), factList(factsOf(panel, track, indexOf(panel, n))));
  const before = dependencyList(panel, "Waits for", dependencies, true);
  box.replaceChildren(about, before, dependencyList(panel, "Needed by", dependents, false));
}

function spanTitle(track, i) {
  const kind = track.kind[i];
  const title = make("p");
  title.append(swatch(FILLS[track.fill[i]]), make("b", kinds.name[kind]), make("span", looks[kinds.op[kind]].label));
  return title;
}

function factList(lines) {
  const list = make("dl");
  for (const [term, value] of lines) list.append(make("dt", term), make("dd", value));
  return list;
}

function dependencyList(panel, title, nodes, upstream) {
  const box = make("div");
  const rows = make("ul");
  const add = (node, depth) => {
    if (rows.childElementCount < MOST_LINES) rows.append(dependencyLine(panel, node, depth, upstream));
    for (const child of node.children) add(child, depth + 1);
  };
  for (const node of nodes) add(node, 0);
  if (!nodes.length) rows.append(make("li", upstream ? "nothing: it is the first" : "nothing: it is the last", "hint"));
  box.append(make("h3", title), rows);
  return box;
}

function dependencyLine(panel, { n, why, slack, binding }, depth, upstream) {
  const button = make("button", "", binding ? "binding" : "");
  button.style.marginLeft = `${depth * 16}px`;
  const [start, end, done] = [startOf(panel, n), endOf(panel, n), doneAt(panel, n, why)];
  const pair = upstream && done > end ? `, its pair to ${duration(done)}` : "";
  const when = `rank ${panel.ranks[rankOf(panel, n)].rank}, ${duration(start)} to ${duration(end)}${pair}`;
  const [ifBinding, otherwise] = upstream ? ["set its start", "earlier"] : ["starts at once", "later"];
  button.append(swatch(FILLS[trackOf(panel, n).fill[indexOf(panel, n)]]), make("b", kinds.name[kindOf(panel, n)]));
  button.append(make("span", when), make("em", binding ? ifBinding : `${duration(slack)} ${otherwise}`));
  button.title = WHY[why];
  button.addEventListener("click", () => select(panel, n));
  const item = make("li");
  item.append(button);
  return item;
}

