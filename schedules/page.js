// ---- what is under the pointer ----

/** The span at a point of the canvas, up to 3 pixels beside it, or null. */
function spanAt(panel, px, py) {
  const index = Math.floor((py - TOP + panel.scroll) / panel.pitch);
  const rank = panel.ranks[index];
  if (!rank || py < TOP || px < LEFT || px > LEFT + panel.plotWidth) return null;
  for (const track of rank.tracks) {
    const at = place(panel, index, track.row);
    if (!at || py < at[0] || py > at[0] + at[1]) continue;
    return nearest(panel, track, px, (py - at[0]) / at[1], rank);
  }
  return null;
}

function nearest(panel, track, px, height, rank) {
  const time = timeAt(panel, px);
  const reach = timeAt(panel, px + 3) - time;
  let found = null;
  let least = Infinity;
  for (let i = firstAt(track, time - reach); i < track.start.length && track.start[i] <= time + reach; i++) {
    if (track.depth && track.depth[i] > 1 && Math.floor(height * track.depth[i]) !== track.level[i]) continue;
    const away = Math.max(track.start[i] - time, time - track.end[i], 0);
    if (away <= reach && away < least) {
      found = { panel, rank, track, index: i, kind: track.kind[i] };
      least = away;
    }
  }
  return found;
}

function hover(found) {
  const old = view.hover;
  if (old?.track === found?.track && old?.index === found?.index) return;
  view.hover = found;
  view.lit = view.same = null;
  if (!found) return;
  const name = kinds.name[found.kind];
  const microbatch = kinds.microbatch[found.kind];
  view.same = Uint8Array.from(kinds.name, (other) => (other === name ? 1 : 0));
  view.lit = microbatch < 0 ? view.same : Uint8Array.from(kinds.microbatch, (other) => (other === microbatch ? 1 : 0));
}

/** Durations of the same instruction in the other panel: of the same rank if it ran there, else of every rank. */
function elsewhere(found) {
  const other = panels.find((panel) => panel !== found.panel);
  if (!other) return null;
  const all = other.ranks.map((r) => [
    r.rank,
    r.tracks.flatMap((t) => {
      const lengths = [];
      t.kind.forEach((kind, i) => {
        if (view.same[kind]) lengths.push(t.end[i] - t.start[i]);
      });
      return lengths;
    }),
  ]);
  const here =
    other.ranks.length === found.panel.ranks.length &&
    all.find(([rank, lengths]) => rank === found.rank.rank && lengths.length);
  const lengths = here ? here[1] : all.flatMap(([, some]) => some);
  return lengths.length ? [other.data.source, lengths] : null;
}

function compared(found, length) {
  const other = elsewhere(found);
  if (!other) return [];
  const [source, lengths] = other;
  const low = Math.min(...lengths);
  const high = Math.max(...lengths);
  if (low !== high) return [[source, `${duration(low)} to ${duration(high)}`]];
  const change =
    low > 0 && length > 0
      ? ` (here ${length >= low ? "+" : "−"}${Math.abs(100 * (length / low - 1)).toFixed(1)} %)`
      : "";
  return [[source, duration(low) + change]];
}

function tell(event) {
  const tip = byId("tip");
  const found = view.hover;
  tip.hidden = !found;
  if (!found) return;
  const { track, index, kind, rank, panel } = found;
  const start = track.start[index];
  const length = track.end[index] - start;
  const number = (name) => (kinds[name][kind] < 0 ? [] : [[name, String(kinds[name][kind])]]);
  const head = make("p");
  head.append(swatch(kinds.op[kind]), make("b", kinds.name[kind]), make("span", looks[kinds.op[kind]].label));
  const lines = [
    ["rank", String(rank.rank)],
    ["lane", kinds.lane[kind]],
    ...number("stage"),
    ...number("microbatch"),
    ...number("peer"),
    ["step", String(panel.step.step)],
    ["start", duration(start)],
    ["end", duration(start + length)],
    ["duration", duration(length)],
    ...compared(found, length),
  ];
  const list = make("dl");
  for (const [term, value] of lines) list.append(make("dt", term), make("dd", value));
  tip.replaceChildren(head, list);
  const { offsetWidth: wide, offsetHeight: tall } = tip;
  const fits = event.clientX + 18 + wide <= innerWidth - 8;
  tip.style.left = `${fits ? event.clientX + 18 : Math.max(8, event.clientX - wide - 18)}px`;
  tip.style.top = `${clamp(event.clientY + 14, 8, Math.max(8, innerHeight - tall - 8))}px`;
}

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
function zoom(factor, around = (view.from + view.to) / 2) {
  const whole = (view.last - view.first) * 1.04;
  const kept = clamp(factor, Math.min(100, whole) / (view.to - view.from), whole / (view.to - view.from));
  show(around - (around - view.from) * kept, around + (view.to - around) * kept);
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
    [held.px, held.py] = [px, py];
  }
  view.cross = px >= LEFT && px <= LEFT + panel.plotWidth ? timeAt(panel, px) : null;
  hover(held ? null : spanAt(panel, px, py));
  tell(event);
  draw(false);
}

function onKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.matches("select, input[type=range]")) return;
  const acts = {
    ArrowLeft: () => pan(-0.1),
    ArrowRight: () => pan(0.1),
    "+": () => zoom(0.8),
    "=": () => zoom(0.8),
    "-": () => zoom(1.25),
    ArrowUp: () => panels.some((p) => scroll(p, -p.pitch)),
    ArrowDown: () => panels.some((p) => scroll(p, p.pitch)),
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

// ---- start ----

const strips = make("canvas").getContext("2d");

const steps = [...new Set(DATA.panels.at(-1).steps.map((s) => s.step))];
function turn(by) {
  const wanted = steps[steps.indexOf(step) + by];
  if (wanted !== undefined) choose(wanted);
}

function openPanel(data) {
  const section = make("section");
  const header = make("header");
  const plot = make("div", "", "plot");
  const canvas = make("canvas");
  const panel = {
    data,
    header,
    plot,
    canvas,
    context: canvas.getContext("2d"),
    base: make("canvas").getContext("2d"),
    scroll: 0,
    held: null,
    outlines: [],
  };
  plot.tabIndex = 0;
  plot.setAttribute("role", "img");
  plot.setAttribute("aria-label", `${data.source} timeline, a row a rank`);
  plot.append(canvas);
  section.append(header, plot);
  byId("panels").append(section);
  plot.addEventListener("wheel", (event) => onWheel(panel, event), { passive: false });
  plot.addEventListener("pointermove", (event) => onMove(panel, event));
  plot.addEventListener("pointerdown", (event) => {
    const [px, py] = pointOf(panel, event);
    if (event.button === 0) {
      panel.held = { px, py };
      plot.setPointerCapture(event.pointerId);
      plot.classList.add("moving");
    }
  });
  for (const end of ["pointerup", "pointercancel"])
    plot.addEventListener(end, () => {
      panel.held = null;
      plot.classList.remove("moving");
    });
  plot.addEventListener("pointerleave", () => {
    view.cross = null;
    hover(null);
    byId("tip").hidden = true;
    draw(false);
  });
  plot.addEventListener("dblclick", reset);
  return panel;
}

function toggles() {
  for (const row of ROWS.filter((name) => name !== "compute")) {
    const label = make("label", "", "row");
    const box = Object.assign(make("input"), { type: "checkbox", checked: true });
    box.addEventListener("change", () => {
      hidden[box.checked ? "delete" : "add"](row);
      arrange();
    });
    label.append(box, row);
    byId("rows").append(label);
  }
}

function start() {
  panels = DATA.panels.map(openPanel);
  toggles();
  byId("step").append(...steps.map((n) => Object.assign(make("option", String(n)), { value: String(n) })));
  byId("steps").hidden = steps.length < 2;
  byId("step").addEventListener("change", (event) => choose(Number(event.target.value)));
  byId("earlier").addEventListener("click", () => turn(-1));
  byId("later").addEventListener("click", () => turn(1));
  byId("height").addEventListener("input", arrange);
  byId("in").addEventListener("click", () => zoom(0.7));
  byId("out").addEventListener("click", () => zoom(1 / 0.7));
  byId("reset").addEventListener("click", reset);
  document.addEventListener("keydown", onKey);
  dark.addEventListener("change", () => {
    readTheme();
    legend();
    draw();
  });
  addEventListener("resize", arrange);
  readTheme();
  choose(steps.at(-1));
}
start();
