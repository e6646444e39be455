// ---- layout ----

const x = (panel, time) => LEFT + (time - view.from) / (view.to - view.from) * panel.plotWidth;
const timeAt = (panel, px) => view.from + (px - LEFT) / panel.plotWidth * (view.to - view.from);
const clamp = (value, low, high) => Math.min(Math.max(value, low), high);

/** How a rank's height is shared out: the rows under its compute row go first when it gets low. */
function divide(panel, rows, pitch) {
  const gap = clamp(Math.round(pitch * 0.14), 1, 8), thin = Math.floor((pitch - gap) * 0.45 / Math.max(rows.length, 1)) - 1;
  panel.rows = thin >= 2 ? rows : [];
  panel.thin = Math.min(thin, 9);
  panel.tall = Math.min(pitch - gap - panel.rows.length * (panel.thin + 1), TALL);
  panel.pitch = panel.tall + panel.rows.length * (panel.thin + 1) + gap;
  panel.content = panel.pitch * panel.ranks.length;
}

/** Heights of every panel. At slider 0 all ranks share the window, at 1 each is tall and the panels scroll inside. */
function arrange() {
  const top = panels[0].plot.getBoundingClientRect().top + scrollY, edges = TOP + BOTTOM;
  const between = panels.reduce((sum, p) => sum + p.header.offsetHeight + 14, 0) - panels[0].header.offsetHeight;
  const room = Math.max(innerHeight - top - between - 44, 160 * panels.length);
  const total = panels.reduce((sum, p) => sum + p.ranks.length, 0);
  const low = Math.max(Math.floor((room - edges * panels.length) / total), 3);
  let grows = false;
  for (const panel of panels) {
    const present = new Set(panel.ranks.flatMap((r) => r.tracks.map((t) => t.row)));
    const rows = ROWS.filter((row) => row !== "compute" && present.has(row) && !hidden.has(row));
    const high = TALL + rows.length * 10 + 8;
    grows ||= low < high;
    divide(panel, rows, low < high ? low * (high / low) ** byId("height").value : high);
    const share = Math.max(room * panel.ranks.length / total, Math.min(room / panels.length, panel.content + edges));
    panel.height = Math.ceil(Math.min(panel.content + edges, Math.max(share, 120)));
    panel.width = panel.plot.clientWidth;
    panel.plotWidth = Math.max(panel.width - LEFT - RIGHT, 50);
    panel.canvas.style.height = `${panel.height}px`;
    panel.canvas.width = Math.round(panel.width * devicePixelRatio);
    panel.canvas.height = Math.round(panel.height * devicePixelRatio);
  }
  byId("heights").hidden = !grows;
  panels.forEach((panel) => scroll(panel, 0));
  draw();
}

/** Moves the ranks shown; panels with the same number of ranks move together. Says whether anything moved. */
function scroll(panel, by) {
  const limit = (p) => Math.max(0, p.content - (p.height - TOP - BOTTOM));
  const wanted = clamp(panel.scroll + by, 0, limit(panel)), moved = wanted !== panel.scroll;
  for (const p of panels) if (p === panel || p.ranks.length === panel.ranks.length) p.scroll = clamp(wanted, 0, limit(p));
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
  let low = 0, high = track.start.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (track.start[middle] < time - track.longest) low = middle + 1; else high = middle;
  }
  return low;
}

// ---- drawing ----

let frame = 0;
function draw() {
  frame ||= requestAnimationFrame(() => { frame = 0; panels.forEach(paint); });
}

function readTheme() {
  const style = getComputedStyle(document.documentElement);
  theme = Object.fromEntries(["card", "text", "soft", "idle", "grid", "cross"].map((n) => [n, style.getPropertyValue(`--${n}`).trim()]));
  theme.font = getComputedStyle(document.body).fontFamily;
  theme.fill = OPS.map(fill);
  theme.ink = OPS.map(ink);
  legend();
}

