// ---- painting panels ----

const VEIL = 0.8; // opacity of what covers the spans that are not highlighted
const THIN = 2.5; // device pixels: spans narrower than this are mixed, for their rounded edges would show false bands
const MIXED = 4; // pixels to either side over which the colours of narrow spans are averaged
const MOST_OUTLINES = 2000;
const GUTTER = 12; // pixels to the right of the labels
const mixedRows = make("canvas").getContext("2d");

function paint(panel) {
  if (!panel.canvas.width) return; // a window without width
  if (panel.stale) paintBase(panel);
  const { context, width, height } = panel;
  const { hover } = view;
  scale(context);
  context.drawImage(panel.base.canvas, 0, 0, width, height);
  clipped(context, LEFT, TOP - 3, panel.plotWidth, height - TOP - 1, () => {
    if (hover && !panel.highlighted) {
      const isSame = (n) => hover.sameKind[panel.kind[n]];
      const bars = paintHighlighted(context, panel, (n) => hover.related[panel.kind[n]], isSame);
      paintOutlines(context, bars, theme.text, 1.5);
    } else if (hover?.panel === panel) {
      paintOutlines(context, [barOf(panel, hover.n)], theme.text, 1.5);
    }
  });
  paintAxis(context, panel);
}

/** Paints everything but the axis and the hover into the panel's stored picture. */
function paintBase(panel) {
  const { base, height } = panel;
  const ranks = visibleRanks(panel);
  clearBase(panel);
  clipped(base, 0, TOP - 7, panel.width, height - TOP + 3, () => {
    for (const index of ranks) paintRankLabels(base, panel, index);
  });
  clipped(base, LEFT, TOP - 3, panel.plotWidth, height - TOP - 1, () => {
    for (const index of ranks) paintIdle(base, panel, index, 1);
    for (const time of ticks(panel)[0]) box(base, theme.grid, Math.round(x(panel, time)), TOP - 3, 1, height);
    paintTracks(base, panel);
    if (!panel.highlighted) return;
    const isMatch = (n) => panel.matches?.[n];
    const bars = paintHighlighted(base, panel, (n) => panel.highlighted[n], isMatch);
    paintOutlines(base, bars, theme.accent, 1.5);
    paintArrows(base, panel);
    const match = search.matches[search.index];
    if (match?.panel === panel) paintOutlines(base, [barOf(panel, match.n)], theme.text, 3);
  });
  paintScrollbar(base, panel);
  panel.stale = false;
}

// ---- around the bars ----

const stamp = (value, decimals, unit) => `${value.toFixed(decimals)}${unit && ` ${unit}`}`;
const cursorX = (panel) =>
  view.cursor === null || view.cursor < view.from || view.cursor > view.to ? null : x(panel, view.cursor);

function paintRankLabels(context, panel, index) {
  if (index % Math.ceil(14 / panel.pitch)) return;
  const { rank, busy } = panel.ranks[index];
  const [y, tall] = rowPlace(panel, index, "compute");
  const middle = y + tall / 2 + 0.5;
  text(context, isNarrow() ? `${rank}` : `rank ${rank}`, LEFT - 10, middle, "right", 12, theme.text, 600);
  if (busy !== null) text(context, `${(100 * busy).toFixed(0)} %`, panel.width - GUTTER, middle, "right", 12, theme.soft);
  for (const row of panel.thin < 8 ? [] : panel.rows) {
    const [top, thin] = rowPlace(panel, index, row);
    text(context, row, LEFT - 10, top + thin / 2 + 0.5, "right", 9, theme.soft);
  }
}

function paintIdle(context, panel, index, alpha) {
  for (const row of ["compute", ...panel.rows]) {
    const [y, height] = rowPlace(panel, index, row);
    box(context, theme.idle, LEFT, y, panel.plotWidth, height, alpha);
  }
}

/** [times of the ticks, time between them], at least 90 pixels apart. */
function ticks(panel) {
  const least = ((view.to - view.from) * 90) / panel.plotWidth;
  const power = 10 ** Math.floor(Math.log10(least));
  const gap = [1, 2, 5, 10].find((n) => n * power >= least) * power;
  const found = [];
  for (let n = Math.ceil(view.from / gap); n * gap <= view.to; n++) found.push(n * gap);
  return [found, gap];
}

