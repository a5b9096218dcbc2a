"use strict";
// What is said of one trajectory, and the table that says it of all.

const TABLE_ROWS = 200;

function tooltipText(run, phases, row, at) {
  const lines = [`${run.rows.id[row]}, ${run.rows.state[row]} at ${seconds(run.lastEnd[row])}`];
  for (let k = run.first[row], start = 0; k < run.first[row + 1]; start = run.end[k], k++) {
    if (at < start || at >= run.end[k]) continue;
    const turn = run.turn[k] < 0 ? "" : `turn ${run.turn[k]}, `;
    const place = run.places[run.site[k]];
    lines.push(`${phases[run.phase[k]].label}: ${turn}${place ? place + ", " : ""}${seconds(run.end[k] - start)}`);
    lines.push(`${seconds(start)} to ${seconds(run.end[k])}`);
    break;
  }
  return lines.join("\n");
}

function showDetail(box, run, phases, row) {
  const rows = run.rows;
  const failure = rows.failure[row] ? ` (${rows.failure[row]})` : "";
  const facts = [
    `${rows.state[row]}${failure} at ${seconds(run.lastEnd[row])}`, `group ${rows.group[row]}`, `${rows.turns[row]} turns`,
    `reward ${rows.reward[row] === null ? "none" : number(rows.reward[row], 3)}`,
    `generated ${number(rows.generated_tokens[row])} tokens`, `context ${number(rows.context_tokens[row])} tokens`,
    `cached ${number(rows.cached_tokens[row])}`, `recomputed ${number(rows.recomputed_tokens[row])}`, `replicas used: ${rows.replicas[row]}`,
  ];
  const bar = element("div", { class: "bar", "aria-hidden": "true" });
  const parts = [];
  phases.forEach((phase, k) => {
    const spent = run.phaseSeconds[row * 10 + k];
    if (spent <= 0) return;
    const width = 100 * spent / run.lastEnd[row];
    bar.append(element("span", { class: `phase-${k}`, style: `width:${width}%` }, width > 3 ? phase.letter : ""));
    parts.push(`${phase.label} ${seconds(spent)}`);
  });
  const why = rows.reason[row] ? [element("div", {}, `Why late: ${rows.reason[row]}`)] : [];
  box.replaceChildren(element("b", {}, rows.id[row]), `: ${facts.join(", ")}.`, ...why, element("div", {}, parts.join(", ")), bar);
}

/** The rows of a timeline as a table, filled when it is opened. */
function trajectoryTable(timeline) {
  const { run, phases } = timeline;
  const box = element("details", { class: "trajectories" }, element("summary", {}, "as a table"));
  const fill = () => {
    if (!box.open) return;
    const used = phases.map((_, k) => k).filter((k) => run.phaseSeconds.some((spent, at) => at % 10 === k && spent > 0));
    const heads = ["trajectory", "state", "end", "turns", "reward", ...used.map((k) => phases[k].label), "why late"];
    const body = element("tbody");
    for (const row of timeline.order.slice(0, TABLE_ROWS)) {
      const failure = run.rows.failure[row] ? ` (${run.rows.failure[row]})` : "";
      const cell = (text) => element("td", { class: "number" }, text);
      body.append(element("tr", {}, element("th", { scope: "row" }, run.rows.id[row]), element("td", {}, run.rows.state[row] + failure),
        cell(seconds(run.lastEnd[row])), cell(number(run.rows.turns[row])),
        cell(run.rows.reward[row] === null ? "none" : number(run.rows.reward[row], 3)),
        ...used.map((k) => cell(seconds(run.phaseSeconds[row * 10 + k]))), element("td", {}, run.rows.reason[row])));
    }
    const rest = timeline.order.length - TABLE_ROWS;
    const more = rest > 0 ? element("p", { class: "hint" }, `${number(rest)} more: filter or sort to see them.`) : "";
    const head = element("thead", {}, element("tr", {}, ...heads.map((name) => element("th", { scope: "col" }, name))));
    box.replaceChildren(box.firstChild, element("div", { class: "wide" }, element("table", {}, head, body)), more);
  };
  box.addEventListener("toggle", fill);
  timeline.viewport.addEventListener("arranged", fill);
  return box;
}
