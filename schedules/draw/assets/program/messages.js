// ---- messages inside layers: what instructions wait for, and what their compute hides ----

const STRIP = 4; // pixels: of the mark at the lower edge of a bar, at most

/** By kind of instruction, what the plan has for each axis: [axis, takes, exposed, hidden], in nanoseconds. */
function decodeMessages(rows) {
  const found = new Map();
  const key = (op, stage) => `${op} ${stage}`;
  for (const [op, stage] of rows) found.set(key(op, stage), []);
  for (const [op, stage, ...planned] of rows) found.get(key(op, stage)).push(planned);
  return kinds.op.map((op, kind) => found.get(key(op, kinds.stage[kind])) ?? []);
}

/** Of an instruction: what it takes, what it waits for messages, both in nanoseconds, and [axis, exposed, hidden] of
 *  each axis. A simulated one has the plan's shares of its own time, a measured one is as planned. */
function messagesOf(panel, n) {
  const rows = panel.program?.messages[panel.kind[n]] ?? [];
  if (!rows.length) return null;
  const takes = isMeasured(panel) ? rows[0][1] : panel.end[n] - panel.start[n];
  const scaled = (time) => (time * takes) / rows[0][1];
  const axes = rows.map(([axis, , exposed, hidden]) => [axis, scaled(exposed), scaled(hidden)]);
  return { takes, exposed: axes.reduce((sum, [, exposed]) => sum + exposed, 0), axes };
}

/** [term, value] lines about the messages inside an instruction. */
function messageFacts(panel, n) {
  const messages = messagesOf(panel, n);
  if (!messages) return [];
  const { takes, exposed, axes } = messages;
  const column = (at) => axes.filter((axis) => axis[at] > 0).map((axis) => `${axis[0]} ${duration(axis[at])}`);
  return [
    ["compute", duration(takes - exposed)],
    ["exposed messages", column(1).join(", ") || "none"],
    ["hidden messages", column(2).join(", ") || "none"],
  ];
}

/** The same for the section below the panels: no element or one. */
function messageSection(panel, n) {
  const facts = messageFacts(panel, n);
  if (!facts.length) return [];
  const section = make("div", "", "messages");
  section.append(make("h3", isMeasured(panel) ? "Inside layers, as planned" : "Inside layers"), factList(facts));
  return [section];
}

/** Marks how long a simulated instruction waits for messages: up to its end, as in its trace, if there is room. */
function paintMessages(context, panel, n, [left, top, width, tall]) {
  const messages = isMeasured(panel) || tall < 12 ? null : messagesOf(panel, n);
  if (!messages) return;
  const from = Math.max(left, crisp(x(panel, panel.end[n] - messages.exposed)));
  const wide = left + width - from;
  if (wide < 2) return;
  const high = Math.min(STRIP, Math.floor(tall / 5));
  const lower = top + tall - high;
  box(context, theme.card, from, lower - 1, wide, 1);
  context.fillStyle = theme.fill[FIRST_FILL.LAYERS];
  context.beginPath();
  context.roundRect(from, lower, wide, high, [0, 0, 2.5, 0]);
  context.fill();
}
