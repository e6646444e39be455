// ---- asks the driver for the state of the run, and shows it ----

import { showCurves } from "./charts.js";
import { byId, bytes, make, number, percent, say, seconds } from "./dom.js";
import { showExperts } from "./experts.js";
import { onChoose, onMeshKey, OVER, showMesh, STATES } from "./mesh.js";
import { showPanel } from "./panel.js";

const [POLL, TIMES, EXPERTS] = [1000, 10_000, 3000]; // milliseconds between two answers of the same kind
const PLAIN = { lost: 1, failure: 1, "slow rank": 1, "flipped bits": 1 };
let state = null;
let shownSteps = "";
let timesAt = 0;
let expertsAt = 0;
let heardAt = null;
let isDrawing = false; // the newest steps, which takes seconds beside ranks that have the cores

async function ask() {
  try {
    const answer = await fetch("state.json", { signal: AbortSignal.timeout(8000) });
    if (answer.status === 401) return location.reload();
    if (!answer.ok) throw new Error(await answer.text());
    show(await answer.json());
    heardAt = new Date();
    if (state.has_experts && Date.now() - expertsAt > EXPERTS) {
      expertsAt = Date.now();
      showExperts(await (await fetch("experts.json")).json());
    }
    say(byId("connection"), OVER.includes(state.state) ? "" : "live");
  } catch {
    if (!OVER.includes(state?.state)) loseDriver();
  }
  if (!OVER.includes(state?.state)) setTimeout(ask, document.hidden ? 5 * POLL : POLL);
}

/** Whether the run continues is not known: nothing may look as if it did. */
function loseDriver() {
  if (!state) return say(byId("connection"), "the run's driver does not answer");
  if (OVER.includes(state.state)) return say(byId("connection"), `its driver is gone: \`pentad page ${state.run}\` shows the rest`);
  const since = `the run's driver has not answered since ${timeOf(heardAt)}: this is the last it said.`;
  say(byId("connection"), `${since} Once the run has ended, \`pentad page ${state.run}\` shows it`);
  say(byId("state"), `was ${state.state}`);
  byId("state").dataset.state = "unknown";
  document.title = `${state.run}: no answer, step ${state.step}`;
  document.body.classList.add("stale");
  state.seconds_left = null;
  showFacts();
}

export function show(found) {
  state = found;
  document.body.classList.remove("stale");
  document.body.classList.toggle("over", OVER.includes(state.state));
  document.title = `${state.run}: ${state.state}, step ${state.step}`;
  say(byId("run"), state.run);
  say(byId("state"), state.state);
  byId("state").dataset.state = state.state;
  showProgress();
  showFacts();
  showVerdict();
  const wrong = ["hung", "lost"].map((name) => [state.ranks.filter((rank) => rank.state === name).length, name]);
  const counts = wrong.filter(([count]) => count).map(([count, name]) => `, ${count} ${name}`);
  say(byId("mesh-name"), `${state.mesh}, ${state.ranks.length} in all${counts.join("")}`);
  showMesh(state);
  showPanel(state);
  showCurves(state.curves);
  showSteps();
  showTimes();
  showEvents();
}

/** What is wrong: of a live run now, of one that has failed why. */
function showVerdict() {
  const failure = state.state === "failed" ? state.events.findLast(({ event }) => event === "failure")?.error : "";
  const text = failure || (state.state === "finished" ? "" : state.verdict);
  say(byId("verdict"), text);
  byId("verdict").hidden = !text;
}

function showProgress() {
  const bar = byId("progress");
  bar.setAttribute("aria-valuemax", state.steps);
  bar.setAttribute("aria-valuenow", state.step);
  bar.firstElementChild.style.width = `${(100 * state.step) / Math.max(1, state.steps)}%`;
}

function showFacts() {
  const facts = {
    step: `${state.step} of ${state.steps}`,
    ...(state.seconds_left ? { "time left": seconds(state.seconds_left) } : {}),
    loss: number(state.loss),
    "tokens/s": number(state.tokens_per_second, 3),
    ...lastStep(state.newest ?? {}),
    generation: String(state.generation),
    schedule: state.schedule,
    program: state.program.slice(0, 12),
  };
  for (const { data, loss, step } of state.evaluations) facts[`${data} after ${step}`] = number(loss);
  if (/^https?:/.test(state.dashboard) && !OVER.includes(state.state)) facts.Ray = "dashboard";
  const list = byId("facts");
  const names = Object.keys(facts).join();
  if (list.dataset.names !== names) list.replaceChildren(...Object.keys(facts).map(pairOf)); // else its link keeps the focus
  list.dataset.names = names;
  Object.values(facts).forEach((value, at) => say(list.children[at].lastElementChild.firstElementChild, value));
}

function pairOf(name) {
  const [pair, value] = [make("div"), name === "Ray" ? make("a") : make("span")];
  if (name === "Ray") Object.assign(value, { href: state.dashboard, rel: "noreferrer" });
  pair.append(make("dt", name), make("dd"));
  pair.lastElementChild.append(value);
  return pair;
}

