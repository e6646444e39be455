// ---- moving and zooming ----

function show(from, to) {
  const all = view.last - view.first;
  const width = clamp(to - from, Math.min(100, all), all * 1.04);
  const middle = clamp((from + to) / 2, view.first - all * 0.02 + width / 2, view.last + all * 0.02 - width / 2);
  [view.from, view.to] = [middle - width / 2, middle + width / 2];
  draw();
}

const showAll = () => show(view.first - (view.last - view.first) * 0.02, view.last + (view.last - view.first) * 0.02);
const pan = (share) => {
  const by = (view.to - view.from) * share;
  show(view.from + by, view.to + by);
};
function zoom(factor, around = zoomCentre()) {
  const all = (view.last - view.first) * 1.04;
  const allowed = clamp(factor, Math.min(100, all) / (view.to - view.from), all / (view.to - view.from));
  show(around - (around - view.from) * allowed, around + (view.to - around) * allowed);
}

/** What buttons and keys zoom around: the selected span if it is in view. */
function zoomCentre() {
  const at = view.selected ? middleOf(view.selected, view.selected.selected.n) : -Infinity;
  return at >= view.from && at <= view.to ? at : (view.from + view.to) / 2;
}

function pointOn(canvas, event) {
  const box = canvas.getBoundingClientRect();
  return [event.clientX - box.left, event.clientY - box.top];
}

function onWheel(panel, event) {
  const [px] = pointOn(panel.canvas, event);
  const pixels = [1, 16, 400][event.deltaMode];
  if (px < LEFT || px > LEFT + panel.plotWidth) {
    if (!scroll(panel, event.deltaY * pixels)) return;
  } else if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) pan((event.deltaX * pixels) / panel.plotWidth);
  else zoom(Math.exp(event.deltaY * pixels * 0.0016), timeAt(panel, px));
  event.preventDefault();
  draw();
  onMove(panel, event);
}

function onPress(panel, event) {
  if (event.button !== 0) return;
  const [px, py] = pointOn(panel.canvas, event);
  panel.drag = { px, py, distance: 0 };
  panel.plot.setPointerCapture(event.pointerId);
  panel.plot.classList.add("moving");
}

/** A press without a drag selects. */
function onRelease(panel, event) {
  const isClick = event.type === "pointerup" && panel.drag?.distance < 5;
  if (isClick) select(panel, spanAt(panel, ...pointOn(panel.canvas, event)));
  panel.drag = null;
  panel.plot.classList.remove("moving");
}

function onLeave() {
  view.hover = view.cursor = view.curveRank = null;
  byId("tip").hidden = true;
  draw(false);
}

function onMove(panel, event) {
  const [px, py] = pointOn(panel.canvas, event);
  const { drag } = panel;
  if (drag) {
    const by = ((drag.px - px) / panel.plotWidth) * (view.to - view.from);
    scroll(panel, drag.py - py);
    show(view.from + by, view.to + by);
    drag.distance += Math.abs(drag.px - px) + Math.abs(drag.py - py);
    [drag.px, drag.py] = [px, py];
  }
  view.curveRank = null;
  view.cursor = px >= LEFT && px <= LEFT + panel.plotWidth ? timeAt(panel, px) : null;
  setHover(panel, drag ? -1 : spanAt(panel, px, py));
  showTip(event);
  draw(false);
}

function onCurveMove(panel, event) {
  const [px, py] = pointOn(panel.curve.canvas, event);
  const inside = px >= LEFT && px <= LEFT + panel.plotWidth;
  view.cursor = inside ? timeAt(panel, px) : null;
  view.curveRank = inside ? curveAt(panel, px, py) : null;
  draw(false);
}

/** Arrow keys walk from instruction to instruction, and with Shift they move. */
function onKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.target.matches("select, input:not([type=checkbox])")) return;
  const walks = !event.shiftKey;
  const acts = {
    ArrowLeft: () => (walks ? walk(-1, 0) : pan(-0.1)),
    ArrowRight: () => (walks ? walk(1, 0) : pan(0.1)),
    ArrowUp: () => (walks ? walk(0, -1) : panels.some((p) => scroll(p, -p.pitch))),
    ArrowDown: () => (walks ? walk(0, 1) : panels.some((p) => scroll(p, p.pitch))),
    "+": () => zoom(0.8),
    "=": () => zoom(0.8),
    "-": () => zoom(1.25),
    0: showAll,
    Home: showAll,
    "[": () => changeStep(-1),
    "]": () => changeStep(1),
    "/": () => byId("find").select(),
    Escape: () => {
      endSearch();
      select(panels[0], -1);
    },
  };
  const act = acts[event.key];
  if (!act || act() === false) return;
  event.preventDefault();
  draw();
}

