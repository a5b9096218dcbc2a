"use strict";
// The timeline of one run: rows on a canvas that covers what is in view and no more, so that ten thousand rows cost what
// two hundred cost. Rows lower than a pixel are thinned out, and the line under the toolbar says so.

const LABEL_WIDTH = 170, NO_LABELS = 8, AXIS_HEIGHT = 22, LETTER_ROW = 12, LETTER_WIDTH = 14;

class Timeline {
  /** `length` is the longest makespan of all runs: timelines side by side have one scale. */
  constructor(parent, run, phases, length) {
    this.run = run;
    this.phases = phases;
    this.length = length;
    this.from = 0;
    this.to = length;
    this.order = [];
    this.chosen = -1;  // a position in `order`
    this.build(parent);
    this.rowHeight = run.count <= 40 ? 16 : run.count <= 400 ? 6 : 3;
    this.heightSelect.value = String(this.rowHeight);
    this.arrange();
  }

  build(parent) {
    const run = this.run;
    this.search = element("input", { type: "search", placeholder: "name or group", oninput: () => this.arrange() });
    this.stateSelect = element("select", { onchange: () => this.arrange() }, element("option", { value: "" }, "all states"),
      ...STATES.filter((state) => run.rows.state.includes(state)).map((state) => element("option", { value: state }, state)));
    this.sortSelect = element("select", { onchange: () => this.arrange() },
      element("option", { value: "end" }, "last to end first"), element("option", { value: "submitted" }, "as submitted"),
      element("option", { value: "group" }, "by group"), element("option", { value: "turns" }, "most turns first"),
      ...this.phases.map((phase, k) => element("option", { value: `phase-${k}` }, `most ${phase.label} first`)));
    this.heightSelect = element("select", { onchange: () => { this.rowHeight = Number(this.heightSelect.value); this.arrange(); } },
      element("option", { value: "0" }, "all rows at once"), element("option", { value: "3" }, "3 pixels"),
      element("option", { value: "6" }, "6 pixels"), element("option", { value: "16" }, "16 pixels"), element("option", { value: "24" }, "24 pixels"));
    const button = (text, title, act) => element("button", { type: "button", title, "aria-label": title, onclick: act }, text);
    this.shown = element("p", { class: "shown", "aria-live": "polite" });
    this.canvas = element("canvas");
    this.spacer = element("div");
    this.viewport = element("div", { class: "viewport", tabindex: "0", role: "application",
      "aria-label": `Timeline of ${run.name}: arrow keys choose a trajectory` }, this.canvas, this.spacer);
    this.tooltip = element("div", { class: "tooltip", hidden: "" });
    this.detail = element("div", { class: "chosen", "aria-live": "polite" }, "No trajectory chosen.");
    parent.append(element("div", { class: "toolbar" },
      element("label", {}, "find", this.search), element("label", {}, "state", this.stateSelect),
      element("label", {}, "order", this.sortSelect), element("label", {}, "row height", this.heightSelect),
      button("+", "zoom in", () => this.zoom(0.5)), button("−", "zoom out", () => this.zoom(2)),
      button("all", "show the whole batch", () => this.reset())),
    this.shown, this.viewport, this.detail, trajectoryTable(this), this.tooltip);
    this.viewport.addEventListener("scroll", () => this.draw());
    this.viewport.addEventListener("keydown", (event) => this.key(event));
    this.viewport.addEventListener("mousemove", (event) => this.hover(event));
    this.viewport.addEventListener("mouseleave", () => { this.tooltip.hidden = true; });
    this.viewport.addEventListener("click", (event) => { const at = this.position(event); if (at >= 0) this.choose(at); });
    this.viewport.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
    new ResizeObserver(() => this.draw()).observe(this.viewport);
  }