/** How fast the newest step was, beside what its bubble should be. */
function lastStep({ step_seconds, mfu, bubble_measured, bubble_planned, clocks }) {
  const known = (value) => typeof value === "number";
  const facts = {};
  if (known(step_seconds)) facts["a step"] = seconds(step_seconds);
  if (known(mfu)) facts.MFU = percent(mfu);
  const planned = known(bubble_planned) ? `, planned ${percent(bubble_planned)}` : "";
  if (known(bubble_measured)) facts.bubble = `${percent(bubble_measured)}${planned}`;
  if (clocks) facts.GPUs = clocks;
  return facts;
}

/** The kept steps stay as they are while somebody looks at them; the button shows newer ones. */
function showSteps() {
  const button = byId("newest");
  if (!state.kept.length) return;
  const steps = [...new Set([state.kept[0], state.kept.at(-1)])].join(" to ");
  if (!shownSteps) loadTimeline(steps);
  button.disabled = isDrawing || steps === shownSteps;
  say(button, isDrawing ? `Drawing steps ${shownSteps} ...` : button.disabled ? `Steps ${steps}` : `Show steps ${steps}`);
}

function loadTimeline(steps) {
  shownSteps = steps;
  isDrawing = true;
  byId("timeline").hidden = false;
  byId("timeline").src = "timeline.html";
}

function showTimes() {
  if (!state.has_times || Date.now() - timesAt < TIMES) return;
  timesAt = Date.now();
  byId("rank-times").src = `rank-times.svg?${timesAt}`;
}

function showEvents() {
  const list = byId("events");
  const key = `${state.events.length} ${state.events.at(-1)?.time}`;
  if (list.dataset.key === key) return;
  list.dataset.key = key;
  let day = dayOf(new Date());
  const items = [...state.events].reverse().flatMap((entry) => {
    const at = new Date(1000 * entry.time);
    const item = make("li", "", PLAIN[entry.event] ? "bad" : "");
    item.append(make("time", timeOf(at)), make("b", entry.event), make("span", sentenceOf(entry)));
    const isSameDay = dayOf(at) === day;
    day = dayOf(at);
    return isSameDay ? [item] : [make("li", day, "day"), item];
  });
  list.replaceChildren(...items);
}

const timeOf = (at) => at.toLocaleTimeString("en-GB");
const dayOf = (at) => at.toLocaleDateString("en-GB", { weekday: "long", day: "numeric", month: "long" });

/** The facts of an event in words: its own sentence, or its plain values. */
function sentenceOf({ time, event, ...facts }) {
  const sentence = facts.sentence ?? facts.error ?? (event === "lost" ? facts.cause : null);
  return sentence ?? Object.entries(facts).map(([name, value]) => factOf(name, value)).filter(Boolean).join(", ");
}

function factOf(name, value) {
  if (name === "seconds") return `took ${seconds(typeof value === "object" ? sum(value) : value)}`; // or of each phase
  if (name === "program") return `program ${value.slice(0, 12)}`;
  if (typeof value === "string") return value && `${name.replaceAll("_", " ")} ${value}`;
  if (typeof value !== "number") return "";
  if (name.endsWith("_seconds")) return `${name.slice(0, -8).replaceAll("_", " ")} ${seconds(value)}`;
  return name === "bytes" ? bytes(value) : `${name.replaceAll("_", " ")} ${number(value)}`;
}

const sum = (parts) => Object.values(parts).reduce((total, part) => total + part, 0);

/** A frame is no higher than what it shows. */
function fit({ target }) {
  target.style.height = "";
  const page = target.contentDocument?.body; // null for a browser's own page of an error
  if (page && page.offsetHeight < target.clientHeight) target.style.height = `${page.offsetHeight + 2}px`;
}

/** A figure stays as it is if nobody is there to draw another. */
function onServed(button, load) {
  byId(button).addEventListener("click", () => fetch("state.json").then(load, loseDriver));
}

function start() {
  byId("states").append(
    ...Object.entries(STATES).map(([name, [sign, words]]) => {
      const item = make("li");
      const mark = Object.assign(make("i", sign), { className: "mark" });
      mark.dataset.state = name;
      item.append(mark, words);
      return item;
    }),
  );
  onChoose(() => showPanel(state));
  byId("mesh").addEventListener("keydown", onMeshKey);
  for (const name of ["timeline", "memory"]) byId(name).addEventListener("load", fit);
  byId("timeline").addEventListener("load", () => {
    isDrawing = false;
    showSteps();
  });
  onServed("newest", () => {
    loadTimeline([...new Set([state.kept[0], state.kept.at(-1)])].join(" to "));
    showSteps();
  });
  onServed("memory-button", () => {
    byId("memory").hidden = false;
    byId("memory").src = "memory.html";
    say(byId("memory-button"), "Show again");
  });
  byId("rank-times").addEventListener("load", () => (byId("slow").hidden = false));
  byId("rank-times").addEventListener("error", () => (byId("slow").hidden = true));
  addEventListener("resize", () => state && (showMesh(state), showCurves(state.curves)));
  ask();
}
start();
