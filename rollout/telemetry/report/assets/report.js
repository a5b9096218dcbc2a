"use strict";
// Puts the page together when it has loaded.

const TIMELINES = [];

async function startReport() {
  const data = JSON.parse(document.getElementById("makespan-data").textContent);
  const runs = await Promise.all(data.runs.map(unpackRun));
  const longest = Math.max(...runs.map((run) => run.makespan_s)) || 1;
  const timelines = document.getElementById("timeline-runs"), curves = document.getElementById("curve-runs");
  for (const run of runs) {
    const article = element("article", { "aria-label": `timeline of ${run.name}` });
    if (runs.length > 1) article.append(element("h3", {}, run.name));
    timelines.append(article);
    TIMELINES.push(new Timeline(article, run, data.phases, longest));
  }
  addTailChart(document.getElementById("comparison"), runs);
  for (const run of runs) {
    const charts = element("div", { class: "charts" });
    const article = element("article", { "aria-label": `curves of ${run.name}` });
    if (runs.length > 1) article.append(element("h3", {}, run.name));
    article.append(charts);
    curves.append(article);
    addPhaseChart(charts, run, data.phases);
    addSlotCharts(charts, run);
    addReplicaCharts(charts, run);
  }
  CHARTS.forEach(drawChart);
  const redraw = () => { TIMELINES.forEach((timeline) => timeline.draw()); CHARTS.forEach(drawChart); };
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  let resizing;
  addEventListener("resize", () => { clearTimeout(resizing); resizing = setTimeout(redraw, 150); });
  document.documentElement.dataset.ready = "true";
}

startReport();
