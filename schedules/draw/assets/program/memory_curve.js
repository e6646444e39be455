// ---- the memory that each rank takes, over time ----

const ABOVE = 10; // pixels above the highest value

/** A curve per rank, from the times at which its instructions started and ended. On the compute lane memory is taken in
 *  the order of the program, as halves of a pair may run beside each other. */
function decodeMemory(panel, program, spanOf) {
  const { unit, in_bytes, held, starts, ends, limit } = program.memory;
  const curves = panel.ranks.map(({ rank }, index) => {
    const pp = panel.data.groups.pp[rank];
    const { first } = program.ranks[pp];
    const changes = [];
    let latest = -Infinity;
    spanOf[index].forEach((n, at) => {
      const inOrder = kinds.lane[panel.kind[n]] === "compute";
      const [start, end] = [panel.start[n], panel.end[n]].map((time) => (inOrder ? Math.max(time, latest) : time));
      if (starts[first + at]) changes.push([start, starts[first + at]]);
      if (ends[first + at]) changes.push([end, ends[first + at]]);
      if (inOrder) latest = end;
    });
    return curveOf(changes, held[pp]);
  });
  return { unit, in_bytes, limit, curves, peak: Math.max(...curves.map((curve) => curve.peak)) };
}

/** `saved` is from each `time` on what is held then. */
function curveOf(changes, held) {
  changes.sort((a, b) => a[0] - b[0]);
  let sum = held;
  const saved = changes.map(([, by]) => (sum += by));
  const time = changes.map(([at]) => at);
  const peak = saved.reduce((a, b) => Math.max(a, b), held);
  return { time, saved, held, peak, peakAt: time[saved.indexOf(peak)] ?? 0 };
}

/** The highest value, the same in all panels. */
const highest = () =>
  Math.max(...panels.filter((p) => p.memory).map(({ memory: m }) => Math.max(m.peak * m.unit, m.limit ?? 0)));
const curveY = (value) => CURVE - 18 - (value / highest()) * (CURVE - 18 - ABOVE);

/** Index of the rank whose curve is emphasized: the selected, else the one below the pointer, else the one that saves most. */
function emphasizedRank(panel) {
  const { curves, peak } = panel.memory;
  if (view.curveRank !== null && view.curveRank < curves.length) return view.curveRank;
  if (panel.selected) return rankOf(panel, panel.selected.n);
  if (view.hover?.panel === panel) return rankOf(panel, view.hover.n);
  return curves.findIndex((curve) => curve.peak === peak);
}

/** What is held at a time. */
function savedAt(curve, time) {
  const after = bisect(0, curve.time.length, (i) => curve.time[i] <= time);
  return after ? curve.saved[after - 1] : curve.held;
}

function rankColour(index, count) {
  const [low, high] = [theme.low, theme.high].map((rgb) => rgb.match(/\d+/g).map(Number));
  const share = count > 1 ? index / (count - 1) : 0;
  return `rgb(${low.map((v, i) => Math.round(v + (high[i] - v) * share)).join(" ")})`;
}

function paintMemory(panel) {
  const { context } = panel.curve;
  if (!panel.memory) return;
  scale(context);
  const strong = emphasizedRank(panel);
  if (panel.curve.stale || panel.curve.strong !== strong) paintCurves(panel, strong);
  context.drawImage(panel.curve.base.canvas, 0, 0, panel.width, CURVE);
  const cursor = cursorX(panel);
  if (cursor === null) return;
  const value = savedAt(panel.memory.curves[strong], view.cursor) * panel.memory.unit;
  box(context, theme.text, Math.round(cursor), 0, 1, CURVE - 14, 0.45);
  dot(context, cursor, curveY(value), theme.text, 3);
  const side = cursor > LEFT + panel.plotWidth / 2 ? "right" : "left";
  const label = `rank ${panel.ranks[strong].rank} ${panel.memory.in_bytes ? "holds" : "saves"} ${amount(panel, value)}`;
  tag(context, label, cursor + (side === "left" ? 8 : -8), Math.max(curveY(value) - 10, 8), side, theme.text);
}

