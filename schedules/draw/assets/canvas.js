// ---- canvases: what is drawn on each, and how ----

/** A canvas, and a stored picture of all that a hover does not change. */
function openCanvas() {
  const canvas = make("canvas");
  return { canvas, context: canvas.getContext("2d"), base: make("canvas").getContext("2d") };
}

function resizeCanvas(canvas, width, height) {
  canvas.style.height = `${height}px`;
  canvas.width = Math.round(width * devicePixelRatio);
  canvas.height = Math.round(height * devicePixelRatio);
}

/** Lets a context draw in CSS pixels. */
function scale(context) {
  context.setTransform(devicePixelRatio, 0, 0, devicePixelRatio, 0, 0);
  context.textBaseline = "middle";
}

/** Empties the stored picture of a canvas. */
function clearBase({ canvas, base }) {
  Object.assign(base.canvas, { width: canvas.width, height: canvas.height });
  scale(base);
  box(base, theme.card, 0, 0, canvas.width, canvas.height);
}

function box(context, colour, left, top, width, height, alpha = 1) {
  context.globalAlpha = alpha;
  context.fillStyle = colour;
  context.fillRect(left, top, width, height);
  context.globalAlpha = 1;
}

function text(context, value, px, y, align, size, colour, weight = 400) {
  context.font = `${weight} ${size}px ${theme.font}`;
  context.textAlign = align;
  context.fillStyle = colour;
  context.fillText(value, px, y);
}

/** Text on a background of its own. */
function tag(context, value, px, y, align, colour) {
  context.font = `600 11px ${theme.font}`;
  const wide = context.measureText(value).width + 6;
  box(context, theme.card, align === "left" ? px - 3 : px - wide + 3, y - 7, wide, 14, 0.85);
  text(context, value, px, y, align, 11, colour, 600);
}

function dot(context, px, y, colour, size) {
  context.fillStyle = colour;
  context.beginPath();
  context.arc(px, y, size, 0, 7);
  context.fill();
}

function clipped(context, left, top, width, height, body) {
  context.save();
  context.beginPath();
  context.rect(left, top, width, height);
  context.clip();
  body();
  context.restore();
}

function paintOutlines(context, bars, colour, line) {
  context.strokeStyle = colour;
  context.lineWidth = line;
  for (const [left, top, width, tall] of bars.filter(Boolean)) {
    context.strokeRect(left - 0.25, top - 0.25, Math.max(width, 2) + 0.5, tall + 0.5);
  }
}

const crisp = (px) => Math.round(px * devicePixelRatio) / devicePixelRatio;

function markStale(panel) {
  panel.stale = true;
  panel.curve.stale = true;
}

let frame = 0;
/** Asks for a frame. What a hover changes is painted over a stored picture, which is repainted only if `moved`. */
function draw(moved = true) {
  if (moved) panels.forEach(markStale);
  frame ||= requestAnimationFrame(() => {
    frame = 0;
    for (const panel of panels) {
      paint(panel);
      if (panel.canvas.width) paintMemory(panel);
    }
    byId("mixed").hidden = !panels.some((panel) => panel.hasMixed);
  });
}

function readTheme() {
  const probe = byId("tip"); // a variable's text may depend on the theme, a colour does not
  const colour = (name) => ((probe.style.color = `var(--${name})`), getComputedStyle(probe).color);
  const names = ["card", "text", "soft", "idle", "grid", "accent", "low", "high"];
  theme = Object.fromEntries(names.map((name) => [name, colour(name)]));
  probe.style.color = "";
  theme.font = getComputedStyle(document.body).fontFamily;
  theme.fill = FILLS.map(fillOf);
  theme.textOn = FILLS.map(textColourOf);
  theme.linear = theme.fill.map((hex) => channels(hex).map((value) => linear(value / 255)));
}

const channels = (hex) => [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));
const linear = (value) => (value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4);
const encoded = (value) => (value <= 0.0031308 ? value * 12.92 : 1.055 * value ** (1 / 2.4) - 0.055);