function paintAxis(context, panel) {
  const [times, gap] = ticks(panel);
  const [size, unit] = DATA.unit ? unitOf(Math.max(view.last, -view.first)) : [1e9, ""];
  const decimals = clamp(Math.ceil(Math.log10(size / gap) - 1e-9), 0, 9);
  const y = TOP / 2 - 1;
  text(context, "busy", panel.width - GUTTER, y, "right", 11, theme.soft);
  const end = panel.width - GUTTER - context.measureText("busy").width - 6;
  const cursor = cursorX(panel);
  for (const time of times) {
    const px = x(panel, time);
    const label = stamp(time / size, decimals, unit);
    if (cursor !== null && Math.abs(px - cursor) < 70) continue;
    if (px + context.measureText(label).width / 2 < end) text(context, label, px, y, "center", 11, theme.soft);
  }
  if (cursor === null) return;
  const label = stamp(view.cursor / size, decimals + 2, unit);
  context.font = `600 11px ${theme.font}`;
  const half = context.measureText(label).width / 2;
  text(context, label, clamp(cursor, half + 4, end - half), y, "center", 11, theme.text, 600);
  box(context, theme.text, Math.round(cursor), TOP - 3, 1, panel.height - TOP - 1, 0.45);
}

function paintScrollbar(context, panel) {
  const shown = panel.height - TOP - BOTTOM;
  if (panel.content <= shown) return;
  const top = TOP + (panel.scroll / panel.content) * shown;
  box(context, theme.soft, panel.width - 6, top, 3, Math.max((shown * shown) / panel.content, 16), 0.5);
}

// ---- bars ----

/** Calls `visit` for each span of a track that is in view. */
function inView(panel, track, visit) {
  const first = bisect(track.first, track.end, (n) => panel.start[n] < view.from - track.longest);
  for (let n = first; n < track.end && panel.start[n] <= view.to; n++) if (panel.end[n] >= view.from) visit(n);
}

/** Veils the panel and repaints the spans for which `only` holds; returns the bars of those for which `outlined` does. */
function paintHighlighted(context, panel, only, outlined) {
  for (const index of visibleRanks(panel)) paintIdle(context, panel, index, VEIL);
  return paintTracks(context, panel, only, outlined);
}

/** Paints the spans in view, or only those for which `only` holds; returns the bars for which `outlined` holds. */
function paintTracks(context, panel, only, outlined) {
  const columns = Math.ceil(panel.plotWidth * devicePixelRatio);
  const cover = FILLS.map(() => new Float64Array(columns)); // share of each pixel column, by fill
  const bars = [];
  const lines = [];
  if (!only) panel.hasMixed = false;
  for (const track of visibleRanks(panel).flatMap((index) => panel.ranks[index].tracks)) {
    const place = rowPlace(panel, track.rankIndex, track.row);
    if (!place) continue;
    if (paintTrack(context, panel, track, place, only, cover)) lines.push([place, mix(cover)]);
    if (outlined)
      inView(panel, track, (n) => bars.length < MOST_OUTLINES && outlined(n) && bars.push(barOf(panel, n)));
  }
  if (!lines.length) return bars;
  Object.assign(mixedRows.canvas, { width: columns, height: lines.length });
  lines.forEach(([, pixels], row) => mixedRows.putImageData(new ImageData(pixels, columns, 1), 0, row));
  context.imageSmoothingEnabled = false;
  lines.forEach(([[y, height]], row) =>
    context.drawImage(mixedRows.canvas, 0, row, columns, 1, LEFT, y, columns / devicePixelRatio, height),
  );
  return bars;
}

