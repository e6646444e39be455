// ---- moving about ----

function show(from, to) {
  const whole = view.last - view.first;
  const width = clamp(to - from, Math.min(100, whole), whole * 1.04);
  const middle = clamp((from + to) / 2, view.first - whole * 0.02 + width / 2, view.last + whole * 0.02 - width / 2);
  [view.from, view.to] = [middle - width / 2, middle + width / 2];
  draw();
}

const reset = () => show(view.first - (view.last - view.first) * 0.02, view.last + (view.last - view.first) * 0.02);
const pan = (share) => {
  const by = (view.to - view.from) * share;
  show(view.from + by, view.to + by);
};
function zoom(factor, around = middleOfView()) {
  const whole = (view.last - view.first) * 1.04;
  const kept = clamp(factor, Math.min(100, whole) / (view.to - view.from), whole / (view.to - view.from));
  show(around - (around - view.from) * kept, around + (view.to - around) * kept);
}

/** What buttons and keys zoom around: the chosen instruction if it is in view. */
function middleOfView() {
  const { chosen } = view.chosen ?? {};
  const at = chosen ? (startOf(view.chosen, chosen.n) + endOf(view.chosen, chosen.n)) / 2 : -Infinity;
  return at >= view.from && at <= view.to ? at : (view.from + view.to) / 2;
}

const pointOf = (panel, event) => {
  const box = panel.canvas.getBoundingClientRect();
  return [event.clientX - box.left, event.clientY - box.top];
};

function onWheel(panel, event) {
  const [px] = pointOf(panel, event);
  const size = [1, 16, 400][event.deltaMode];
  if (px < LEFT || px > LEFT + panel.plotWidth) {
    if (!scroll(panel, event.deltaY * size)) return;
  } else if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) pan((event.deltaX * size) / panel.plotWidth);
  else zoom(Math.exp(event.deltaY * size * 0.0016), timeAt(panel, px));
  event.preventDefault();
  draw();
  onMove(panel, event);
}

function onMove(panel, event) {
  const [px, py] = pointOf(panel, event);
  const held = panel.held;
  if (held) {
    const by = ((held.px - px) / panel.plotWidth) * (view.to - view.from);
    scroll(panel, held.py - py);
    show(view.from + by, view.to + by);
    held.far += Math.abs(held.px - px) + Math.abs(held.py - py);
    [held.px, held.py] = [px, py];
  }
  view.rank = null;
  view.cross = px >= LEFT && px <= LEFT + panel.plotWidth ? timeAt(panel, px) : null;
  hover(held ? null : spanAt(panel, px, py));
  tell(event);
  draw(false);
}

/** Over the curve of what ranks keep: the pointer tells a time and a rank. */
function onCurve(panel, event) {
  const box = panel.curve.canvas.getBoundingClientRect();
  const [px, py] = [event.clientX - box.left, event.clientY - box.top];
  const inside = px >= LEFT && px <= LEFT + panel.plotWidth;
  view.cross = inside ? timeAt(panel, px) : null;
  view.rank = inside ? curveAt(panel, px, py) : null;
  draw(false);
}

/** With nothing but arrow keys one goes from instruction to instruction where what they wait for is known. */
function onKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.matches("select, input[type=range]")) return;
  const walks = LINKED && !event.shiftKey;
  const acts = {
    ArrowLeft: () => (walks ? walk(-1, 0) : pan(-0.1)),
    ArrowRight: () => (walks ? walk(1, 0) : pan(0.1)),
    "+": () => zoom(0.8),
    "=": () => zoom(0.8),
    "-": () => zoom(1.25),
    ArrowUp: () => (walks ? walk(0, -1) : panels.some((p) => scroll(p, -p.pitch))),
    ArrowDown: () => (walks ? walk(0, 1) : panels.some((p) => scroll(p, p.pitch))),
    Escape: () => LINKED && pick(panels[0], -1),
    0: reset,
    Home: reset,
    "[": () => turn(-1),
    "]": () => turn(1),
  };
  const act = acts[event.key];
  if (!act || act() === false) return;
  event.preventDefault();
  draw();
}

