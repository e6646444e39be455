// ---- the mesh: a tile per rank; columns are pp, rows dp and ep, and within a cell columns are tp, rows cp ----

import { byId, draw, make } from "./dom.js";

export const AXES = ["pp", "dp", "tp", "cp", "ep"];
export const STATES = {
  running: ["▶", "running"],
  waiting: ["…", "waits for another rank"],
  idle: ["–", "between steps"],
  starting: ["○", "starting"],
  hung: ["!", "hung"],
  lost: ["✕", "lost"],
};
export const OVER = ["finished", "stopped", "failed"]; // states of a run
let shape = "";
let tiles = [];
let current = null; // the state that is shown
let onChoice = () => {};
export let chosen = null;

export function onChoose(act) {
  onChoice = act;
}

export function choose(rank, focus = false) {
  chosen = rank;
  const at = rank ?? Number(tiles.find((tile) => tile.tabIndex === 0)?.dataset.rank ?? 0);
  for (const tile of tiles) tile.tabIndex = Number(tile.dataset.rank) === at ? 0 : -1;
  if (focus && rank !== null) tiles[rank].focus();
  showGroups();
  onChoice();
}

/** The state of a rank in words. */
export function wordsOf(rank) {
  return OVER.includes(current.state) ? "ended" : STATES[rank.state]?.[1] ?? rank.state;
}

/** The ranks that differ from one along an axis alone, itself included. */
export function groupOf(rank, axis) {
  return current.ranks.filter((other) => AXES.every((each) => each === axis || other[each] === rank[each]));
}

export function along(rank, axis, to) {
  return groupOf(rank, axis).find((other) => other[axis] === to);
}

export function place(rank) {
  return AXES.filter((axis) => current.axes[axis] > 1).map((axis) => axis + rank[axis]).join(" ") || "one rank";
}

export function showMesh(state) {
  current = state;
  const now = JSON.stringify([state.axes, state.ranks.length]);
  if (now !== shape) {
    shape = now;
    build();
  }
  for (const rank of state.ranks) fill(tiles[rank.rank], rank);
  if (chosen !== null && !tiles[chosen]) chosen = null;
  showGroups();
}

function build() {
  const { pp, dp, tp, cp, ep } = current.axes;
  const mesh = byId("mesh");
  const [wide, high] = [pp * tp, dp * ep * cp];
  mesh.className = wide > 32 || high > 16 ? "tiny" : wide > 8 || high > 8 ? "small" : "";
  mesh.style.gridTemplateColumns = `auto repeat(${pp}, max-content)`;
  mesh.replaceChildren(make("span"));
  tiles = [];
  for (let p = 0; p < pp; p++) mesh.append(make("span", pp > 1 ? `pp${p}` : "", "head top"));
  for (let row = 0; row < dp * ep; row++) {
    const [d, e] = [Math.floor(row / ep), row % ep];
    mesh.append(make("span", [dp > 1 && `dp${d}`, ep > 1 && `ep${e}`].filter(Boolean).join(" "), "head"));
    for (let p = 0; p < pp; p++) {
      const cell = make("div", "", "cell");
      cell.style.gridTemplateColumns = `repeat(${tp}, auto)`;
      const inside = current.ranks.filter((rank) => rank.pp === p && rank.dp === d && rank.ep === e);
      inside.sort((one, other) => one.cp - other.cp || one.tp - other.tp);
      for (const rank of inside) cell.append(tileOf(rank, { x: p * tp + rank.tp, y: row * cp + rank.cp }));
      mesh.append(cell);
    }
  }
  if (tiles.length) tiles[0].tabIndex = 0;
  mesh.append(draw("svg", { "aria-hidden": "true" }));
}

function tileOf(rank, at) {
  const tile = make("button", "", "tile");
  Object.assign(tile.dataset, { rank: rank.rank, ...at });
  tile.tabIndex = -1;
  tile.append(make("b", String(rank.rank)), make("i"), make("span"), make("em"));
  tile.addEventListener("click", () => choose(chosen === rank.rank ? null : rank.rank));
  tiles[rank.rank] = tile;
  return tile;
}

function fill(tile, rank) {
  const sign = STATES[rank.state]?.[0] ?? "?";
  const [, glyph, doing] = tile.children;
  glyph.textContent = sign;
  doing.textContent = rank.instruction;
  tile.dataset.state = rank.state;
  const waits = rank.waits ? `, waits for rank ${rank.waits.for.join(", ")}` : "";
  const label = `rank ${rank.rank}, ${place(rank)}: ${wordsOf(rank)}${rank.instruction && ` at ${rank.instruction}`}${waits}`;
  if (tile.title !== label) tile.title = label;
}

