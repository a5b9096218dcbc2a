"use strict";
// Curves over time, drawn by uPlot. Series differ by dash as well as by colour, and each chart has its table.

const DASHES = [[], [8, 4], [2, 3], [10, 3, 2, 3], [5, 2], [1, 2]];
const LINE_COLOURS = ["--phase-4", "--phase-3", "--phase-7", "--phase-6", "--phase-2", "--phase-9"];
/** The dashes of the k-th line: lines whose colour repeats differ in them. */
function dashOf(one, k) { return one.fill ? [] : (one.dash || DASHES[(k + Math.floor(k / DASHES.length)) % DASHES.length]); }

const CHARTS = [];  // drawn when all have their place, and again when the colour scheme or the window changes

/** A chart in `parent`; `series` are {label, values, fill?, colour?, raw?}, null is "not measured". */
function addChart(parent, title, hint, times, series, options = {}) {
  const kind = series.some((one) => one.fill) ? "chart areas" : "chart";
  const box = element("div", { class: kind }, element("h3", {}, title), element("p", { class: "hint" }, hint));
  const plotBox = element("div", { class: "plot" });
  box.append(plotBox, chartTable(title, times, series, options));
  parent.append(box);
  CHARTS.push({ plotBox, times, series, options, plot: null });
}

function drawChart(chart) {
  if (chart.plot) chart.plot.destroy();
  const width = Math.max(320, chart.plotBox.clientWidth || 640);
  const axis = { stroke: style("--faint"), grid: { stroke: style("--line"), width: 1 }, ticks: { stroke: style("--line") } };
  const format = chart.options.format || ((value) => number(value, value < 10 ? 2 : 0));
  const lines = chart.series.map((one, index) => {
    const colour = style(one.colour || LINE_COLOURS[index % LINE_COLOURS.length]);
    return {
      label: one.label,
      stroke: one.fill ? style("--page") : colour,
      width: one.fill ? 0.5 : 2,
      dash: dashOf(one, index),
      fill: one.fill ? colour : undefined,
      paths: one.stepped ? uPlot.paths.stepped({ align: 1 }) : undefined,
      points: { show: false },
      spanGaps: false,
      value: (_, shown, at, point) => {
        const value = point === null ? null : (one.raw || one.values)[point];
        return value === null || value === undefined ? "–" : format(value);
      },
    };
  });
  chart.plot = new uPlot({
    width,
    height: chart.options.height || 220,
    legend: { markers: { width: 0, stroke: (_, k) => style("--line"), fill: (_, k) => markerFill(chart.series, k) } },
    cursor: { y: false, drag: { x: true, y: false } },
    scales: { x: { time: false }, y: { range: chart.options.range || ((_, low, high) => [0, Math.max(high, 1) * 1.05]) } },
    axes: [
      { ...axis, values: (_, at) => at.map((s) => `${number(s, at[1] - at[0] < 1 ? 1 : 0)} s`) },
      { ...axis, size: 60, values: (_, at) => at.map((v) => chart.options.percent ? `${number(v * 100)}%` : number(v, v % 1 ? 1 : 0)) },
    ],
    series: [{ label: "time", value: (_, at) => at === null ? "–" : seconds(at) }, ...lines],
    hooks: chart.options.markers ? { draw: [(plot) => drawMarkers(plot, chart.options.markers)] } : {},
  }, [chart.times, ...chart.series.map((one) => one.values)], chart.plotBox);
}

/** A legend's mark: the colour of an area, or a line with the dashes of the curve. */
function markerFill(series, k) {
  if (k === 0) return "transparent";
  const one = series[k - 1], colour = style(one.colour || LINE_COLOURS[(k - 1) % LINE_COLOURS.length]);
  const dash = dashOf(one, k - 1);
  if (!dash.length) return colour;
  let at = 0;
  const stops = dash.map((length, n) => `${n % 2 ? "transparent" : colour} ${at}px ${at += length}px`);
  return `repeating-linear-gradient(90deg, ${stops.join(", ")})`;
}

/** Vertical lines with a label: where the tail begins. */
function drawMarkers(plot, markers) {
  const { ctx, bbox } = plot;
  ctx.save();
  ctx.strokeStyle = ctx.fillStyle = style("--faint");
  ctx.font = `${11 * devicePixelRatio}px system-ui`;
  ctx.textAlign = "right";
  ctx.setLineDash([3, 3]);
  markers.forEach((marker, index) => {
    const x = plot.valToPos(marker.at, "x", true);
    ctx.beginPath();
    ctx.moveTo(x, bbox.top);
    ctx.lineTo(x, bbox.top + bbox.height);
    ctx.stroke();
    ctx.fillText(marker.label, x - 4, bbox.top + bbox.height - (8 + 14 * (index % 6)) * devicePixelRatio);
  });
  ctx.restore();
}

const TABLE_POINTS = 50;