function paint(panel) {
  const context = panel.context, [first, last] = visibleRanks(panel);
  context.setTransform(devicePixelRatio, 0, 0, devicePixelRatio, 0, 0);
  context.fillStyle = theme.card;
  context.fillRect(0, 0, panel.width, panel.height);
  context.textBaseline = "middle";
  clipped(panel, 0, panel.width, () => { for (let i = first; i < last; i++) paintGutter(panel, i); });
  clipped(panel, LEFT, panel.plotWidth, () => {
    for (let i = first; i < last; i++) paintIdle(panel, i);
    paintGrid(panel);
    panel.outlines = [];
    for (let i = first; i < last; i++) {
      for (const track of panel.ranks[i].tracks) {
        const at = place(panel, i, track.row);
        if (at) paintTrack(panel, panel.ranks[i], track, ...at);
      }
    }
    paintOutlines(panel);
  });
  paintAxis(panel);
  paintScrollbar(panel);
}

function clipped(panel, left, width, body) {
  panel.context.save();
  panel.context.beginPath();
  panel.context.rect(left, TOP - 3, width, panel.height - TOP - 1);
  panel.context.clip();
  body();
  panel.context.restore();
}

function text(panel, value, px, y, align, size, colour, weight = 400) {
  const context = panel.context;
  context.font = `${weight} ${size}px ${theme.font}`;
  context.textAlign = align;
  context.fillStyle = colour;
  context.fillText(value, px, y);
}

function paintGutter(panel, index) {
  if (index % Math.ceil(14 / panel.pitch)) return;
  const { rank, busy } = panel.ranks[index], [y, tall] = place(panel, index, "compute"), middle = y + tall / 2 + 0.5;
  text(panel, `rank ${rank}`, LEFT - 10, middle, "right", 12, theme.text, 600);
  if (busy !== null) text(panel, `${(100 * busy).toFixed(0)} %`, panel.width - 14, middle, "right", 12, theme.soft);
  for (const row of panel.thin < 8 ? [] : panel.rows) {
    const [top, thin] = place(panel, index, row);
    text(panel, row, LEFT - 10, top + thin / 2 + 0.5, "right", 9.5, theme.soft);
  }
}

function paintIdle(panel, index) {
  panel.context.fillStyle = theme.idle;
  for (const row of ["compute", ...panel.rows]) {
    const [y, height] = place(panel, index, row);
    panel.context.fillRect(LEFT, y, panel.plotWidth, height);
  }
}

function ticks(panel) {
  const least = (view.to - view.from) * 90 / panel.plotWidth, power = 10 ** Math.floor(Math.log10(least));
  const gap = [1, 2, 5, 10].find((n) => n * power >= least) * power;
  const found = [];
  for (let n = Math.ceil(view.from / gap); n * gap <= view.to; n++) found.push(n * gap);
  return [found, gap];
}

function paintGrid(panel) {
  panel.context.fillStyle = theme.grid;
  for (const time of ticks(panel)[0]) panel.context.fillRect(Math.round(x(panel, time)), TOP - 3, 1, panel.height);
}

function paintAxis(panel) {
  const [times, gap] = ticks(panel), [size, unit] = unitOf(Math.max(view.last, -view.first));
  const decimals = clamp(Math.ceil(Math.log10(size / gap) - 1e-9), 0, 9);
  const cross = view.cross === null || view.cross < view.from || view.cross > view.to ? null : x(panel, view.cross);
  for (const time of times) {
    const px = x(panel, time);
    if (cross !== null && Math.abs(px - cross) < 70) continue;
    text(panel, `${(time / size).toFixed(decimals)} ${unit}`, px, TOP / 2 - 1, "center", 11, theme.soft);
  }
  text(panel, "busy", panel.width - 14, TOP / 2 - 1, "right", 11, theme.soft);
  if (cross === null) return;
  text(panel, `${(view.cross / size).toFixed(decimals + 2)} ${unit}`, cross, TOP / 2 - 1, "center", 11, theme.text, 600);
  panel.context.globalAlpha = 0.45;
  panel.context.fillStyle = theme.cross;
  panel.context.fillRect(Math.round(cross), TOP - 3, 1, panel.height - TOP - 1);
  panel.context.globalAlpha = 1;
}

function paintScrollbar(panel) {
  const shown = panel.height - TOP - BOTTOM;
  if (panel.content <= shown) return;
  panel.context.fillStyle = theme.soft;
  panel.context.globalAlpha = 0.5;
  panel.context.fillRect(panel.width - 6, TOP + panel.scroll / panel.content * shown, 3, Math.max(shown * shown / panel.content, 16));
  panel.context.globalAlpha = 1;
}

