// ---- text: times, headers, legend ----

const UNITS = [
  [1e9, "s"],
  [1e6, "ms"],
  [1e3, "µs"],
  [1, "ns"],
];
const unitOf = (ns) => UNITS.find(([size]) => Math.abs(ns) >= size) ?? UNITS[3];
const number = (value, digits = 6) => String(Number(value.toPrecision(digits)));
/** Costs without a unit are stored as if they were seconds. */
function duration(ns) {
  if (!DATA.unit) return number(ns / 1e9);
  const [size, unit] = unitOf(ns);
  const value = ns / size;
  return `${value.toFixed(size === 1 ? 0 : Math.max(0, 3 - Math.floor(Math.log10(Math.abs(value) || 1))))} ${unit}`;
}
const percent = (share) => `${(100 * share).toFixed(IS_SCHEDULE ? 2 : 1)} %`;
const make = (tag, text, className) =>
  Object.assign(document.createElement(tag), { textContent: text ?? "", className: className ?? "" });
const fillOf = ([op, chunk]) => looks[op][dark.matches ? "dark" : "light"][chunk];
const textColourOf = ([op, chunk]) => looks[op][dark.matches ? "darkText" : "lightText"][chunk];

function swatch(fill) {
  const box = make("i", "", "swatch");
  box.style.background = fillOf(fill);
  return box;
}

const MEMORY = {
  true: { meaning: "Most bytes that a rank holds at once, as planned", of: "planned bytes", title: "planned bytes held" },
  false: {
    meaning: "Most activations that a rank saves at once, in microbatches of all its layers",
    of: "microbatches saved",
    title: "microbatches saved",
  },
};
const BYTES = [
  [2 ** 30, "GiB"],
  [2 ** 20, "MiB"],
  [2 ** 10, "KiB"],
  [1, "B"],
];
/** A value of a memory curve, with few digits. */
function amount(panel, value, digits = 6) {
  if (!panel.memory.in_bytes) return number(value, digits);
  const [size, unit] = BYTES.find(([least]) => value >= least) ?? BYTES[3];
  return `${number(value / size, 3)} ${unit}`;
}

const MEASURES = {
  makespan: "First compute start to last compute end over all ranks; its bubble is that of a step with a barrier",
  longest: "First compute start to last compute end of the busiest rank; its bubble is that of a step without a barrier",
};

/** Name, step and figures of a panel. */
function showHeader(panel) {
  const { step, data } = panel;
  const source = data.source[0].toUpperCase() + data.source.slice(1);
  const title = make("h2", IS_SCHEDULE ? panel.program.name : source);
  const about = data.source === "simulated" ? `step ${step.step}, at its measured costs` : `step ${step.step}`;
  if (!IS_SCHEDULE) title.append(make("span", about));
  const figures = make("dl", "", "figures");
  const add = (term, meaning, ...values) => {
    const pair = make("div");
    const value = make("dd");
    value.append(...values);
    pair.append(make("dt", term), value);
    pair.title = meaning;
    figures.append(pair);
  };
  for (const [term, meaning] of Object.entries(step.bubble ? MEASURES : {})) {
    const bubble = [make("span", "bubble"), percent(step.bubble[term])];
    add(term, meaning, duration(step[term] * 1e9), ...bubble, ...difference(panel, (p) => p.step[term]));
  }
  if (panel.memory) {
    const peakOf = (p) => p.memory.peak * p.memory.unit;
    const { meaning, of } = MEMORY[panel.memory.in_bytes];
    add("peak", meaning, amount(panel, peakOf(panel)), make("span", of), ...difference(panel, peakOf));
  }
  panel.header.replaceChildren(title, figures, ...pathSummary(panel));
}

/** What a step's critical path is made of, longest first. */
function pathSummary(panel) {
  if (IS_SCHEDULE || !panel.critical || !byId("critical").checked) return [];
  const parts = new Map();
  for (const { part, start, end } of panel.critical) parts.set(part, (parts.get(part) ?? 0) + end - start);
  const length = panel.critical.at(-1).end - panel.critical[0].start;
  const line = make("p", "", "path");
  const ordered = [...parts].filter(([, time]) => time > 0).sort((a, b) => b[1] - a[1]);
  for (const [part, time] of [["critical path", length], ...ordered]) {
    const pair = make("span", `${part} `);
    pair.append(make("b", duration(time)));
    line.append(pair);
  }
  line.title = "host: an instruction could have run, and had not been issued";
  return [line];
}

/** How a figure of a schedule differs from that of the first schedule. */
function difference(panel, figure) {
  if (!IS_SCHEDULE || panel === panels[0]) return [];
  const [before, after] = [figure(panels[0]), figure(panel)];
  if (Math.abs(after - before) < 1e-9 * before) return [make("em", "the same")];
  const sign = after > before ? "+" : "−";
  const size = Math.abs(after - before);
  return [make("em", `${sign}${number(size)} (${sign}${((100 * size) / before).toFixed(2)} %)`)];
}

const ROW_OF_OP = {};
kinds.op.forEach((op, i) => (ROW_OF_OP[op] ??= rowOf(kinds.lane[i])));
function rowOf(lane) {
  return { SEND: "send", RECV: "receive" }[lane.slice(0, 4)] ?? lane;
}

function showLegend() {
  const groups = new Map();
  for (const op of OPS) groups.set(looks[op].label, [...(groups.get(looks[op].label) ?? []), op]);
  const items = [...groups].map(([label, ops]) => {
    const item = make("li");
    const fills = FILLS.filter(([op]) => ops.includes(op));
    item.append(...fills.map(swatch), ...(ops[0].length < 3 ? [make("b", ops[0])] : []), label);
    item.title = ops.join(", ");
    item.hidden = IS_SCHEDULE && ops.every((op) => hiddenRows.has(ROW_OF_OP[op]));
    return item;
  });
  // Later chunks are closer to the background.
  const shade = dark.matches ? "darker" : "lighter";
  const chunks = CHUNKS === 2 ? `${shade}: a rank's second chunk` : `a rank's chunks 1 to ${CHUNKS}: ever ${shade}`;
  byId("legend").replaceChildren(...items, ...(CHUNKS > 1 ? [make("li", chunks)] : []));
}

