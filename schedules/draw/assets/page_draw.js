// ---- drawing ----

let frame = 0;
/** Asks for a frame. What a hover changes lies above a stored picture of all spans; `moved` has that drawn anew. */
function draw(moved = true) {
  if (moved) for (const panel of panels) Object.assign(panel, { stale: true, version: panel.version + 1 });
  frame ||= requestAnimationFrame(() => {
    frame = 0;
    for (const panel of panels) {
      paint(panel);
      if (panel.curve && panel.canvas.width) paintCurve(panel);
    }
  });
}

function readTheme() {
  const style = getComputedStyle(document.documentElement);
  const names = ["card", "text", "soft", "idle", "grid", "accent", "low", "high"];
  theme = Object.fromEntries(names.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
  theme.font = getComputedStyle(document.body).fontFamily;
  theme.fill = PAINTS.map(fillOf);
  theme.ink = PAINTS.map(inkOf);
  theme.bytes = theme.fill.map((hex) => parseInt(hex.slice(5) + hex.slice(3, 5) + hex.slice(1, 3), 16));
}

function paint(panel) {
  if (!panel.canvas.width) return; // a window without width
  if (panel.stale) paintBase(panel);
  const { context, width, height } = panel;
  context.setTransform(devicePixelRatio, 0, 0, devicePixelRatio, 0, 0);
  context.textBaseline = "middle";
  context.drawImage(panel.base.canvas, 0, 0, width, height);
  clipped(context, panel, LEFT, panel.plotWidth, TOP - 3, () => {
    if (view.lit && !panel.marked) {
      paintLit(context, panel, (track, i) => view.lit[track.kind[i]]);
      paintOutlines(context, panel.outlines, theme.text, 1.5);
    } else if (view.hover?.panel === panel) {
      paintOutlines(context, [barOf(panel, view.hover.track.first + view.hover.index)], theme.text, 1.5);
    }
  });
  paintAxis(context, panel);
}

/** Draws everything but the axis and the hover into the panel's stored picture. */
function paintBase(panel) {
  const context = panel.base;
  const [first, last] = visibleRanks(panel);
  Object.assign(context.canvas, { width: panel.canvas.width, height: panel.canvas.height });
  context.setTransform(devicePixelRatio, 0, 0, devicePixelRatio, 0, 0);
  context.textBaseline = "middle";
  context.fillStyle = theme.card;
  context.fillRect(0, 0, panel.width, panel.height);
  clipped(context, panel, 0, panel.width, TOP - 7, () => {
    for (let i = first; i < last; i++) paintGutter(context, panel, i);
  });
  clipped(context, panel, LEFT, panel.plotWidth, TOP - 3, () => {
    for (let i = first; i < last; i++) paintIdle(context, panel, i);
    context.fillStyle = theme.grid;
    for (const time of ticks(panel)[0]) context.fillRect(Math.round(x(panel, time)), TOP - 3, 1, panel.height);
    paintTracks(context, panel, null);
    if (panel.marked) {
      paintLit(context, panel, (track, i) => panel.marked[track.first + i]);
      paintArrows(context, panel);
    }
  });
  paintScrollbar(context, panel);
  panel.stale = false;
}

function clipped(context, panel, left, width, top, body) {
  context.save();
  context.beginPath();
  context.rect(left, top, width, panel.height - top - 4);
  context.clip();
  body();
  context.restore();
}

function text(context, value, px, y, align, size, colour, weight = 400) {
  context.font = `${weight} ${size}px ${theme.font}`;
  context.textAlign = align;
  context.fillStyle = colour;
  context.fillText(value, px, y);
}

function paintGutter(context, panel, index) {
  if (index % Math.ceil(14 / panel.pitch)) return;
  const { rank, busy } = panel.ranks[index];
  const [y, tall] = place(panel, index, "compute");
  const middle = y + tall / 2 + 0.5;
  text(context, LEFT < 80 ? `${rank}` : `rank ${rank}`, LEFT - 10, middle, "right", 12, theme.text, 600);
  if (busy !== null) text(context, `${(100 * busy).toFixed(0)} %`, panel.width - GUTTER, middle, "right", 12, theme.soft);
  for (const row of panel.thin < 8 ? [] : panel.rows) {
    const [top, thin] = place(panel, index, row);
    text(context, row, LEFT - 10, top + thin / 2 + 0.5, "right", 9, theme.soft);
  }
}

function paintIdle(context, panel, index) {
  context.fillStyle = theme.idle;
  for (const row of ["compute", ...panel.rows]) {
    const [y, height] = place(panel, index, row);
    context.fillRect(LEFT, y, panel.plotWidth, height);
  }
}

function ticks(panel) {
  const least = ((view.to - view.from) * 90) / panel.plotWidth;
  const power = 10 ** Math.floor(Math.log10(least));
  const gap = [1, 2, 5, 10].find((n) => n * power >= least) * power;
  const found = [];
  for (let n = Math.ceil(view.from / gap); n * gap <= view.to; n++) found.push(n * gap);
  return [found, gap];
}

const crossAt = (panel) =>
  view.cross === null || view.cross < view.from || view.cross > view.to ? null : x(panel, view.cross);
const GUTTER = 12;
const stamp = (value, decimals, unit) => `${value.toFixed(decimals)}${unit && ` ${unit}`}`;

function paintAxis(context, panel) {
  const [times, gap] = ticks(panel);
  const [size, unit] = DATA.unit ? unitOf(Math.max(view.last, -view.first)) : [1e9, ""];
  const decimals = clamp(Math.ceil(Math.log10(size / gap) - 1e-9), 0, 9);
  const cross = crossAt(panel);
  for (const time of times) {
    const px = x(panel, time);
    if (cross !== null && Math.abs(px - cross) < 70) continue;
    text(context, stamp(time / size, decimals, unit), px, TOP / 2 - 1, "center", 11, theme.soft);
  }
  text(context, "busy", panel.width - GUTTER, TOP / 2 - 1, "right", 11, theme.soft);
  if (cross === null) return;
  text(context, stamp(view.cross / size, decimals + 2, unit), cross, TOP / 2 - 1, "center", 11, theme.text, 600);
  context.globalAlpha = 0.45;
  context.fillStyle = theme.text;
  context.fillRect(Math.round(cross), TOP - 3, 1, panel.height - TOP - 1);
  context.globalAlpha = 1;
}

function paintScrollbar(context, panel) {
  const shown = panel.height - TOP - BOTTOM;
  if (panel.content <= shown) return;
  context.fillStyle = theme.soft;
  context.globalAlpha = 0.5;
  context.fillRect(
    panel.width - 6,
    TOP + (panel.scroll / panel.content) * shown,
    3,
    Math.max((shown * shown) / panel.content, 16),
  );
  context.globalAlpha = 1;
}

