// ---- start ----

function openPanel(data) {
  const section = make("section");
  const header = make("header");
  const plot = make("div", "", "plot");
  const canvas = make("canvas");
  const base = make("canvas").getContext("2d");
  const panel = { data, header, plot, canvas, context: canvas.getContext("2d"), base, scroll: 0, drag: null, version: 0 };
  plot.tabIndex = 0;
  plot.setAttribute("role", "img");
  plot.setAttribute("aria-label", `${data.source} timeline, one row per rank`);
  plot.append(canvas);
  section.append(header, plot);
  if (data.program) openCurve(panel, section);
  byId("panels").append(section);
  plot.addEventListener("wheel", (event) => onWheel(panel, event), { passive: false });
  plot.addEventListener("pointermove", (event) => onMove(panel, event));
  plot.addEventListener("pointerdown", (event) => {
    if (event.button !== 0) return;
    const [px, py] = pointOn(canvas, event);
    panel.drag = { px, py, distance: 0 };
    plot.setPointerCapture(event.pointerId);
    plot.classList.add("moving");
  });
  for (const end of ["pointerup", "pointercancel"])
    plot.addEventListener(end, (event) => {
      // A press without a drag selects.
      if (IS_SCHEDULE && end === "pointerup" && panel.drag?.distance < 5) {
        const found = spanAt(panel, ...pointOn(canvas, event));
        select(panel, found ? found.track.first + found.index : -1);
      }
      panel.drag = null;
      plot.classList.remove("moving");
    });
  plot.addEventListener("pointerleave", () => {
    view.cursor = null;
    setHover(null);
    byId("tip").hidden = true;
    draw(false);
  });
  plot.addEventListener("dblclick", showAll);
  return panel;
}

function openCurve(panel, section) {
  const canvas = make("canvas", "", "curve");
  const base = make("canvas").getContext("2d");
  panel.curve = { canvas, context: canvas.getContext("2d"), base, version: -1, strong: -1 };
  canvas.setAttribute("role", "img");
  canvas.setAttribute("aria-label", "microbatches saved by each rank over time");
  section.append(canvas);
  canvas.addEventListener("pointermove", (event) => onCurveMove(panel, event));
  canvas.addEventListener("pointerleave", () => {
    view.cursor = view.curveRank = null;
    draw(false);
  });
}

function toggleRow(row, shown) {
  hiddenRows[shown ? "delete" : "add"](row);
  showRows();
}

/** Draws the rows that are not hidden. */
function showRows() {
  for (const box of byId("rows").querySelectorAll("input")) box.checked = !hiddenRows.has(box.value);
  showLegend();
  arrange();
}

function addRowToggles() {
  for (const row of ROWS.filter((name) => name !== "compute")) {
    const label = make("label", "", "row");
    const box = Object.assign(make("input"), { type: "checkbox", value: row, checked: !hiddenRows.has(row) });
    box.addEventListener("change", () => toggleRow(row, box.checked));
    label.append(box, row);
    byId("rows").append(label);
  }
}

function start() {
  panels = DATA.panels.map(openPanel);
  addRowToggles();
  byId("step").append(...STEPS.map((n) => Object.assign(make("option", String(n)), { value: String(n) })));
  byId("steps").hidden = STEPS.length < 2;
  byId("step").addEventListener("change", (event) => showStep(Number(event.target.value)));
  byId("earlier").addEventListener("click", () => changeStep(-1));
  byId("later").addEventListener("click", () => changeStep(1));
  byId("find").addEventListener("input", (event) => find(event.target.value));
  byId("find").addEventListener("keydown", onFindKey);
  byId("previous").addEventListener("click", () => stepMatch(-1));
  byId("next").addEventListener("click", () => stepMatch(1));
  byId("height").addEventListener("input", arrange);
  byId("in").addEventListener("click", () => zoom(0.7));
  byId("out").addEventListener("click", () => zoom(1 / 0.7));
  byId("reset").addEventListener("click", showAll);
  document.addEventListener("keydown", onKey);
  dark.addEventListener("change", () => {
    readTheme();
    showLegend();
    if (IS_SCHEDULE) showSelection();
    draw();
  });
  byId("paths").hidden = byId("selection").hidden = byId("walking").hidden = !IS_SCHEDULE;
  byId("critical").addEventListener("change", () => {
    panels.forEach(updateHighlights);
    draw();
  });
  addEventListener("resize", arrange);
  readTheme();
  showStep(STEPS.at(-1));
}
start();