  /** Filter, sort, and lay out anew. */
  arrange() {
    const rows = this.run.rows, wanted = this.search.value.trim().toLowerCase(), state = this.stateSelect.value;
    const chosenRow = this.order[this.chosen];
    const kept = [];
    for (let row = 0; row < this.run.count; row++) {
      if (state && rows.state[row] !== state) continue;
      if (wanted && !rows.id[row].toLowerCase().includes(wanted) && !rows.group[row].toLowerCase().includes(wanted)) continue;
      kept.push(row);
    }
    this.order = this.sorted(kept);
    this.chosen = this.order.indexOf(chosenRow);
    const count = this.order.length;
    const rowsHeight = this.rowHeight ? count * this.rowHeight : 560;
    const height = Math.max(60, Math.min(rowsHeight, 560)) + AXIS_HEIGHT;
    this.viewport.style.height = `${height + 2}px`;
    this.height = height;
    this.spacer.style.height = `${Math.max(0, rowsHeight + AXIS_HEIGHT - height)}px`;
    this.draw();
    this.viewport.dispatchEvent(new Event("arranged"));
  }

  sorted(kept) {
    const { rows, lastEnd, phaseSeconds: spent } = this.run, order = this.sortSelect.value;
    if (order === "submitted") return kept;
    if (order === "group") return kept.sort((a, b) => rows.group[a].localeCompare(rows.group[b]) || lastEnd[b] - lastEnd[a]);
    if (order === "turns") return kept.sort((a, b) => rows.turns[b] - rows.turns[a] || lastEnd[b] - lastEnd[a]);
    if (order === "end") return kept.sort((a, b) => lastEnd[b] - lastEnd[a]);
    const phase = Number(order.slice(6));
    return kept.sort((a, b) => spent[b * 10 + phase] - spent[a * 10 + phase]);
  }

  say(visible, step) {
    const all = this.run.count, shown = this.order.length;
    const part = step > 1 ? `; one row in ${Math.ceil(step)} is drawn, choose a row height to see all of them` : "";
    const filtered = shown === all ? `${number(all)} trajectories` : `${number(shown)} of ${number(all)} trajectories`;
    const time = this.from === 0 && this.to === this.length ? "" : `, ${seconds(this.from)} to ${seconds(this.to)}`;
    const scroll = step <= 1 && visible < shown ? `, ${number(visible)} in view` : "";
    const text = filtered + scroll + time + part;
    if (this.shown.textContent !== text) this.shown.textContent = text;
  }

  x(at) { return this.left + (at - this.from) / (this.to - this.from) * (this.width - this.left); }

  draw() {
    const ratio = devicePixelRatio || 1;
    this.width = Math.max(300, this.viewport.clientWidth);
    this.canvas.width = Math.round(this.width * ratio);
    this.canvas.height = Math.round(this.height * ratio);
    this.canvas.style.width = `${this.width}px`;
    this.canvas.style.height = `${this.height}px`;
    const ctx = this.canvas.getContext("2d");
    ctx.scale(ratio, ratio);
    this.fills = phaseFills(ctx, this.phases);
    const count = this.order.length, room = this.height - AXIS_HEIGHT;
    const rowHeight = this.rowHeight || Math.min(16, room / Math.max(1, count));
    this.left = rowHeight >= LETTER_ROW ? LABEL_WIDTH : NO_LABELS;
    const drawn = Math.max(1, rowHeight), step = drawn / rowHeight;
    const top = this.rowHeight ? this.viewport.scrollTop : 0;
    this.layout = { rowHeight, top };
    let visible = 0;
    ctx.save();
    ctx.beginPath();
    ctx.rect(0, AXIS_HEIGHT, this.width, room);
    ctx.clip();
    for (let line = 0; line * drawn <= room + drawn; line++) {
      const position = Math.floor(Math.floor(top / rowHeight) + line * step);
      if (position >= count) break;
      visible++;
      // A row of a pixel has the pixel of its line: rounding its own place would leave lines empty.
      this.drawRow(ctx, position, step > 1 ? AXIS_HEIGHT + line : Math.floor(AXIS_HEIGHT + position * rowHeight - top), drawn);
    }
    this.drawChosen(ctx, rowHeight, top);
    ctx.restore();
    this.drawAxis(ctx);
    this.say(visible, step);
  }