function chartTable(title, times, series, options) {
  const box = element("details", {}, element("summary", {}, "as a table"));
  box.addEventListener("toggle", () => {
    if (!box.open || box.querySelector("table")) return;
    const every = Math.max(1, Math.ceil(times.length / TABLE_POINTS));
    const body = element("tbody");
    for (let k = 0; k < times.length; k += every) {
      const cells = series.map((one) => {
        const value = (one.raw || one.values)[k];
        const text = value === null || value === undefined ? "–" : options.percent ? `${number(value * 100, 1)}%` : number(value, 2);
        return element("td", { class: "number" }, text);
      });
      body.append(element("tr", {}, element("th", { scope: "row" }, seconds(times[k])), ...cells));
    }
    const heads = ["time", ...series.map((one) => one.label)].map((name) => element("th", { scope: "col" }, name));
    const table = element("table", { "aria-label": title }, element("thead", {}, element("tr", {}, ...heads)), body);
    box.append(element("div", { class: "wide" }, table));
  });
  return box;
}

/** The middle of each bucket. */
function bucketTimes(count, length) {
  return Array.from({ length: count }, (_, k) => (k + 0.5) * length / count);
}

/** What the trajectories of a run were doing, stacked from the work at the bottom to the waiting on top. */
function addPhaseChart(parent, run, phases) {
  const order = [4, 5, 2, 3, 7, 8, 9, 1, 6, 0].filter((phase) => run.phases[phase].some((value) => value > 0));
  const sum = new Array(run.phases[0].length).fill(0);
  const stacked = order.map((phase) => {
    run.phases[phase].forEach((value, k) => { sum[k] += value; });
    return { label: phases[phase].label, values: sum.slice(), raw: run.phases[phase], fill: true, colour: `--phase-${phase}` };
  });
  stacked.reverse();  // the largest sum is drawn first and covered by the others
  const times = bucketTimes(sum.length, run.makespan_s);
  const hint = "Trajectories in each phase, stacked; the order in the legend is the order in the picture." +
    (run.reference === null ? " Admission sets no limit." : ` The dashed line is admission's reference, ${number(run.reference)}.`);
  if (run.reference !== null) {
    const line = new Array(times.length).fill(run.reference);
    stacked.push({ label: "reference concurrency", values: line, colour: "--ink", dash: [6, 4] });
  }
  addChart(parent, "What the trajectories do", hint, times, stacked, { height: 260 });
}

function addSlotCharts(parent, run) {
  for (const [name, slots] of Object.entries(run.slots)) {
    if (slots.running === null) {
      parent.append(element("div", { class: "chart" }, element("h3", {}, `Slots ${name}`), element("p", { class: "hint" }, "not measured")));
      continue;
    }
    const times = bucketTimes(slots.running.length, run.makespan_s);
    const series = [
      { label: "running", values: slots.running, colour: "--phase-7" },
      { label: "waiting", values: slots.waiting, colour: "--phase-6" },
    ];
    if (slots.slots !== null) {
      series.push({ label: "slots", values: new Array(times.length).fill(slots.slots), colour: "--ink", dash: [2, 3] });
    }
    const limit = slots.slots === null ? "their number is not known" : `${slots.slots} of them`;
    addChart(parent, `Slots ${name}`, `Actions that hold a slot (${limit}) and actions that wait for one.`, times, series);
  }
}

function addReplicaCharts(parent, run) {
  const replicas = Object.entries(run.replicas).sort(([a], [b]) => a.localeCompare(b, "en", { numeric: true }));
  if (!replicas.length) return;
  const points = replicas[0][1].requests.length;
  addChart(parent, "Requests at each replica", "In its queue, prefill or decode, as the engine saw them.",
    bucketTimes(points, run.makespan_s), replicas.map(([name, one]) => ({ label: name, values: one.requests })));
  const cached = replicas.map(([name, one]) => ({ label: name, values: one.cached_share }));
  addChart(parent, "Prompt tokens found in each replica's cache", "Of the prompts answered at that time; gaps are times without any, or not measured.",
    bucketTimes(cached[0].values.length, run.makespan_s), cached,
    { percent: true, range: () => [0, 1.02], format: (value) => `${number(value * 100, 1)}%` });
}

/** Trajectories that had not ended, of all runs on one scale. */
function addTailChart(parent, runs) {
  const times = [...new Set([0, ...runs.flatMap((run) => tailPoints(run.ends_s))])].sort((a, b) => a - b);
  const series = runs.map((run) => ({ label: run.name, values: times.map((at) => remaining(run.ends_s, at)), stepped: true }));
  const markers = runs.flatMap((run) => [0.9, 0.99].filter(() => run.ends_s.length).map((share) => ({
    at: run.ends_s[Math.ceil(share * run.ends_s.length) - 1],
    label: `${runs.length > 1 ? run.name + " " : ""}${share * 100}% ended`,
  })));
  addChart(parent, "The tail", "Share of the trajectories that had not ended yet. What is right of the marks is the tail.", times, series,
    { percent: true, markers, range: () => [0, 1.02], format: (value) => `${number(value * 100, 1)}%` });
}

/** At most about 600 of the times, every one of the last 100 among them. */
function tailPoints(ends) {
  const early = ends.slice(0, -100);
  const every = Math.max(1, Math.ceil(early.length / 500));
  return [...early.filter((_, k) => k % every === 0), ...ends.slice(-100)];
}

function remaining(ends, at) {
  let low = 0, high = ends.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (ends[middle] <= at) low = middle + 1; else high = middle;
  }
  return ends.length ? (ends.length - low) / ends.length : null;
}
