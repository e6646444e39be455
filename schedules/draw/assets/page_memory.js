// ---- what every rank keeps, over time ----

const ABOVE = 10; // pixels over the highest value

function decodeMemory(panel) {
  const { unit, ranks, limit } = panel.data.program.memory;
  const curves = ranks.map(({ gap, kept }) => {
    let at = 0;
    const time = Float64Array.from(gap, (by) => (at += by));
    const most = kept.reduce((a, b) => Math.max(a, b), 0);
    return { time, kept: Float64Array.from(kept), most, peakAt: time[kept.indexOf(most)] };
  });
  const most = curves.reduce((a, c) => Math.max(a, c.most), 0);
  return { unit, limit, curves, most };
}

/** The same scale in all panels. */
const highest = () => Math.max(...panels.map(({ memory: m }) => Math.max(m.most * m.unit, m.limit ?? 0)));
const curveY = (value) => CURVE - 18 - (value / highest()) * (CURVE - 18 - ABOVE);

/** The rank whose curve stands out: that of the choice, else under the pointer, else the fullest. */
function standsOut(panel) {
  if (view.rank !== null && view.rank < panel.memory.curves.length) return view.rank;
  if (panel.chosen) return rankOf(panel, panel.chosen.n);
  if (view.hover?.panel === panel) return view.hover.track.at;
  return panel.memory.curves.findIndex((curve) => curve.most === panel.memory.most);
}

function keptAt(curve, time) {
  let low = 0;
  let high = curve.time.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (curve.time[middle] <= time) low = middle + 1;
    else high = middle;
  }
  return low ? curve.kept[low - 1] : 0;
}

function rankColour(at, count) {
  const [low, high] = [theme.low, theme.high].map((hex) => [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16)));
  const share = count > 1 ? at / (count - 1) : 0;
  return `rgb(${low.map((v, i) => Math.round(v + (high[i] - v) * share)).join(" ")})`;
}

function paintCurve(panel) {
  const { context } = panel.curve;
  context.setTransform(devicePixelRatio, 0, 0, devicePixelRatio, 0, 0);
  context.textBaseline = "middle";
  const strong = standsOut(panel);
  if (panel.version !== panel.curve.drawn || panel.curve.strong !== strong) paintCurves(panel, strong);
  context.drawImage(panel.curve.base.canvas, 0, 0, panel.width, CURVE);
  const cross = crossAt(panel);
  if (cross === null) return;
  const value = keptAt(panel.memory.curves[strong], view.cross) * panel.memory.unit;
  context.globalAlpha = 0.45;
  context.fillStyle = theme.text;
  context.fillRect(Math.round(cross), 0, 1, CURVE - 14);
  context.globalAlpha = 1;
  dot(context, cross, curveY(value), theme.text, 3);
  const side = cross > LEFT + panel.plotWidth - 120 ? "right" : "left";
  const label = `rank ${panel.ranks[strong].rank} keeps ${plain(value)}`;
  tag(context, label, cross + (side === "left" ? 8 : -8), Math.max(curveY(value) - 10, 8), side, theme.text);
}

/** All curves into the stored picture, the one that stands out last, with peaks and limit. */
function paintCurves(panel, strong) {
  const { base } = panel.curve;
  const { curves, unit, limit } = panel.memory;
  Object.assign(base.canvas, { width: panel.curve.canvas.width, height: panel.curve.canvas.height });
  base.setTransform(devicePixelRatio, 0, 0, devicePixelRatio, 0, 0);
  base.textBaseline = "middle";
  base.fillStyle = theme.card;
  base.fillRect(0, 0, panel.width, CURVE);
  paintScale(base, panel);
  base.save();
  base.beginPath();
  base.rect(LEFT, 0, panel.plotWidth, CURVE - 12);
  base.clip();
  const colour = (at) => rankColour(at, curves.length);
  curves.forEach((curve, at) => at !== strong && paintLine(base, panel, curve, colour(at), 1, 0.75));
  paintLine(base, panel, curves[strong], colour(strong), 2.5, 1);
  if (limit !== null) paintLimit(base, panel, limit);
  curves.forEach((c, at) => dot(base, x(panel, c.peakAt), curveY(c.most * unit), colour(at), at === strong ? 4 : 2));
  base.restore();
  const own = curves[strong];
  const label = LEFT < 80 ? plain(own.most * unit) : `peak ${plain(own.most * unit)}`;
  text(base, label, panel.width - GUTTER, curveY(own.most * unit), "right", 11, theme.text, 600);
  panel.curve.strong = strong;
  panel.curve.drawn = panel.version;
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
  tag(context, `limit ${plain(limit)}`, LEFT + 6, curveY(limit) + 9, "left", theme.accent);
}

