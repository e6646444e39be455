// ---- layout ----

// Pixels: a panel's time axis and bottom margin, the tallest compute row, the memory of a panel.
const TOP = 24;
const BOTTOM = 8;
const TALLEST = 36;
const CURVE = 104;
const SELECTION = 178; // most that the selection below the panels takes
let LEFT = 84; // from the edges of a panel to its bars
let RIGHT = 70;
const isNarrow = () => innerWidth < 600;

const x = (panel, time) => LEFT + ((time - view.from) / (view.to - view.from)) * panel.plotWidth;
const timeAt = (panel, px) => view.from + ((px - LEFT) / panel.plotWidth) * (view.to - view.from);
const clamp = (value, low, high) => Math.min(Math.max(value, low), high);

/** Divides the height of a rank: with too little of it, the rows below its compute row are not drawn. */
function divideRank(panel, rows, pitch) {
  const gap = clamp(Math.round(pitch * 0.14), 1, 8);
  const thin = Math.floor(((pitch - gap) * 0.5) / Math.max(rows.length, 1)) - 1;
  panel.rows = thin >= 2 ? rows : [];
  panel.thin = Math.min(thin, 9);
  panel.tall = Math.min(pitch - gap - panel.rows.length * (panel.thin + 1), TALLEST);
  panel.pitch = panel.tall + panel.rows.length * (panel.thin + 1) + gap;
  panel.content = panel.pitch * panel.ranks.length;
}

/** Sets the heights of all panels. With the slider at 0 all ranks fit the window; at 1 rows are tall and panels scroll. */
function arrange() {
  [LEFT, RIGHT] = isNarrow() ? [46, 52] : [84, 70];
  const top = panels[0].plot.getBoundingClientRect().top + scrollY;
  const edges = TOP + BOTTOM;
  const curves = CURVE * panels.filter((p) => p.memory).length;
  const headers = panels.reduce((sum, p) => sum + p.header.offsetHeight + 14, 0) - panels[0].header.offsetHeight;
  const below = innerWidth >= 900 ? 44 + SELECTION : 44;
  const room = Math.max(innerHeight - top - headers - curves - below, 160 * panels.length);
  const ranks = panels.reduce((sum, p) => sum + p.ranks.length, 0);
  const low = Math.max(Math.floor((room - edges * panels.length) / ranks), 3);
  let growable = false;
  for (const panel of panels) {
    const present = new Set(panel.tracks.map((track) => track.row));
    const rows = ROWS.filter((row) => row !== "compute" && present.has(row) && !hiddenRows.has(row));
    const high = TALLEST + rows.length * 10 + 8;
    growable ||= low < 0.8 * high;
    divideRank(panel, rows, low < high ? low * (high / low) ** byId("height").value : high);
  }
  const needed = panels.reduce((sum, p) => sum + p.content + edges, 0);
  for (const panel of panels) {
    const own = panel.content + edges;
    const share = Math.max(room / panels.length, room - (needed - own));
    panel.height = Math.ceil(Math.min(own, share));
    panel.width = panel.plot.clientWidth;
    panel.plotWidth = Math.max(panel.width - LEFT - RIGHT, 50);
    // A finger scrolls the page unless the panel itself scrolls.
    panel.plot.style.touchAction = own > panel.height ? "none" : "pan-y";
    resizeCanvas(panel.canvas, panel.width, panel.height);
    panel.curve.canvas.hidden = !panel.memory;
    resizeCanvas(panel.curve.canvas, panel.width, CURVE);
  }
  if (byId("heights").hidden === growable) {
    byId("heights").hidden = !growable;
    arrange(); // the toolbar's height may have changed
    return;
  }
  panels.forEach((panel) => scroll(panel, 0));
  draw();
}

/** Scrolls the ranks by pixels, in all panels with equally many ranks; returns whether anything moved. */
function scroll(panel, by) {
  const limit = (p) => Math.max(0, p.content - (p.height - TOP - BOTTOM));
  const target = clamp(panel.scroll + by, 0, limit(panel));
  const moved = target !== panel.scroll;
  for (const p of panels)
    if (p === panel || p.ranks.length === panel.ranks.length) p.scroll = clamp(target, 0, limit(p));
  return moved;
}

/** [top, height] on the canvas of a row of the rank at an index, or null if it is not drawn. */
function rowPlace(panel, index, row) {
  const y = TOP + index * panel.pitch - panel.scroll;
  if (row === "compute") return [y, panel.tall];
  const at = panel.rows.indexOf(row);
  return at < 0 ? null : [y + panel.tall + 1 + at * (panel.thin + 1), panel.thin];
}

/** [top, height] of a span within its row's: overlapping spans share the height. */
function levelPlace(panel, n, [y, height]) {
  const tall = height / panel.depth[n];
  return [y + tall * panel.level[n], tall];
}

/** [left, top, width, height] on the canvas of a span, or null if its row is not drawn. */
function barOf(panel, n) {
  const place = rowPlace(panel, rankOf(panel, n), panel.track[n].row);
  if (!place) return null;
  const [top, tall] = levelPlace(panel, n, place);
  const left = x(panel, panel.start[n]);
  return [left, top, x(panel, panel.end[n]) - left, tall];
}

/** Indices of the ranks in view. */
function visibleRanks({ scroll, pitch, height, ranks }) {
  const first = Math.max(0, Math.floor(scroll / pitch));
  return [...ranks.keys()].slice(first, Math.ceil((scroll + height - TOP) / pitch));
}

/** The first of the numbers from `low` up to `high` for which `isBefore` does not hold, else `high`. */
function bisect(low, high, isBefore) {
  while (low < high) {
    const middle = (low + high) >> 1;
    if (isBefore(middle)) low = middle + 1;
    else high = middle;
  }
  return low;
}