/** Marks the groups of the chosen rank, and draws what it sends and receives; of no rank, who waits for whom. */
function showGroups() {
  if (!tiles.length) return;
  const picture = byId("mesh").lastElementChild;
  picture.replaceChildren(arrowHeads());
  const rank = chosen === null ? null : current.ranks[chosen];
  for (const [number, tile] of tiles.entries()) {
    const shared = rank ? AXES.filter((axis) => isAlong(current.ranks[number], rank, axis)) : [];
    tile.children[3].textContent = shared.join(" ");
    tile.dataset.axis = shared[0] ?? "";
    const groups = shared.length ? `, in the ${shared.join(", ")} group of rank ${chosen}` : "";
    if (tile.ariaLabel !== tile.title + groups) tile.ariaLabel = tile.title + groups;
    tile.setAttribute("aria-pressed", String(number === chosen));
  }
  byId("mesh").classList.toggle("chosen", rank !== null);
  if (rank) showFlow(picture, rank);
  const isTiny = byId("mesh").classList.contains("tiny"); // some of so many ranks always wait for a moment
  for (const each of rank ? [rank] : current.ranks.filter(({ state }) => !isTiny || state !== "running"))
    for (const other of each.waits?.for ?? []) arrow(picture, "wait", straight(tiles[each.rank], tiles[other]));
}

function isAlong(other, rank, axis) {
  return other !== rank && AXES.every((each) => (each === axis) !== (other[each] === rank[each]));
}

function showFlow(picture, rank) {
  const arcs = new Set();
  for (const send of current.flow.sends) {
    if (send.from !== rank.pp && send.to !== rank.pp) continue;
    const [from, to] = [along(rank, "pp", send.from), along(rank, "pp", send.to)];
    const id = [from.rank, to.rank, send.op].join();
    if (arcs.has(id)) continue;
    arcs.add(id);
    arrow(picture, send.op === "SEND_F" ? "forward" : "backward", arc(tiles[from.rank], tiles[to.rank], send.op));
  }
  for (const axis of AXES.slice(1)) {
    const group = groupOf(rank, axis).sort((one, other) => one[axis] - other[axis]);
    for (let k = 1; k < group.length; k++)
      picture.append(draw("path", { class: `link ${axis}`, d: bracket(tiles[group[k - 1].rank], tiles[group[k].rank], axis) }));
  }
}

function arrowHeads() {
  const defs = draw("defs", {});
  for (const kind of ["forward", "backward", "wait"]) {
    const head = { id: `head-${kind}`, viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 7, markerHeight: 7, orient: "auto" };
    const marker = draw("marker", { ...head, markerUnits: "userSpaceOnUse", class: kind });
    marker.append(draw("path", { d: "M0 0L8 4L0 8z" }));
    defs.append(marker);
  }
  return defs;
}

function arrow(picture, kind, d) {
  picture.append(draw("path", { class: `flow ${kind}`, d, "marker-end": `url(#head-${kind})` }));
}

function boxOf(tile) {
  const [left, top] = [tile.offsetLeft, tile.offsetTop];
  return { left, top, right: left + tile.offsetWidth, bottom: top + tile.offsetHeight, x: left + tile.offsetWidth / 2, y: top + tile.offsetHeight / 2 };
}

/** Activations go above the tiles, gradients below. */
function arc(from, to, op) {
  const [a, b] = [boxOf(from), boxOf(to)];
  const [side, out] = op === "SEND_F" ? ["top", -1] : ["bottom", 1];
  const aside = Math.sign(b.x - a.x) * 0.16 * (a.right - a.left);
  const high = a[side] + out * Math.min(22, 12 + Math.abs(b.x - a.x) / 40);
  return `M${a.x + aside} ${a[side]}C${a.x + 2 * aside} ${high} ${b.x - 2 * aside} ${high} ${b.x - aside} ${b[side] + out}`;
}

/** Lines of collectives: of dp at the left of the tiles, of ep at the right, of tp and cp between neighbours. */
function bracket(from, to, axis) {
  const [a, b] = [boxOf(from), boxOf(to)];
  if (axis === "tp") return `M${a.right} ${a.y}H${b.left}`;
  if (axis === "cp") return `M${a.x} ${a.bottom}V${b.top}`;
  const [side, out] = axis === "dp" ? ["left", -12] : ["right", 12];
  return `M${a[side]} ${a.y}C${a[side] + out} ${a.y} ${b[side] + out} ${b.y} ${b[side]} ${b.y}`;
}

function straight(from, to) {
  const [a, b] = [boxOf(from), boxOf(to)];
  const size = Math.hypot(b.x - a.x, b.y - a.y) || 1;
  const [dx, dy] = [(b.x - a.x) / size, (b.y - a.y) / size];
  const reach = (box) => Math.min((box.right - box.left) / 2 / Math.max(1e-9, Math.abs(dx)), (box.bottom - box.top) / 2 / Math.max(1e-9, Math.abs(dy)));
  const [start, end] = [reach(a) - 4, reach(b) - 2];
  return `M${a.x + dx * start} ${a.y + dy * start}L${b.x - dx * end} ${b.y - dy * end}`;
}

const MOVES = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };

export function onMeshKey(event) {
  const tile = event.target.closest?.(".tile");
  if (event.key === "Escape" && chosen !== null) return choose(null);
  const move = MOVES[event.key];
  if (!tile || !move) return;
  event.preventDefault();
  const [x, y] = [Number(tile.dataset.x) + move[0], Number(tile.dataset.y) + move[1]];
  const next = tiles.find((other) => Number(other.dataset.x) === x && Number(other.dataset.y) === y);
  if (next) choose(Number(next.dataset.rank), true);
}
