// ---- elements and numbers ----

export const byId = (id) => document.getElementById(id);

/** Data of the run becomes text, never markup. */
export function make(tag, text = "", className = "") {
  const made = document.createElement(tag);
  if (text) made.textContent = text;
  if (className) made.className = className;
  return made;
}

export function draw(tag, attributes, text = "") {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text) made.textContent = text;
  return made;
}

/** Replaces the text only where it differs, so that screen readers hear changes alone. */
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

export function number(value, digits = 4) {
  if (value === null || value === undefined) return "–";
  return value !== 0 && (Math.abs(value) >= 1e6 || Math.abs(value) < 1e-3)
    ? value.toExponential(2)
    : value.toLocaleString("en", { maximumSignificantDigits: digits });
}

export function bytes(value) {
  if (value === null || value === undefined) return "–";
  const unit = Math.min(4, Math.floor(Math.log2(Math.max(1, value)) / 10));
  return `${number(value / 1024 ** unit, 3)} ${["B", "KiB", "MiB", "GiB", "TiB"][unit]}`;
}

export const percent = (share) => `${(100 * share).toFixed(1)} %`;

export function seconds(value) {
  const minutes = Math.round(value / 60);
  if (minutes >= 100) return `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
  if (value >= 90) return `${minutes} min`;
  return value >= 1 ? `${number(value, 2)} s` : `${Math.round(value * 1000)} ms`;
}