/** Paints all curves, with peaks and limit, into the stored picture; the emphasized one comes last. */
function paintCurves(panel, strong) {
  const { base } = panel.curve;
  const { curves, unit, limit } = panel.memory;
  clearBase(panel.curve);
  paintScale(base, panel);
  const colour = (index) => rankColour(index, curves.length);
  clipped(base, LEFT, 0, panel.plotWidth, CURVE - 12, () => {
    curves.forEach((curve, i) => i !== strong && paintLine(base, panel, curve, colour(i), 1, 0.75));
    paintLine(base, panel, curves[strong], colour(strong), 2.5, 1);
    if (limit !== null) paintLimit(base, panel, limit);
    curves.forEach((c, i) => dot(base, x(panel, c.peakAt), curveY(c.peak * unit), colour(i), i === strong ? 4 : 2));
  });
  const peak = curves[strong].peak * unit;
  const isShort = isNarrow() || panel.memory.in_bytes;
  const label = isShort ? amount(panel, peak, 4) : `peak ${amount(panel, peak, 4)}`;
  text(base, label, panel.width - GUTTER, curveY(peak), "right", 11, theme.text, 600);
  Object.assign(panel.curve, { strong, stale: false });
}

function paintLimit(context, panel, limit) {
  context.setLineDash([6, 4]);
  context.strokeStyle = theme.accent;
  context.lineWidth = 1.5;
  context.beginPath();
  context.moveTo(LEFT, curveY(limit));
  context.lineTo(LEFT + panel.plotWidth, curveY(limit));
  context.stroke();
  context.setLineDash([]);
  tag(context, `limit ${number(limit)}`, LEFT + 6, curveY(limit) + 9, "left", theme.accent);
}

function paintScale(context, panel) {
  const top = highest();
  const steps = panel.memory.in_bytes ? 2 ** Math.ceil(Math.log2(top / 4)) : null;
  const step = steps ?? [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000].find((n) => top / n <= 4) ?? top;
  for (let value = 0; value <= top; value += step) {
    box(context, theme.grid, LEFT, Math.round(curveY(value)), panel.plotWidth, 1);
    text(context, amount(panel, value), LEFT - 10, curveY(value), "right", 10, theme.soft);
  }
  const title = MEMORY[panel.memory.in_bytes].title + (isNarrow() ? "" : " by each rank");
  text(context, title, LEFT, CURVE - 6, "left", 10, theme.soft);
  if (panel.memory.curves.length < 2) return;
  let at = LEFT + context.measureText(title).width + 16;
  for (const [index, colour] of [[0, theme.low], [-1, theme.high]]) {
    const label = `rank ${panel.ranks.at(index).rank}`;
    box(context, colour, at, CURVE - 7, 14, 3);
    text(context, label, at + 19, CURVE - 6, "left", 10, theme.soft);
    at += 35 + context.measureText(label).width;
  }
}

/** A line of steps. Of the changes within a pixel column only the highest and the last are painted. */
function paintLine(context, panel, curve, colour, wide, alpha) {
  const { time, saved } = curve;
  const y = (value) => curveY(value * panel.memory.unit);
  let value = savedAt(curve, view.from);
  let [column, high] = [LEFT, value];
  context.beginPath();
  context.moveTo(LEFT, y(value));
  const moveTo = (px) => {
    if (high > value) context.lineTo(column, y(high));
    context.lineTo(column, y(value));
    context.lineTo(px, y(value));
  };
  for (let i = 0; i < time.length && time[i] <= view.to; i++) {
    if (time[i] < view.from) continue;
    const px = crisp(x(panel, time[i]));
    if (px !== column) {
      moveTo(px);
      [column, high] = [px, value];
    }
    value = saved[i];
    high = Math.max(high, value);
  }
  moveTo(LEFT + panel.plotWidth);
  context.strokeStyle = colour;
  context.lineWidth = wide;
  context.globalAlpha = alpha;
  context.stroke();
  context.globalAlpha = 1;
}

/** Index of the rank whose curve is nearest to a point, or null. */
function curveAt(panel, px, py) {
  const { curves, unit } = panel.memory;
  const distances = curves.map((curve) => Math.abs(curveY(savedAt(curve, timeAt(panel, px)) * unit) - py));
  const least = Math.min(...distances);
  return least < 14 ? distances.indexOf(least) : null;
}

