// ---- start ----

function openPanel(data) {
  const header = make("header");
  const plot = make("div", "", "plot");
  const panel = { data, header, plot, ...openCanvas() };
  const section = make("section");
  plot.tabIndex = 0;
  describe(plot, `${data.source} timeline, one row per rank`);
  plot.append(panel.canvas);
  section.append(header, plot);
  section.append(openCurve(panel));
  byId("panels").append(section);
  listen(plot, {
    pointermove: (event) => onMove(panel, event),
    pointerdown: (event) => onPress(panel, event),
    pointerup: (event) => onRelease(panel, event),
    pointercancel: (event) => onRelease(panel, event),
    pointerleave: onLeave,
    dblclick: showAll,
  });
  plot.addEventListener("wheel", (event) => onWheel(panel, event), { passive: false });
  return panel;
}

function openCurve(panel) {
  panel.curve = openCanvas();
  panel.curve.canvas.className = "curve";
  describe(panel.curve.canvas, "memory of each rank over time");
  listen(panel.curve.canvas, { pointermove: (event) => onCurveMove(panel, event), pointerleave: onLeave });
  return panel.curve.canvas;
}

function describe(element, label) {
  element.setAttribute("role", "img");
  element.setAttribute("aria-label", label);
}

function listen(element, acts) {
  for (const [name, act] of Object.entries(acts)) element.addEventListener(name, act);
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
    listen(box, { change: () => toggleRow(row, box.checked) });
    label.append(box, row);
    byId("rows").append(label);
  }
}

/** Marks the critical paths, and says what they are made of, or no longer. */
function showPaths() {
  panels.forEach(updateHighlights);
  panels.forEach(showHeader);
  arrange();
}

function start() {
  panels = DATA.panels.map(openPanel);
  addRowToggles();
  byId("step").append(...STEPS.map((n) => Object.assign(make("option", String(n)), { value: String(n) })));
  byId("steps").hidden = STEPS.length < 2;
  const clicks = {
    earlier: () => changeStep(-1),
    later: () => changeStep(1),
    previous: () => stepMatch(-1),
    next: () => stepMatch(1),
    in: () => zoom(0.7),
    out: () => zoom(1 / 0.7),
    reset: showAll,
  };
  for (const [id, click] of Object.entries(clicks)) listen(byId(id), { click });
  listen(byId("step"), { change: (event) => showStep(Number(event.target.value)) });
  listen(byId("find"), { input: (event) => find(event.target.value), keydown: onFindKey });
  listen(byId("height"), { input: arrange });
  document.addEventListener("keydown", onKey);
  dark.addEventListener("change", () => {
    readTheme();
    showLegend();
    showSelection();
    draw();
  });
  byId("paths").hidden = !programs.length;
  listen(byId("critical"), { change: showPaths });
  addEventListener("resize", arrange);
  readTheme();
  showStep(STEPS.at(-1));
}
start();
