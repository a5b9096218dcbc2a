"use strict";
// Reads the data that stands in the page. Times are seconds from the batch's start.

const STATES = ["finished", "truncated", "failed", "cancelled", "unfinished"];

async function unpackBytes(text) {
  const bytes = Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).arrayBuffer();
}

/** A run whose segments are typed arrays; row r has the segments first[r] … first[r + 1] - 1. */
async function unpackRun(run) {
  const packed = run.segments;
  const [counts, ticks, phases, turns, sites] = await Promise.all(
    [packed.counts, packed.ticks, packed.phases, packed.turns, packed.sites].map(unpackBytes));
  const rowCounts = new Uint32Array(counts);
  const lengths = new Uint32Array(ticks);
  const first = new Uint32Array(rowCounts.length + 1);
  const end = new Float64Array(lengths.length);
  const lastEnd = new Float64Array(rowCounts.length);
  let segment = 0;
  for (let row = 0; row < rowCounts.length; row++) {
    first[row] = segment;
    let at = 0;
    for (let k = 0; k < rowCounts[row]; k++, segment++) {
      at += lengths[segment];
      end[segment] = at / packed.ticks_per_s;
    }
    lastEnd[row] = at / packed.ticks_per_s;
  }
  first[rowCounts.length] = segment;
  return {
    ...run,
    count: rowCounts.length,
    first,
    end,
    lastEnd,
    phase: new Uint8Array(phases),
    turn: new Int16Array(turns),
    site: new Uint16Array(sites),
    places: packed.places,
    phaseSeconds: phaseSeconds(rowCounts.length, first, end, new Uint8Array(phases)),
  };
}

/** Seconds of each row in each of the ten phases: [row * 10 + phase]. */
function phaseSeconds(count, first, end, phase) {
  const seconds = new Float64Array(count * 10);
  for (let row = 0; row < count; row++) {
    let at = 0;
    for (let k = first[row]; k < first[row + 1]; k++) {
      seconds[row * 10 + phase[k]] += end[k] - at;
      at = end[k];
    }
  }
  return seconds;
}

function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (value !== undefined && value !== false) made.setAttribute(key, value);
  }
  made.append(...children);
  return made;
}

function number(value, digits = 0) {
  if (value === null || value === undefined) return "not measured";
  return value.toLocaleString("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits });
}

function seconds(value) {
  if (value === null || value === undefined) return "not measured";
  return `${number(value, value < 10 ? 2 : 1)} s`;
}

function style(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}