function paintScale(context, panel) {
  const top = highest();
  const step = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000].find((n) => top / n <= 4) ?? top;
  for (let value = 0; value <= top; value += step) {
    context.fillStyle = theme.grid;
    context.fillRect(LEFT, Math.round(curveY(value)), panel.plotWidth, 1);
    text(context, plain(value), LEFT - 10, curveY(value), "right", 10, theme.soft);
  }
  const words = LEFT < 80 ? "kept" : "microbatches kept by each rank";
  text(context, words, LEFT, CURVE - 6, "left", 10, theme.soft);
  if (LEFT < 80 || panel.memory.curves.length < 2) return;
  const [first, last] = [panel.ranks[0].rank, panel.ranks.at(-1).rank];
  context.font = `400 10px ${theme.font}`;
  let at = LEFT + context.measureText(words).width + 16;
  for (const [label, colour] of [[`rank ${first}`, theme.low], [`rank ${last}`, theme.high]]) {
    context.fillStyle = colour;
    context.fillRect(at, CURVE - 7, 14, 3);
    text(context, label, at + 19, CURVE - 6, "left", 10, theme.soft);
    at += 74;
  }
}

/** A line of steps. Of the changes inside one pixel column only the highest and the last are drawn: what is freed and
 *  taken at one moment leaves no mark. */
function paintLine(context, panel, { time, kept }, colour, wide, alpha) {
  const y = (value) => curveY(value * panel.memory.unit);
  let value = keptAt({ time, kept }, view.from);
  let [column, high] = [LEFT, value];
  context.beginPath();
  context.moveTo(LEFT, y(value));
  const turn = (px) => {
    if (high > value) context.lineTo(column, y(high));
    context.lineTo(column, y(value));
    context.lineTo(px, y(value));
  };
  for (let i = 0; i < time.length && time[i] <= view.to; i++) {
    if (time[i] < view.from) continue;
    const px = crisp(x(panel, time[i]));
    if (px !== column) {
      turn(px);
      [column, high] = [px, value];
    }
    value = kept[i];
    high = Math.max(high, value);
  }
  turn(LEFT + panel.plotWidth);
  context.strokeStyle = colour;
  context.lineWidth = wide;
  context.globalAlpha = alpha;
  context.stroke();
  context.globalAlpha = 1;
}

function dot(context, px, y, colour, size) {
  context.fillStyle = colour;
  context.beginPath();
  context.arc(px, y, size, 0, 7);
  context.fill();
}

/** Text on a ground of its own. */
function tag(context, value, px, y, align, colour) {
  context.font = `600 11px ${theme.font}`;
  const wide = context.measureText(value).width + 6;
  context.globalAlpha = 0.85;
  context.fillStyle = theme.card;
  context.fillRect(align === "left" ? px - 3 : px - wide + 3, y - 7, wide, 14);
  context.globalAlpha = 1;
  text(context, value, px, y, align, 11, colour, 600);
}

/** The rank whose curve is nearest to a point. */
function curveAt(panel, px, py) {
  const time = timeAt(panel, px);
  const away = panel.memory.curves.map((c) => Math.abs(curveY(keptAt(c, time) * panel.memory.unit) - py));
  const least = Math.min(...away);
  return least < 14 ? away.indexOf(least) : null;
}
