// ---- what is known of the chosen rank: its state, its groups, what it sends and receives ----

import { byId, bytes, make, seconds } from "./dom.js";
import { along, AXES, choose, chosen, groupOf, OVER, place, wordsOf } from "./mesh.js";

const GROUPS = {
  pp: "the stages of one replica",
  dp: "replicas with other samples",
  tp: "one layer, split by weights",
  cp: "one sequence, split by tokens",
  ep: "other samples and other experts",
};
const [FRESH, LATE] = [3, 10]; // seconds since the last answer: of ranks that answer, and of those that are late
let shown = "";
const SENT = { SEND_F: "activations", SEND_B: "gradients" };

export function showPanel(state) {
  const panel = byId("panel");
  const rank = chosen === null ? null : state.ranks[chosen];
  const parts = rank ? about(state, rank) : hint(state);
  const content = parts.map((part) => part.outerHTML).join("");
  if (content === shown) return; // a screen reader may be in the middle of it
  shown = content;
  const focused = panel.contains(document.activeElement) ? document.activeElement.dataset.rank : undefined;
  panel.replaceChildren(...parts);
  if (focused) panel.querySelector(`[data-rank="${focused}"]`)?.focus();
}

function hint(state) {
  const waiting = state.ranks.filter((rank) => rank.waits);
  const found = [make("p", "Choose a rank to see its groups and the data that flows between them.", "soft")];
  if (!waiting.length) return found;
  const list = make("ul", "", "flows");
  for (const rank of waiting.slice(0, 8)) list.append(waitLine(rank, `rank ${rank.rank} waits`));
  if (waiting.length > 8) list.append(make("li", `and ${waiting.length - 8} more`, "soft"));
  return [...found, make("h3", "Who waits for whom"), list];
}

function about(state, rank) {
  const facts = make("dl");
  const row = (name, value) => facts.append(make("dt", name), make("dd", value));
  row("state", wordsOf(rank));
  if (rank.instruction) row("instruction", rank.instruction);
  row("step", rank.step < 0 ? "–" : String(rank.step));
  row("device", `${rank.gpu < 0 ? "CPU" : `GPU ${rank.gpu}`}${rank.node && ` of ${rank.node}`}`);
  if (!OVER.includes(state.state)) row("last answer", ageOf(rank));
  const found = [make("h3", `Rank ${rank.rank}, ${place(rank)}`), facts];
  if (rank.waits) {
    const list = make("ul", "", "flows");
    list.append(waitLine(rank, "waits"));
    found.push(list);
  }
  return [...found, ...groups(state, rank), ...flows(state, rank)];
}

/** Ranks answer twice a second: the text of those that do stays as it is. */
function ageOf({ age }) {
  return age < FRESH ? "now" : age < LATE ? "some seconds ago" : `${seconds(age)} ago`;
}

function waitLine(rank, who) {
  const line = make("li", "", "wait");
  const inside = rank.waits.axis ? ` inside its layers (${rank.waits.axis})` : "";
  line.append(`${who} for `, ...buttons(rank.waits.for.slice(0, 8)));
  if (rank.waits.for.length > 8) line.append(` and ${rank.waits.for.length - 8} more`);
  line.append(`: ${rank.waits.what}${inside}`);
  return line;
}

function buttons(ranks) {
  return ranks.map((rank) => {
    const made = make("button", String(rank), "to");
    made.dataset.rank = rank;
    made.setAttribute("aria-label", `rank ${rank}`);
    made.addEventListener("click", () => choose(rank, true));
    return made;
  });
}

function groups(state, rank) {
  const list = make("ul", "", "groups");
  for (const axis of AXES.filter((each) => state.axes[each] > 1)) {
    const others = groupOf(rank, axis).filter((other) => other !== rank).map((other) => other.rank);
    const line = make("li");
    line.append(make("b", axis, `axis ${axis}`), ...buttons(others.slice(0, 16)));
    line.append(make("span", `${others.length > 16 ? `and ${others.length - 16} more, ` : ""}${GROUPS[axis]}`, "soft"));
    list.append(line);
  }
  return list.children.length ? [make("h3", "Groups"), list] : [];
}

function flows(state, rank) {
  const list = make("ul", "", "flows");
  for (const send of state.flow.sends) {
    const isSender = send.from === rank.pp;
    if (!isSender && send.to !== rank.pp) continue;
    const line = make("li", "", send.op === "SEND_F" ? "forward" : "backward");
    const [other] = buttons([along(rank, "pp", isSender ? send.to : send.from).rank]);
    line.append(isSender ? "to " : "from ", other, ` ${SENT[send.op]}, ${send.count} x ${bytes(send.bytes / send.count)}`);
    list.append(line);
  }
  for (const each of state.flow.collectives.filter((found) => found.pp === rank.pp)) {
    const line = make("li", "", each.axis);
    line.append(make("b", each.axis, `axis ${each.axis}`));
    line.append(` ${each.kind.toLowerCase().replaceAll("_", "-")}, ${each.count} x, ${bytes(each.bytes)} in all`);
    list.append(line);
  }
  return list.children.length ? [make("h3", "Data of a step, as planned"), list] : [];
}
