// ---- drawing ----

let frame = 0;
/** Asks for a frame. What a hover changes lies above a stored picture of all spans; `moved` has that drawn anew. */
function draw(moved = true) {
  if (moved) for (const panel of panels) panel.stale = true;
  frame ||= requestAnimationFrame(() => {
    frame = 0;
    panels.forEach(paint);
  });
}

function readTheme() {
  const style = getComputedStyle(document.documentElement);
  theme = Object.fromEntries(
    ["card", "text", "soft", "idle", "grid"].map((n) => [n, style.getPropertyValue(`--${n}`).trim()]),
  );
  theme.font = getComputedStyle(document.body).fontFamily;
  theme.fill = OPS.map(fill);
  theme.ink = OPS.map(ink);
  theme.bytes = theme.fill.map((hex) => parseInt(hex.slice(5) + hex.slice(3, 5) + hex.slice(1, 3), 16));
}

function paint(panel) {
  if (panel.stale) paintBase(panel);
  const { context, width, height } = panel;
  context.setTransform(devicePixelRatio, 0, 0, devicePixelRatio, 0, 0);
  context.textBaseline = "middle";
  context.drawImage(panel.base.canvas, 0, 0, width, height);
  panel.outlines = [];
  if (view.lit)
    clipped(context, panel, LEFT, panel.plotWidth, TOP - 3, () => {
      context.globalAlpha = VEIL;
      const [first, last] = visibleRanks(panel);
      for (let i = first; i < last; i++) paintIdle(context, panel, i);
      context.globalAlpha = 1;
      paintTracks(context, panel, view.lit);
      paintOutlines(context, panel);
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
  text(context, `rank ${rank}`, LEFT - 10, middle, "right", 12, theme.text, 600);
  if (busy !== null) text(context, `${(100 * busy).toFixed(0)} %`, panel.width - 14, middle, "right", 12, theme.soft);
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

function paintAxis(context, panel) {
  const [times, gap] = ticks(panel);
  const [size, unit] = unitOf(Math.max(view.last, -view.first));
  const decimals = clamp(Math.ceil(Math.log10(size / gap) - 1e-9), 0, 9);
  const cross = view.cross === null || view.cross < view.from || view.cross > view.to ? null : x(panel, view.cross);
  for (const time of times) {
    const px = x(panel, time);
    if (cross !== null && Math.abs(px - cross) < 70) continue;
    text(context, `${(time / size).toFixed(decimals)} ${unit}`, px, TOP / 2 - 1, "center", 11, theme.soft);
  }
  text(context, "busy", panel.width - 14, TOP / 2 - 1, "right", 11, theme.soft);
  if (cross === null) return;
  text(
    context,
    `${(view.cross / size).toFixed(decimals + 2)} ${unit}`,
    cross,
    TOP / 2 - 1,
    "center",
    11,
    theme.text,
    600,
  );
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

/** Draws the spans in view, or only those whose kind is set in `only`. */
function paintTracks(context, panel, only) {
  const [first, last] = visibleRanks(panel);
  const found = [];
  for (let i = first; i < last; i++) {
    for (const track of panel.ranks[i].tracks) {
      const at = place(panel, i, track.row);
      if (at) found.push({ track, pale: panel.ranks[i].pale, y: at[0], height: at[1] });
    }
  }
  const columns = Math.ceil(panel.plotWidth * devicePixelRatio);
  const cover = new Float32Array(columns * OPS.length);
  const image = new ImageData(columns, Math.max(found.length, 1));
  const pixels = new Uint32Array(image.data.buffer);
  found.forEach((line, row) => {
    line.thin = paintSpans(context, panel, line, only, cover);
    if (line.thin) blend(cover, pixels.subarray(row * columns, (row + 1) * columns));
  });
  Object.assign(strips.canvas, { width: columns, height: image.height });
  strips.putImageData(image, 0, 0);
  context.imageSmoothingEnabled = false;
  found.forEach(({ thin, y, height }, row) => {
    if (thin) context.drawImage(strips.canvas, 0, row, columns, 1, LEFT, y, columns / devicePixelRatio, height);
  });
}

/** Draws the bars of a track; what is thinner than 1.5 pixels only adds to `cover`. Says whether there was any such. */
function paintSpans(context, panel, { track, pale, y, height }, only, cover) {
  const written = track.row === "compute" && height >= 11;
  let thin = false;
  for (let i = firstAt(track, view.from); i < track.start.length && track.start[i] <= view.to; i++) {
    const kind = track.kind[i];
    if (track.end[i] < view.from || (only && !only[kind])) continue;
    const left = x(panel, track.start[i]);
    const right = x(panel, track.end[i]);
    let bar = [left, y, right - left, height];
    if (right - left < 1.5) {
      if (!thin) cover.fill(0);
      thin = true;
      addCover(cover, (left - LEFT) * devicePixelRatio, (right - LEFT) * devicePixelRatio, OP[kind]);
    } else {
      const depth = track.depth ? track.depth[i] : 1;
      const tall = height / depth;
      const top = y + tall * (track.level ? track.level[i] : 0);
      const isPale = pale.has(kinds.stage[kind]);
      bar = paintBar(context, panel, kind, left, right, top, tall - (depth > 1 ? 0.5 : 0), isPale);
      if (written && tall >= 9) paintLabel(context, kind, bar, isPale);
    }
    if (only && view.same[kind]) panel.outlines.push(bar);
  }
  return thin;
}

/** Adds the share of each pixel column that a span fills, and a trace of it where it has no length. */
function addCover(cover, left, right, op) {
  const columns = cover.length / OPS.length;
  for (let c = Math.max(Math.floor(left), 0); c <= right && c < columns; c++) {
    cover[c * OPS.length + op] += Math.max(Math.min(right, c + 1) - Math.max(left, c), 0.01);
  }
}

/** Each pixel column takes the colour of its commonest op, as opaque as the column is full. */
function blend(cover, pixels) {
  for (let c = 0; c < pixels.length; c++) {
    let total = 0;
    let most = 0;
    for (let op = 0; op < OPS.length; op++) {
      const share = cover[c * OPS.length + op];
      total += share;
      if (share > cover[c * OPS.length + most]) most = op;
    }
    if (total > 0) pixels[c] = (Math.round(255 * clamp(total, 0.25, 1)) << 24) | theme.bytes[most];
  }
}

const crisp = (px) => Math.round(px * devicePixelRatio) / devicePixelRatio;

function paintBar(context, panel, kind, left, right, top, tall, pale) {
  const from = crisp(Math.max(left, LEFT - 8));
  const to = crisp(Math.min(right, LEFT + panel.plotWidth + 8));
  const width = Math.max(to - from - (right - left > 4 ? 1 : 0), 0.5);
  context.fillStyle = theme.fill[OP[kind]];
  context.globalAlpha = pale ? 0.55 : 1;
  if (width > 8 && tall > 8) {
    context.beginPath();
    context.roundRect(from, top, width, tall, 2.5);
    context.fill();
  } else context.fillRect(from, top, width, tall);
  context.globalAlpha = 1;
  return [from, top, width, tall];
}

function paintLabel(context, kind, [left, top, width, tall], pale) {
  const microbatch = kinds.microbatch[kind];
  const size = Math.min(12, tall - 2);
  const label = microbatch < 0 ? kinds.op[kind].toLowerCase() : String(microbatch);
  if (width < label.length * size * 0.62 + 3) return;
  text(
    context,
    label,
    left + width / 2,
    top + tall / 2 + 0.5,
    "center",
    size,
    pale ? theme.text : theme.ink[OP[kind]],
    600,
  );
}

function paintOutlines(context, panel) {
  context.strokeStyle = theme.text;
  context.lineWidth = 1.5;
  for (const [left, top, width, tall] of panel.outlines) {
    context.strokeRect(left - 0.25, top - 0.25, Math.max(width, 2) + 0.5, tall + 0.5);
  }
}