/** Paints the bars of a track and adds its narrow spans to `cover`; returns whether there are any. */
function paintTrack(context, panel, track, place, only, cover) {
  const hasLabels = track.row === "compute" && place[1] >= 11;
  const fullNames = x(panel, panel.usualLength) - x(panel, 0) > 42; // room for more than the microbatch
  const mixed = new Set();
  let found = false;
  inView(panel, track, (n) => {
    if (only && !only(n)) return;
    const [left, right] = [x(panel, panel.start[n]), x(panel, panel.end[n])];
    const fill = panel.fill[n];
    if (right - left < THIN / devicePixelRatio) {
      if (!found) for (const columns of cover) columns.fill(0);
      found = true;
      addCover(cover[fill], (left - LEFT) * devicePixelRatio, (right - LEFT) * devicePixelRatio);
      if (right > left) mixed.add(fill);
      return;
    }
    const [top, tall] = levelPlace(panel, n, place);
    const gap = panel.depth[n] > 1 ? 0.5 : 0;
    const bar = paintBar(context, panel, theme.fill[fill], left, right, top, tall - gap);
    paintMessages(context, panel, n, bar);
    if (hasLabels && tall >= 9) paintLabel(context, panel, labelOf(panel.kind[n], fullNames), theme.textOn[fill], bar);
  });
  panel.hasMixed ||= mixed.size > 1;
  return found;
}

/** Adds the share of each pixel column that a span fills, and a trace of it if it has no length. */
function addCover(columns, left, right) {
  for (let c = Math.max(Math.floor(left), 0); c <= right && c < columns.length; c++) {
    columns[c] += Math.max(Math.min(right, c + 1) - Math.max(left, c), 0.01);
  }
}

/** RGBA of a row of narrow spans: every pixel column has the mean colour of the spans around it, and is as opaque as
 *  it is full. The mean is over linear light and over more than a pixel: no bands that are not in the timeline. */
function mix(cover) {
  const columns = cover[0].length;
  const reach = Math.round(MIXED * devicePixelRatio);
  const pixels = new Uint8ClampedArray(4 * columns);
  const used = cover.map((_, fill) => fill).filter((fill) => cover[fill].some((share) => share > 0));
  const near = new Float64Array(used.length); // of each fill within reach
  for (let c = -reach; c < columns; c++) {
    used.forEach((fill, k) => (near[k] += (cover[fill][c + reach] ?? 0) - (cover[fill][c - reach - 1] ?? 0)));
    if (c < 0) continue;
    const full = used.reduce((sum, fill) => sum + cover[fill][c], 0);
    if (full <= 0) continue;
    const total = near.reduce((sum, share) => sum + Math.max(share, 0), 0);
    for (let channel = 0; channel < 3; channel++) {
      const light = used.reduce((sum, fill, k) => sum + Math.max(near[k], 0) * theme.linear[fill][channel], 0) / total;
      pixels[4 * c + channel] = 255 * encoded(light);
    }
    pixels[4 * c + 3] = 255 * clamp(full, 0.25, 1);
  }
  return pixels;
}

/** Paints a bar, with a gap to the next one if it is wide enough; returns [left, top, width, height]. */
function paintBar(context, panel, colour, left, right, top, tall) {
  const from = crisp(Math.max(left, LEFT - 8));
  const to = crisp(Math.min(right, LEFT + panel.plotWidth + 8));
  const width = Math.max(to - from - (right - left > 4 ? 1 : 0), 0.5);
  if (right - left > 9 && tall > 8) {
    context.fillStyle = colour;
    context.beginPath();
    context.roundRect(from, top, width, tall, 2.5);
    context.fill();
  } else box(context, colour, from, top, width, tall);
  return [from, top, width, tall];
}

function labelOf(kind, fullName) {
  const microbatch = kinds.microbatch[kind];
  if (fullName) return kinds.name[kind];
  return microbatch < 0 ? kinds.op[kind].toLowerCase() : String(microbatch);
}

/** Writes a label into the visible part of a bar, if it fits. */
function paintLabel(context, panel, label, colour, [left, top, width, tall]) {
  const size = Math.min(12, tall - 2);
  const from = Math.max(left, LEFT);
  const to = Math.min(left + width, LEFT + panel.plotWidth);
  if (to - from < label.length * size * 0.62 + 3) return;
  text(context, label, (from + to) / 2, top + tall / 2 + 0.5, "center", size, colour, 600);
}