  drawRow(ctx, position, y, height) {
    const { run, fills } = this, row = this.order[position], inner = height >= 5 ? height - 1 : height;
    if (height >= LETTER_ROW) this.drawLabel(ctx, row, y, height);
    let start = 0, lastPixel = -1;
    for (let k = run.first[row]; k < run.first[row + 1]; k++) {
      const end = run.end[k];
      if (end > this.from) {
        if (start >= this.to) break;
        const x0 = Math.max(this.left, this.x(start)), x1 = Math.min(this.width, this.x(end)), phase = run.phase[k];
        if (x1 - x0 < 1) {
          const pixel = Math.floor(x0);
          if (pixel !== lastPixel) { ctx.fillStyle = fills[phase].plain; ctx.fillRect(pixel, y, 1, inner); }
          lastPixel = pixel;
        } else {
          ctx.fillStyle = height >= 6 ? fills[phase].fill : fills[phase].plain;
          ctx.fillRect(x0, y, x1 - x0, inner);
          if (height >= LETTER_ROW && x1 - x0 >= LETTER_WIDTH) this.drawLetter(ctx, phase, (x0 + x1) / 2, y + inner / 2);
        }
      }
      start = end;
    }
  }

  /** A frame around the chosen row. */
  drawChosen(ctx, rowHeight, top) {
    if (this.chosen < 0) return;
    const y = AXIS_HEIGHT + this.chosen * rowHeight - top;
    ctx.lineWidth = 4;
    ctx.strokeStyle = style("--page");
    ctx.strokeRect(2, y - 2, this.width - 4, Math.max(1, rowHeight) + 3);
    ctx.lineWidth = 2;
    ctx.strokeStyle = style("--ink");
    ctx.strokeRect(2, y - 2, this.width - 4, Math.max(1, rowHeight) + 3);
  }

  drawLetter(ctx, phase, x, y) {
    ctx.fillStyle = phase === 4 || phase === 5 ? "#fff" : "#000";
    ctx.font = "bold 10px system-ui";
    ctx.textAlign = "center";
    ctx.textBaseline = "middle";
    ctx.fillText(this.phases[phase].letter, x, y + 0.5);
  }

  drawLabel(ctx, row, y, height) {
    const state = this.run.rows.state[row];
    ctx.fillStyle = style("--ink");
    ctx.font = "11px ui-monospace, monospace";
    ctx.textAlign = "left";
    ctx.textBaseline = "middle";
    const mark = state === "finished" ? "" : state === "truncated" ? "✂ " : "✗ ";
    ctx.fillText(shortened(mark + this.run.rows.id[row], 24), 4, y + height / 2);
  }

  drawAxis(ctx) {
    ctx.fillStyle = style("--panel");
    ctx.fillRect(0, 0, this.width, AXIS_HEIGHT);
    ctx.fillStyle = ctx.strokeStyle = style("--faint");
    ctx.font = "11px system-ui";
    ctx.textAlign = "left";
    ctx.textBaseline = "middle";
    const step = roundStep((this.to - this.from) / Math.max(2, (this.width - this.left) / 90));
    for (let at = Math.ceil(this.from / step) * step; at <= this.to; at += step) {
      const x = this.x(at);
      ctx.globalAlpha = 0.35;
      ctx.fillRect(x, AXIS_HEIGHT - 5, 1, this.height);
      ctx.globalAlpha = 1;
      if (x < this.width - 40) ctx.fillText(`${number(at, step < 1 ? Math.ceil(-Math.log10(step)) : 0)} s`, x + 3, AXIS_HEIGHT / 2);
    }
    if (this.left === LABEL_WIDTH) ctx.fillText("trajectory", 4, AXIS_HEIGHT / 2);
  }

  position(event) {
    const y = event.clientY - this.canvas.getBoundingClientRect().top - AXIS_HEIGHT;
    const at = Math.floor((y + this.layout.top) / this.layout.rowHeight);
    return y < 0 || at >= this.order.length ? -1 : at;
  }

