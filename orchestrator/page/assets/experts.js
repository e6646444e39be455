// ---- the load of experts: a row a layer, a cell an expert, beside the mean of its layer ----

import { byId, make, number, say } from "./dom.js";

const FULL = 1; // above or below the mean, in multiples of it, at the ends of the scale

export function showExperts({ step, layers }) {
  byId("experts").hidden = !layers.length;
  say(byId("experts-step"), `tokens in step ${step}, in multiples of the layer's mean`);
  const rows = layers.map(({ layer, load }) => {
    const row = make("tr");
    const strip = make("canvas");
    const [most, least] = [Math.max(...load), Math.min(...load)];
    strip.setAttribute("role", "img");
    strip.setAttribute("aria-label", `expert ${load.indexOf(most)} has ${number(most, 3)} times the mean`);
    strip.width = load.length;
    strip.height = 1;
    paint(strip.getContext("2d"), load);
    const cell = make("td", "", "strip");
    cell.append(strip);
    row.append(make("th", `layer ${layer}`), cell, make("td", `${number(least, 2)} to ${number(most, 2)}`));
    return row;
  });
  byId("loads").replaceChildren(...rows);
}

function paint(context, load) {
  const style = getComputedStyle(document.documentElement);
  load.forEach((value, at) => {
    const share = Math.max(-1, Math.min(1, (value - 1) / FULL));
    context.globalAlpha = Math.abs(share);
    context.fillStyle = style.getPropertyValue(share > 0 ? "--above" : "--below");
    context.fillRect(at, 0, 1, 1);
  });
}
