// ---- search ----

const search = { matches: [], index: -1 }; // {panel, n}, by panel and time; the one shown

/** For each kind, whether it matches a query such as 1F6, F6, 2SEND or NORM: stage and microbatch may be missing, and
 *  the op may be a part of one; else whether its name contains the query. */
function matchingKinds(query) {
  const [, first, op, last] = /^(\d*)(\D*)(\d*)$/.exec(query) ?? ["", "", query, ""];
  const ops = OPS.includes(op) ? [op] : OPS.filter((name) => name.includes(op));
  const [stage, microbatch] = op ? [first, last] : ["", first];
  const isNumber = (text, value) => text === "" || Number(text) === value;
  const found = kinds.op.map(
    (of, kind) =>
      ops.includes(of) && isNumber(stage, kinds.stage[kind]) && isNumber(microbatch, kinds.microbatch[kind]),
  );
  return found.includes(true) ? found : kinds.name.map((name) => name.toUpperCase().includes(query));
}

/** Marks the spans that a text such as 1F6 or SEND matches; the empty text ends the search. */
function find(text) {
  const query = text.trim().toUpperCase();
  const isMatch = query ? matchingKinds(query) : null;
  Object.assign(search, { matches: [], index: -1 });
  for (const panel of panels) {
    panel.matches = isMatch ? new Uint8Array(panel.count) : null;
    const found = [];
    for (let n = 0; isMatch && n < panel.count; n++) {
      if (!isMatch[panel.kind[n]]) continue;
      panel.matches[n] = 1;
      found.push({ panel, n });
      hiddenRows.delete(panel.track[n].row);
    }
    search.matches.push(...found.sort((a, b) => panel.start[a.n] - panel.start[b.n]));
    updateHighlights(panel);
  }
  showRows();
  showFound();
}

function showFound() {
  const { matches, index } = search;
  const plural = `${matches.length} ${matches.length === 1 ? "match" : "matches"}`;
  const count = index < 0 ? plural : `${index + 1} of ${matches.length}`;
  const searching = byId("find").value.trim() !== "";
  byId("found").textContent = searching ? (matches.length ? count : "no match") : "";
  byId("previous").hidden = byId("next").hidden = !matches.length;
}

/** Goes to the next match, or with by = -1 to the previous one. */
function stepMatch(by) {
  const { matches, index } = search;
  if (!matches.length) return;
  search.index = index < 0 ? (by > 0 ? 0 : matches.length - 1) : (index + by + matches.length) % matches.length;
  const { panel, n } = matches[search.index];
  select(panel, n);
  const bar = barOf(panel, n);
  if (bar?.[2] > 0 && bar[2] < 6) zoom(bar[2] / 12, middleOf(panel, n)); // wide enough to see
  showFound();
  draw();
}

function onFindKey(event) {
  const acts = {
    Enter: () => stepMatch(event.shiftKey ? -1 : 1),
    ArrowDown: () => stepMatch(1),
    ArrowUp: () => stepMatch(-1),
    Escape: endSearch,
  };
  if (!acts[event.key]) return;
  event.preventDefault();
  acts[event.key]();
}

function endSearch() {
  byId("find").value = "";
  byId("find").blur();
  find("");
}