  hover(event) {
    const position = this.position(event), x = event.clientX - this.canvas.getBoundingClientRect().left;
    if (position < 0) { this.tooltip.hidden = true; return; }
    const at = this.from + (x - this.left) / (this.width - this.left) * (this.to - this.from);
    this.tooltip.textContent = tooltipText(this.run, this.phases, this.order[position], x < this.left ? -1 : at);
    this.tooltip.hidden = false;
    this.tooltip.style.left = `${Math.min(event.clientX + 14, innerWidth - 430)}px`;
    this.tooltip.style.top = `${event.clientY + 16}px`;
  }

  choose(position) {
    if (!this.order.length) return;
    this.chosen = Math.max(0, Math.min(position, this.order.length - 1));
    if (this.rowHeight) {
      const y = this.chosen * this.rowHeight, room = this.height - AXIS_HEIGHT, top = this.viewport.scrollTop;
      if (y < top) this.viewport.scrollTop = y;
      else if (y + this.rowHeight > top + room) this.viewport.scrollTop = y + this.rowHeight - room;
    }
    this.draw();
    showDetail(this.detail, this.run, this.phases, this.order[this.chosen]);
  }

  key(event) {
    const page = Math.max(1, Math.floor((this.height - AXIS_HEIGHT) / this.layout.rowHeight) - 1);
    const act = {
      ArrowDown: () => this.choose(this.chosen + 1), ArrowUp: () => this.choose(this.chosen - 1),
      PageDown: () => this.choose(this.chosen + page), PageUp: () => this.choose(this.chosen - page),
      Home: () => this.choose(0), End: () => this.choose(this.order.length - 1),
      ArrowLeft: () => this.pan(-0.2), ArrowRight: () => this.pan(0.2),
      "+": () => this.zoom(0.5), "=": () => this.zoom(0.5), "-": () => this.zoom(2), 0: () => this.reset(),
    }[event.key];
    if (!act || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    act();
  }

  wheel(event) {
    if (!event.ctrlKey && !event.shiftKey) return;  // scrolls the rows
    event.preventDefault();
    const x = event.clientX - this.canvas.getBoundingClientRect().left;
    const share = Math.max(0, (x - this.left) / (this.width - this.left));
    this.zoom((event.deltaY || event.deltaX) > 0 ? 1.25 : 0.8, share);
  }

  zoom(factor, share = 0.5) {
    const all = this.length, span = Math.max(all / 1e5, Math.min(all, (this.to - this.from) * factor));
    this.show(this.from + (this.to - this.from) * share - span * share, span);
  }

  pan(share) { this.show(this.from + (this.to - this.from) * share, this.to - this.from); }

  show(from, span) {
    const all = this.length;
    this.from = Math.max(0, Math.min(from, all - span));
    this.to = Math.min(all, this.from + span);
    this.draw();
  }

  reset() { this.show(0, this.length); }
}

/** A plain and a hatched fill for each phase; waiting is hatched. */
function phaseFills(ctx, phases) {
  return phases.map((phase, k) => {
    const plain = style(`--phase-${k}`);
    if (!phase.waiting) return { plain, fill: plain };
    const tile = element("canvas", { width: 6, height: 6 }), pen = tile.getContext("2d");
    pen.fillStyle = plain;
    pen.fillRect(0, 0, 6, 6);
    pen.strokeStyle = style("--hatch");
    pen.lineWidth = 1;
    pen.beginPath();
    for (const shift of [-6, 0, 6]) { pen.moveTo(shift, 6); pen.lineTo(shift + 6, 0); }
    pen.stroke();
    return { plain, fill: ctx.createPattern(tile, "repeat") };
  });
}

function roundStep(least) {
  const power = 10 ** Math.floor(Math.log10(least));
  return [1, 2, 5, 10].map((k) => k * power).find((step) => step >= least);
}

function shortened(text, length) {
  return text.length <= length ? text : `${text.slice(0, length / 2 - 1)}…${text.slice(-length / 2)}`;
}
