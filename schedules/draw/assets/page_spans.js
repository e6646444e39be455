// ---- spans ----

const VEIL = 0.8; // how far a hover or a choice hides the spans that it does not concern

/** Veils the panel, and draws the spans for which `only` holds above the veil. */
function paintLit(context, panel, only) {
  panel.outlines = [];
  context.globalAlpha = VEIL;
  const [first, last] = visibleRanks(panel);
  for (let i = first; i < last; i++) paintIdle(context, panel, i);
  context.globalAlpha = 1;
  paintTracks(context, panel, only);
}

/** Draws the spans in view, or only those for which `only` holds. */
function paintTracks(context, panel, only) {
  const [first, last] = visibleRanks(panel);
  const found = [];
  for (let i = first; i < last; i++) {
    for (const track of panel.ranks[i].tracks) {
      const at = place(panel, i, track.row);
      if (at) found.push({ track, y: at[0], height: at[1] });
    }
  }
  const columns = Math.ceil(panel.plotWidth * devicePixelRatio);
  const cover = new Float32Array(columns * PAINTS.length);
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
function paintSpans(context, panel, { track, y, height }, only, cover) {
  const written = track.row === "compute" && height >= 11;
  const named = x(panel, panel.usual) - x(panel, 0) > 42; // room for more than the microbatch
  let thin = false;
  for (let i = firstAt(track, view.from); i < track.start.length && track.start[i] <= view.to; i++) {
    if (track.end[i] < view.from || (only && !only(track, i))) continue;
    const left = x(panel, track.start[i]);
    const right = x(panel, track.end[i]);
    let bar = [left, y, right - left, height];
    if (right - left < 1.5) {
      if (!thin) cover.fill(0);
      thin = true;
      addCover(cover, (left - LEFT) * devicePixelRatio, (right - LEFT) * devicePixelRatio, track.paint[i]);
    } else {
      const depth = track.depth ? track.depth[i] : 1;
      const tall = height / depth;
      const top = y + tall * (track.level ? track.level[i] : 0);
      bar = paintBar(context, panel, theme.fill[track.paint[i]], left, right, top, tall - (depth > 1 ? 0.5 : 0));
      if (written && tall >= 9) paintLabel(context, labelOf(track.kind[i], named), theme.ink[track.paint[i]], bar);
    }
    if (only && view.same?.[track.kind[i]]) panel.outlines.push(bar);
  }
  return thin;
}

/** Adds the share of each pixel column that a span fills, and a trace of it where it has no length. */
function addCover(cover, left, right, paint) {
  const columns = cover.length / PAINTS.length;
  for (let c = Math.max(Math.floor(left), 0); c <= right && c < columns; c++) {
    cover[c * PAINTS.length + paint] += Math.max(Math.min(right, c + 1) - Math.max(left, c), 0.01);
  }
}

/** Each pixel column takes its commonest colour, as opaque as the column is full. */
function blend(cover, pixels) {
  for (let c = 0; c < pixels.length; c++) {
    let total = 0;
    let most = 0;
    for (let paint = 0; paint < PAINTS.length; paint++) {
      const share = cover[c * PAINTS.length + paint];
      total += share;
      if (share > cover[c * PAINTS.length + most]) most = paint;
    }
    if (total > 0) pixels[c] = (Math.round(255 * clamp(total, 0.25, 1)) << 24) | theme.bytes[most];
  }
}

const crisp = (px) => Math.round(px * devicePixelRatio) / devicePixelRatio;

function paintBar(context, panel, colour, left, right, top, tall) {
  const from = crisp(Math.max(left, LEFT - 8));
  const to = crisp(Math.min(right, LEFT + panel.plotWidth + 8));
  const width = Math.max(to - from - (right - left > 4 ? 1 : 0), 0.5);
  context.fillStyle = colour;
  if (width > 8 && tall > 8) {
    context.beginPath();
    context.roundRect(from, top, width, tall, 2.5);
    context.fill();
  } else context.fillRect(from, top, width, tall);
  return [from, top, width, tall];
}

function labelOf(kind, named) {
  const microbatch = kinds.microbatch[kind];
  if (named) return kinds.name[kind];
  return microbatch < 0 ? kinds.op[kind].toLowerCase() : String(microbatch);
}

function paintLabel(context, label, colour, [left, top, width, tall]) {
  const size = Math.min(12, tall - 2);
  if (width < label.length * size * 0.62 + 3) return;
  text(context, label, left + width / 2, top + tall / 2 + 0.5, "center", size, colour, 600);
}

function paintOutlines(context, bars, colour, line) {
  context.strokeStyle = colour;
  context.lineWidth = line;
  for (const [left, top, width, tall] of bars.filter(Boolean)) {
    context.strokeRect(left - 0.25, top - 0.25, Math.max(width, 2) + 0.5, tall + 0.5);
  }
}
