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
    chosen: null,
    marked: null,
    outlines: [],
    version: 0,
  };
  plot.tabIndex = 0;
  plot.setAttribute("role", "img");
  plot.setAttribute("aria-label", `${data.source} timeline, a row a rank`);
  plot.append(canvas);
  section.append(header, plot);
  if (data.program) openCurve(panel, section);
  byId("panels").append(section);
  plot.addEventListener("wheel", (event) => onWheel(panel, event), { passive: false });
  plot.addEventListener("pointermove", (event) => onMove(panel, event));
  plot.addEventListener("pointerdown", (event) => {
    const [px, py] = pointOf(panel, event);
    if (event.button === 0) {
      panel.held = { px, py, far: 0 };
      plot.setPointerCapture(event.pointerId);
      plot.classList.add("moving");
    }
  });
  for (const end of ["pointerup", "pointercancel"])
    plot.addEventListener(end, (event) => {
      // A press that did not move chooses.
      if (LINKED && end === "pointerup" && panel.held?.far < 5) {
        const found = spanAt(panel, ...pointOf(panel, event));
        pick(panel, found ? found.track.first + found.index : -1);
      }
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

function openCurve(panel, section) {
  const canvas = make("canvas", "", "curve");
  const context = canvas.getContext("2d");
  panel.curve = { canvas, context, base: make("canvas").getContext("2d"), drawn: -1, strong: -1 };
  canvas.setAttribute("role", "img");
  canvas.setAttribute("aria-label", "microbatches kept by each rank over time");
  section.append(canvas);
  canvas.addEventListener("pointermove", (event) => onCurve(panel, event));
  canvas.addEventListener("pointerleave", () => {
    view.cross = view.rank = null;
    draw(false);
  });
}

function toggle(row, shown) {
  hidden[shown ? "delete" : "add"](row);
  for (const box of byId("rows").querySelectorAll("input")) box.checked = !hidden.has(box.value);
  legend();
  arrange();
}

function toggles() {
  for (const row of ROWS.filter((name) => name !== "compute")) {
    const label = make("label", "", "row");
    const box = Object.assign(make("input"), { type: "checkbox", value: row, checked: !hidden.has(row) });
    box.addEventListener("change", () => toggle(row, box.checked));
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
    if (LINKED) explain();
    draw();
  });
  byId("paths").hidden = byId("chosen").hidden = byId("walking").hidden = !LINKED;
  byId("critical").addEventListener("change", () => {
    panels.forEach(remark);
    draw();
  });
  addEventListener("resize", arrange);
  readTheme();
  if (LINKED) explain();
  choose(steps.at(-1));
}
start();