function paintTrack(panel, rank, track, y, height) {
  const cells = cellPainter(panel.context, y, height);
  const written = track.row === "compute" && height >= 12;
  for (let i = firstAt(track, view.from); i < track.start.length && track.start[i] <= view.to; i++) {
    if (track.end[i] < view.from) continue;
    const kind = track.kind[i], left = x(panel, track.start[i]), right = x(panel, track.end[i]);
    const lit = view.lit === null || view.lit[kind] === 1;
    const same = view.same !== null && view.same[kind] === 1;
    if (right - left < 1.5) {
      cells.add(left, right - left, OP[kind], lit);
      if (same) panel.outlines.push([left, y, right - left, height]);
      continue;
    }
    const depth = track.depth ? track.depth[i] : 1, tall = height / depth, top = y + tall * (track.level ? track.level[i] : 0);
    const bar = paintBar(panel, kind, left, right, top, tall - (depth > 1 ? 0.5 : 0), lit, rank.pale.has(kinds.stage[kind]));
    if (written && tall >= 9) paintLabel(panel, kind, bar, lit, rank.pale.has(kinds.stage[kind]));
    if (same) panel.outlines.push(bar);
  }
  cells.flush();
}

const crisp = (px) => Math.round(px * devicePixelRatio) / devicePixelRatio;

function paintBar(panel, kind, left, right, top, tall, lit, pale) {
  const context = panel.context, from = crisp(Math.max(left, LEFT - 8)), to = crisp(Math.min(right, LEFT + panel.plotWidth + 8));
  const width = Math.max(to - from - (right - left > 4 ? 1 : 0), 0.5);
  context.fillStyle = theme.fill[OP[kind]];
  context.globalAlpha = (lit ? 1 : DIM) * (pale ? 0.55 : 1);
  if (width > 8 && tall > 8) {
    context.beginPath();
    context.roundRect(from, top, width, tall, 2.5);
    context.fill();
  } else context.fillRect(from, top, width, tall);
  context.globalAlpha = 1;
  return [from, top, width, tall];
}

function paintLabel(panel, kind, [left, top, width, tall], lit, pale) {
  const microbatch = kinds.microbatch[kind], size = Math.min(12, tall - 2);
  const label = microbatch < 0 ? kinds.op[kind].toLowerCase() : String(microbatch);
  if (width < label.length * size * 0.6 + 2) return;
  panel.context.globalAlpha = lit ? 1 : 0.45;
  text(panel, label, left + width / 2, top + tall / 2 + 0.5, "center", size, pale || !lit ? theme.text : theme.ink[OP[kind]], 600);
  panel.context.globalAlpha = 1;
}

/** Draws what is narrower than a pixel: each pixel column takes its commonest op, as opaque as it is full. */
function cellPainter(context, y, height) {
  const cover = new Float64Array(OPS.length);
  let column = null, total = 0, lit = 0, run = null;
  const paintRun = () => {
    if (!run) return;
    context.globalAlpha = run.alpha;
    context.fillStyle = theme.fill[run.op];
    context.fillRect(run.from, y, run.to - run.from, height);
    context.globalAlpha = 1;
    run = null;
  };
  const close = () => {
    if (column === null) return;
    const op = cover.indexOf(Math.max(...cover)), alpha = Math.max(1, Math.ceil(Math.min(total, 1) * 6)) / 6 * (lit > 0 ? 1 : DIM);
    if (run && run.to === column && run.op === op && run.alpha === alpha) run.to++;
    else { paintRun(); run = { from: column, to: column + 1, op, alpha }; }
    cover.fill(0);
    total = lit = 0;
  };
  const add = (left, width, op, isLit) => {
    const wanted = Math.floor(left), amount = Math.max(width, 0.02);
    if (wanted !== column) { close(); column = wanted; }
    cover[op] += amount;
    total += amount;
    if (isLit) lit += amount;
  };
  return { add, flush: () => { close(); paintRun(); } };
}

function paintOutlines(panel) {
  panel.context.strokeStyle = theme.text;
  panel.context.lineWidth = 1.5;
  for (const [left, top, width, tall] of panel.outlines) {
    panel.context.strokeRect(left - 0.25, top - 0.25, Math.max(width, 2) + 0.5, tall + 0.5);
  }
}
