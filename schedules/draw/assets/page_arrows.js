// ---- lines between spans ----

/** Where a span is drawn: [left, top, width, height], or null where its row is hidden. */
function barOf(panel, n) {
  const track = trackOf(panel, n);
  const at = place(panel, track.at, track.row);
  if (!at) return null;
  const i = indexOf(panel, n);
  const left = x(panel, track.start[i]);
  const tall = at[1] / (track.depth ? track.depth[i] : 1);
  return [left, at[0] + tall * (track.level ? track.level[i] : 0), x(panel, track.end[i]) - left, tall];
}

/** Pairs [earlier, later, bound] of spans whose rows are shown; a hidden transfer is passed over. */
function edges(panel) {
  const found = [];
  const shown = (n) => place(panel, trackOf(panel, n).at, trackOf(panel, n).row);
  const visit = (leaves, anchor, forth, bound) => {
    for (const leaf of leaves) {
      const tight = bound && leaf.bound;
      let next = anchor;
      if (shown(leaf.n)) {
        const near = membersOf(panel, anchor).find((m) => rankOf(panel, m) === rankOf(panel, leaf.n)) ?? anchor;
        const from = shown(near) ? near : anchor;
        found.push(forth ? [leaf.n, from, tight, leaf.why] : [from, leaf.n, tight, leaf.why]);
        next = leaf.n;
        for (const m of membersOf(panel, leaf.n)) if (m !== leaf.n) found.push([leaf.n, m, tight, "meets"]);
      }
      visit(leaf.below, next, forth, tight || (leaf.bound && next === leaf.n));
    }
  };
  const { n, needs, waiters } = panel.chosen;
  for (const m of membersOf(panel, n)) if (m !== n && shown(m)) found.push([n, m, true, "meets"]);
  visit(needs, n, true, true);
  visit(waiters, n, false, true);
  return found;
}

function paintArrows(context, panel) {
  if (byId("critical").checked) paintCritical(context, panel);
  if (!panel.chosen) return;
  const found = edges(panel).filter(([from, to]) => barOf(panel, from) && barOf(panel, to));
  for (const tight of [false, true]) {
    const some = found.filter((edge) => edge[2] === tight);
    context.strokeStyle = context.fillStyle = tight ? theme.accent : theme.text;
    context.lineWidth = tight ? 2 : 1.25;
    context.globalAlpha = tight ? 1 : 0.6;
    for (const [from, to, , why] of some) arrow(context, barOf(panel, from), barOf(panel, to), why);
    const ends = some.filter((edge) => edge[3] !== "meets").flatMap(([from, to]) => [from, to]);
    paintOutlines(context, [...new Set(ends)].map((n) => barOf(panel, n)), context.strokeStyle, 1.25);
  }
  context.globalAlpha = 1;
  paintOutlines(context, [barOf(panel, panel.chosen.n)], theme.text, 3);
}

/** From the end of one bar to the start of another; those that meet are joined by a straight broken line. */
function arrow(context, from, to, why) {
  const [fromY, toY] = [from[1] + from[3] / 2, to[1] + to[3] / 2];
  const [fromX, toX] = [why === "meets" ? from[0] + from[2] / 2 : from[0] + from[2], to[0]];
  if (fromY === toY && toX - fromX < 6) return;
  context.beginPath();
  context.moveTo(fromX, fromY);
  if (why === "meets") {
    context.setLineDash([3, 3]);
    context.lineTo(to[0] + to[2] / 2, toY);
    context.stroke();
    return context.setLineDash([]);
  }
  const bend = Math.max(Math.min(Math.abs(toX - fromX) * 0.5, 80), fromY === toY ? 0 : 10);
  const lift = fromY === toY ? Math.min(from[3] * 0.85, 16) : 0; // along a row the line runs above its bars
  context.bezierCurveTo(fromX + bend, fromY - lift, toX - bend, toY - lift, toX, toY);
  context.stroke();
  context.beginPath();
  const turn = lift ? 3 : 0;
  context.moveTo(toX + 1, toY);
  context.lineTo(toX - 6, toY - 3.5 - turn);
  context.lineTo(toX - 6, toY + 3.5 - turn);
  context.fill();
}

/** Underlines and outlines the chain that ends last, and joins its bars from rank to rank. */
function paintCritical(context, panel) {
  const bars = panel.critical.number.map((n) => barOf(panel, n)).filter(Boolean);
  context.strokeStyle = theme.accent;
  context.lineWidth = 3;
  context.lineJoin = "round";
  context.beginPath();
  bars.forEach(([left, top, width, tall], i) => {
    const y = top + tall - 1;
    if (i) context.lineTo(left, y);
    else context.moveTo(left, y);
    context.lineTo(left + width, y);
  });
  context.stroke();
  paintOutlines(context, bars.filter(([, , width, tall]) => width > 3 && tall > 6), theme.accent, 1);
}
