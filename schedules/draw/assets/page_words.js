// ---- words ----

const UNITS = [
  [1e9, "s"],
  [1e6, "ms"],
  [1e3, "µs"],
  [1, "ns"],
];
const unitOf = (ns) => UNITS.find(([size]) => Math.abs(ns) >= size) ?? UNITS[3];
/** Costs without a unit are kept as if they were seconds. */
const plain = (value) => String(Number(value.toPrecision(6)));
function duration(ns) {
  if (!DATA.unit) return plain(ns / 1e9);
  const [size, unit] = unitOf(ns);
  const value = ns / size;
  return `${value.toFixed(size === 1 ? 0 : Math.max(0, 3 - Math.floor(Math.log10(Math.abs(value) || 1))))} ${unit}`;
}
const percent = (share) => `${(100 * share).toFixed(LINKED ? 2 : 1)} %`;
const make = (tag, text, className) =>
  Object.assign(document.createElement(tag), { textContent: text ?? "", className: className ?? "" });
const fillOf = ([op, chunk]) => looks[op][dark.matches ? "dark" : "light"][chunk];
const inkOf = ([op, chunk]) => looks[op][dark.matches ? "darkInk" : "lightInk"][chunk];

function swatch(paint) {
  const box = make("i");
  box.style.background = fillOf(paint);
  return box;
}

function definitions(pairs, className) {
  const list = make("dl", "", className);
  for (const [term, values, title] of pairs) {
    const pair = make("div");
    const value = make("dd");
    value.append(...values);
    pair.append(make("dt", term), value);
    pair.title = title;
    list.append(pair);
  }
  return list;
}

const MEASURES = {
  makespan: "First compute start to last compute end over all ranks; its bubble is what a step with a barrier pays",
  longest: "First compute start to last compute end of the busiest rank; its bubble holds where no barrier ends a step",
};

function headline(panel) {
  const { step: s, data } = panel;
  const title = data.program?.name ?? data.source[0].toUpperCase() + data.source.slice(1);
  const name = make("h2", title);
  if (!data.program) name.append(make("span", `step ${s.step}`));
  const figures = Object.entries(s.bubble ? MEASURES : {}).map(([term, meaning]) => {
    const values = [duration(s[term] * 1e9), make("span", "bubble"), percent(s.bubble[term])];
    return [term, [...values, ...difference(panel, (p) => p.step[term])], meaning];
  });
  if (panel.memory) {
    const { most, unit } = panel.memory;
    const meaning = "Activations that the fullest rank keeps at its peak, in microbatches of a whole rank";
    const kept = make("span", "microbatches kept");
    figures.push(["peak", [plain(most * unit), kept, ...difference(panel, (p) => p.memory.most * p.memory.unit)], meaning]);
  }
  panel.header.replaceChildren(name, definitions(figures, "figures"));
}

/** How a schedule's figure differs from that of the one above it. */
function difference(panel, figure) {
  if (!LINKED || panel === panels[0]) return [];
  const [before, after] = [figure(panels[0]), figure(panel)];
  if (Math.abs(after - before) < 1e-9 * before) return [make("em", "the same")];
  const sign = after > before ? "+" : "−";
  const size = Math.abs(after - before);
  return [make("em", `${sign}${plain(size)} (${sign}${((100 * size) / before).toFixed(2)} %)`)];
}

function legend() {
  const groups = new Map();
  for (const op of OPS) groups.set(looks[op].label, [...(groups.get(looks[op].label) ?? []), op]);
  const items = [...groups].map(([label, ops]) => {
    const item = make("li");
    const shades = PAINTS.filter(([op]) => ops.includes(op));
    item.append(...shades.map(swatch), ...(ops[0].length < 3 ? [make("b", ops[0])] : []), label);
    item.title = ops.join(", ");
    item.hidden = LINKED && ops.every((op) => OP_ROW[op] && hidden.has(OP_ROW[op]));
    return item;
  });
  const note = { 1: [], 2: ["paler: a rank's second chunk"] }[CHUNKS] ?? [`a rank's chunks 1 to ${CHUNKS}: ever paler`];
  byId("legend").replaceChildren(...items, ...note.map((text) => make("li", text)));
}
const OP_ROW = {};
kinds.op.forEach((op, i) => (OP_ROW[op] ??= rowOf(kinds.lane[i])));
function rowOf(lane) {
  return { SEND: "send", RECV: "receive" }[lane.slice(0, 4)] ?? lane;
}
