// ---- layout ----

// Pixels: a panel's axis, the least below its rows, a rank's tallest compute row, the curve of what ranks keep.
const TOP = 24;
const BOTTOM = 8;
const TALL = 36;
const CURVE = 104;
const CHOSEN = 178; // what the section below the panels may take
let LEFT = 84; // the gutters of a panel
let RIGHT = 58;

const x = (panel, time) => LEFT + ((time - view.from) / (view.to - view.from)) * panel.plotWidth;
const timeAt = (panel, px) => view.from + ((px - LEFT) / panel.plotWidth) * (view.to - view.from);
const clamp = (value, low, high) => Math.min(Math.max(value, low), high);

/** How a rank's height is shared out: the rows under its compute row go first when it gets low. */
function divide(panel, rows, pitch) {
  const gap = clamp(Math.round(pitch * 0.14), 1, 8);
  const thin = Math.floor(((pitch - gap) * 0.5) / Math.max(rows.length, 1)) - 1;
  panel.rows = thin >= 2 ? rows : [];
  panel.thin = Math.min(thin, 9);
  panel.tall = Math.min(pitch - gap - panel.rows.length * (panel.thin + 1), TALL);
  panel.pitch = panel.tall + panel.rows.length * (panel.thin + 1) + gap;
  panel.content = panel.pitch * panel.ranks.length;
}

/** Heights of every panel. At slider 0 all ranks share the window, at 1 each is tall and the panels scroll inside. */
function arrange() {
  [LEFT, RIGHT] = innerWidth < 600 ? [46, 44] : [84, 70];
  const top = panels[0].plot.getBoundingClientRect().top + scrollY;
  const edges = TOP + BOTTOM;
  const curves = LINKED ? CURVE * panels.length : 0;
  const between = panels.reduce((sum, p) => sum + p.header.offsetHeight + 14, 0) - panels[0].header.offsetHeight;
  const below = LINKED && innerWidth >= 900 ? 44 + CHOSEN : 44;
  const room = Math.max(innerHeight - top - between - curves - below, 160 * panels.length);
  const total = panels.reduce((sum, p) => sum + p.ranks.length, 0);
  const low = Math.max(Math.floor((room - edges * panels.length) / total), 3);
  let grows = false;
  for (const panel of panels) {
    const present = new Set(panel.ranks.flatMap((r) => r.tracks.map((t) => t.row)));
    const rows = ROWS.filter((row) => row !== "compute" && present.has(row) && !hidden.has(row));
    const high = TALL + rows.length * 10 + 8;
    grows ||= low < 0.8 * high;
    divide(panel, rows, low < high ? low * (high / low) ** byId("height").value : high);
  }
  const wanted = panels.reduce((sum, p) => sum + p.content + edges, 0);
  for (const panel of panels) {
    const own = panel.content + edges;
    const share = Math.max(room / panels.length, room - (wanted - own));
    panel.height = Math.ceil(Math.min(own, share));
    panel.width = panel.plot.clientWidth;
    panel.plotWidth = Math.max(panel.width - LEFT - RIGHT, 50);
    // A finger moves the page where there is nothing to scroll inside the plot.
    panel.plot.style.touchAction = own > panel.height ? "none" : "pan-y";
    size(panel.canvas, panel.width, panel.height);
    if (panel.curve) size(panel.curve.canvas, panel.width, CURVE);
  }
  if (byId("heights").hidden === grows) {
    byId("heights").hidden = !grows;
    arrange(); // the toolbar may have taken or lost a line
    return;
  }
  panels.forEach((panel) => scroll(panel, 0));
  draw();
}

function size(canvas, width, height) {
  canvas.style.height = `${height}px`;
  canvas.width = Math.round(width * devicePixelRatio);
  canvas.height = Math.round(height * devicePixelRatio);
}

/** Moves the ranks shown; panels with the same number of ranks move together. Says whether anything moved. */
function scroll(panel, by) {
  const limit = (p) => Math.max(0, p.content - (p.height - TOP - BOTTOM));
  const wanted = clamp(panel.scroll + by, 0, limit(panel));
  const moved = wanted !== panel.scroll;
  for (const p of panels)
    if (p === panel || p.ranks.length === panel.ranks.length) p.scroll = clamp(wanted, 0, limit(p));
  return moved;
}

/** Top and height of a row, on the canvas, for the rank at an index. */
function place(panel, index, row) {
  const y = TOP + index * panel.pitch - panel.scroll;
  if (row === "compute") return [y, panel.tall];
  const at = panel.rows.indexOf(row);
  return at < 0 ? null : [y + panel.tall + 1 + at * (panel.thin + 1), panel.thin];
}

const visibleRanks = (panel) => [
  Math.max(0, Math.floor(panel.scroll / panel.pitch)),
  Math.min(panel.ranks.length, Math.ceil((panel.scroll + panel.height - TOP) / panel.pitch)),
];

/** Index of the first span that may reach beyond a time. */
function firstAt(track, time) {
  let low = 0;
  let high = track.start.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (track.start[middle] < time - track.longest) low = middle + 1;
    else high = middle;
  }
  return low;
}
