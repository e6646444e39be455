// ---- arrows between dependent spans, and the critical path ----

/** [earlier, later, binding, why] of the selected span's dependencies. Spans of hidden rows are skipped over. */
function selectedEdges(panel) {
  const found = [];
  const isShown = (n) => barOf(panel, n) !== null;
  const visit = (nodes, anchor, upstream, binding) => {
    for (const node of nodes) {
      const tight = binding && node.binding;
      let next = anchor;
      if (isShown(node.n)) {
        const near = eventOf(panel, anchor).find((m) => rankOf(panel, m) === rankOf(panel, node.n)) ?? anchor;
        const from = isShown(near) ? near : anchor;
        found.push(upstream ? [node.n, from, tight, node.why] : [from, node.n, tight, node.why]);
        next = node.n;
        for (const m of eventOf(panel, node.n)) if (m !== node.n) found.push([node.n, m, tight, "event"]);
      }
      visit(node.children, next, upstream, tight || (node.binding && next === node.n));
    }
  };
  const { n, dependencies, dependents } = panel.selected;
  for (const m of eventOf(panel, n)) if (m !== n && isShown(m)) found.push([n, m, true, "event"]);
  visit(dependencies, n, true, true);
  visit(dependents, n, false, true);
  return found;
}

function paintArrows(context, panel) {
  if (byId("critical").checked && panel.critical) paintCriticalPath(context, panel);
  if (!panel.selected) return;
  const edges = selectedEdges(panel).filter(([from, to]) => barOf(panel, from) && barOf(panel, to));
  for (const binding of [false, true]) {
    const some = edges.filter((edge) => edge[2] === binding);
    context.strokeStyle = context.fillStyle = binding ? theme.accent : theme.text;
    context.lineWidth = binding ? 2 : 1.25;
    context.globalAlpha = binding ? 1 : 0.6;
    for (const [from, to, , why] of some) paintArrow(context, barOf(panel, from), barOf(panel, to), why);
    const ends = some.filter((edge) => edge[3] !== "event").flatMap(([from, to]) => [from, to]);
    paintOutlines(context, [...new Set(ends)].map((n) => barOf(panel, n)), context.strokeStyle, 1.25);
  }
  context.globalAlpha = 1;
  paintOutlines(context, [barOf(panel, panel.selected.n)], theme.text, 3);
}

/** From the end of one bar to the start of another; spans of one event are joined by a straight broken line. */
function paintArrow(context, from, to, why) {
  const [fromY, toY] = [from[1] + from[3] / 2, to[1] + to[3] / 2];
  const [fromX, toX] = [why === "event" ? from[0] + from[2] / 2 : from[0] + from[2], to[0]];
  if (fromY === toY && toX - fromX < 6) return;
  context.beginPath();
  context.moveTo(fromX, fromY);
  if (why === "event") {
    context.setLineDash([3, 3]);
    context.lineTo(to[0] + to[2] / 2, toY);
    context.stroke();
    return context.setLineDash([]);
  }
  const bend = Math.max(Math.min(Math.abs(toX - fromX) * 0.5, 80), fromY === toY ? 0 : 10);
  const lift = fromY === toY ? Math.min(from[3] * 0.85, 16) : 0; // within a row the line runs above the bars
  context.bezierCurveTo(fromX + bend, fromY - lift, toX - bend, toY - lift, toX, toY);
  context.stroke();
  context.beginPath();
  const tilt = lift ? 3 : 0;
  context.moveTo(toX + 1, toY);
  context.lineTo(toX - 6, toY - 3.5 - tilt);
  context.lineTo(toX - 6, toY + 3.5 - tilt);
  context.fill();
}

/** Underlines the pieces of the critical path, broken where nothing ran, and joins them from rank to rank. */
function paintCriticalPath(context, panel) {
  const pieces = panel.critical.map((piece) => ({ ...piece, bar: barOf(panel, piece.n) })).filter(({ bar }) => bar);
  context.strokeStyle = theme.accent;
  context.lineWidth = 3;
  context.lineJoin = "round";
  for (const isIdle of [false, true]) {
    let last = null;
    context.setLineDash(isIdle ? [2, 4] : []);
    context.beginPath();
    for (const { part, start, end, bar } of pieces) {
      const y = bar[1] + bar[3] - 1;
      const at = [x(panel, start), y];
      context.moveTo(...(last && !isIdle ? last : at));
      if (last && !isIdle) context.lineTo(...at);
      last = [x(panel, end), y];
      if ((part === "host") === isIdle) context.lineTo(...last);
    }
    context.stroke();
  }
  context.setLineDash([]);
  const ran = pieces.filter(({ part, bar }) => part !== "host" && bar[2] > 3 && bar[3] > 6);
  paintOutlines(context, ran.map(({ bar }) => bar), theme.accent, 1);
}
