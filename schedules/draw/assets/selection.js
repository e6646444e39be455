// ---- the selected instruction and what is highlighted ----

const WHY = { data: "its result", transfer: "what it transfers", slot: "its receive buffer", order: "order on the lane" };
const MOST_LINES = 200; // of a list

/** Selects a span and lists its dependencies and dependents; n = -1 selects none. */
function select(panel, n) {
  for (const p of panels) {
    const isSelected = p === panel && n >= 0;
    const tree = (upstream) => (p.program ? dependencyTree(p, n, upstream) : []);
    p.selected = isSelected ? { n, dependencies: tree(true), dependents: tree(false) } : null;
    updateHighlights(p);
  }
  view.selected = panels.find((p) => p.selected) ?? null;
  if (view.selected) reveal(panel, n);
  if (isNarrow()) byId("tip").hidden = true;
  showSelection();
  if (view.selected) uncover(panel, n);
  draw();
}

/** Scrolls the page so that the selected span lies in the window, above the section that describes it. */
function uncover(panel, n) {
  const [, top, , tall] = barOf(panel, n) ?? [0, 0, 0, 0];
  const above = panel.canvas.getBoundingClientRect().top + top - 12;
  const covered = above + tall + 24 - byId("selection").getBoundingClientRect().top;
  if (covered > 0) scrollBy(0, covered);
  else if (above < 0) scrollBy(0, above);
}

/** Highlights the selected span with its neighbours, the critical path if it is shown, and what a search matches. */
function updateHighlights(panel) {
  const { selected, critical, matches } = panel;
  const showsPath = critical !== null && byId("critical").checked;
  panel.highlighted = selected || showsPath || matches ? new Uint8Array(panel.count) : null;
  if (matches) panel.highlighted.set(matches);
  if (showsPath) for (const { n } of critical) panel.highlighted[n] = 1;
  const mark = ({ n, children }) => {
    for (const m of eventOf(panel, n)) panel.highlighted[m] = 1;
    children.forEach(mark);
  };
  if (selected) mark({ n: selected.n, children: [...selected.dependencies, ...selected.dependents] });
}

/** Shows the row of a span and moves the view to it. */
function reveal(panel, n) {
  const { row } = panel.track[n];
  if (hiddenRows.has(row)) toggleRow(row, true);
  const [middle, width] = [middleOf(panel, n), view.to - view.from];
  if (panel.start[n] < view.from || panel.end[n] > view.to) show(middle - width / 2, middle + width / 2);
  const top = rankOf(panel, n) * panel.pitch - panel.scroll;
  const shown = panel.height - TOP - BOTTOM;
  if (top < 0) scroll(panel, top);
  else if (top + panel.pitch > shown) scroll(panel, top + panel.pitch - shown);
}

/** Selects the span `along` steps further in its row, or the one at the same time `across` ranks below. */
function walk(along, across) {
  const panel = view.selected ?? panels[0];
  if (!panel.selected) {
    const { first, end } = panel.ranks[visibleRanks(panel)[0]].tracks[0];
    const n = bisect(first, end, (m) => panel.start[m] < view.from);
    return select(panel, n < end ? n : first);
  }
  const { n } = panel.selected;
  const track = panel.track[n];
  if (along) {
    if (panel.track[n + along] === track) select(panel, n + along);
    return;
  }
  const rank = panel.ranks[track.rankIndex + across];
  const other = rank?.tracks.find((t) => t.row === track.row) ?? rank?.tracks[0];
  if (!other) return;
  const middle = middleOf(panel, n);
  const distance = (m) => Math.max(panel.start[m] - middle, middle - panel.end[m], 0);
  let best = other.first;
  for (let m = best + 1; m < other.end; m++) if (distance(m) < distance(best)) best = m;
  select(panel, best);
}

/** Fills the section below the panels. */
function showSelection() {
  const panel = view.selected;
  const box = byId("selection");
  box.classList.toggle("empty", !panel);
  if (!panel) {
    const hint = "Click an instruction, or press an arrow key, to see what it waits for and what waits for it.";
    const unknown = panels.filter((p) => !p.program).map(noProgram);
    return box.replaceChildren(...(unknown.length < panels.length ? [make("p", hint, "hint")] : []), ...unknown);
  }
  const { n, dependencies, dependents } = panel.selected;
  const about = make("div");
  about.append(spanTitle(panel, n), factList(factsOf(panel, n)));
  if (!panel.program) return box.replaceChildren(about, noProgram(panel));
  const before = dependencyList(panel, "Waits for", dependencies, true);
  box.replaceChildren(about, ...messageSection(panel, n), before, dependencyList(panel, "Needed by", dependents, false));
}

function noProgram({ step, data }) {
  const what = `${data.source} step ${step.step} ran a program that this page does not have`;
  return make("p", `What instructions waited for is not known: the ${what}.`, "hint");
}

function spanTitle(panel, n) {
  const title = make("p");
  const { label } = looks[kinds.op[panel.kind[n]]];
  title.append(swatch(FILLS[panel.fill[n]]), make("b", nameOf(panel, n)), make("span", label));
  const isCritical = panel.critical?.some((piece) => piece.n === n && piece.part !== "host" && piece.end > piece.start);
  if (isCritical) title.append(make("em", "on the critical path"));
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

function slackOf({ slack, binding }, upstream) {
  const [ifBinding, otherwise] = upstream ? ["set its start", "earlier"] : ["starts at once", "later"];
  return binding ? ifBinding : `${duration(slack)} ${otherwise}`;
}

/** By the times that were measured: how long before the last of them, or what passed after it. */
function waited({ slack, binding, took }) {
  if (!binding) return `${duration(slack)} before the last`;
  if (!slack) return "last";
  return slack < 0 ? `last, ${duration(-slack)} after the start` : `last, then ${duration(slack)} ${took}`;
}

function dependencyLine(panel, node, depth, upstream) {
  const { n, why, binding } = node;
  const button = make("button", "", binding ? "binding" : "");
  button.style.marginLeft = `${depth * 16}px`;
  const [start, end, done] = [panel.start[n], panel.end[n], doneAt(panel, n, why)];
  const pair = upstream && done > end ? `, its pair to ${duration(done)}` : "";
  const times = isMeasured(panel) ? `to ${duration(done)}` : `${duration(start)} to ${duration(end)}${pair}`;
  const when = `rank ${panel.ranks[rankOf(panel, n)].rank}, ${times}`;
  button.append(swatch(FILLS[panel.fill[n]]), make("b", nameOf(panel, n)));
  button.append(make("span", when), make("em", isMeasured(panel) ? waited(node) : slackOf(node, upstream)));
  button.title = WHY[why];
  button.addEventListener("click", () => select(panel, n));
  const item = make("li");
  item.append(button);
  return item;
}

