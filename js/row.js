// One device in the chart: its lines, its axis of bytes, its bounds: total, limit, budget.

import { reservedName } from "./cellwords.js";
import { binaryTicks, findUnit, formatBytes, formatTick } from "./format.js";
import { GAP_S, pickExtremes } from "./store.js";

/** The room around the lines, in pixels: axes, strips and bands keep to it. */
export const MARGIN = { l: 70, r: 14, t: 6, b: 26 };
// Height that a device's name takes above its lines.
const NAME_PX = 17;
/** Names of the lines over time, in the order of their traces; the first ones have figures on every device. */
export const COUNTED = ["allocated", "reserved", "peak"];
export const CURVES = [...COUNTED, "whole", "outside"];
// What is outside PyTorch is drawn from here on: a CUDA context takes less.
const LEAST_OUTSIDE = 2 ** 30;

export class ChartRow {
  constructor(device, store) {
    this.device = device;
    this.store = store;
    // The highest bytes on the axis, and its height.
    this.scale = 0;
    this.heightPx = null;
  }

  /** plotly's axis, traces, shapes and annotations of this device; ``context`` comes from ``Chart``. */
  draw(context) {
    const lines = this.lines(context);
    const seen = CURVES.filter((name) => !context.hiddenLines.has(name)).flatMap((name) => lines[name]);
    const highest = seen.reduce((most, bytes) => (bytes > most ? bytes : most), 0);
    const bounds = this.bounds(context);
    if (context.heightPx !== this.heightPx) this.scale = 0;
    this.heightPx = context.heightPx;
    this.scale = this.chooseScale(highest, bounds, context);
    const { values } = binaryTicks(this.scale, context.heightPx < 80 ? 2 : context.heightPx < 150 ? 3.5 : 4.5);
    const factor = 1024 ** findUnit(this.scale);
    const { shapes, annotations } = this.drawBounds(bounds, factor, context);
    if (context.isOneOfSeveral) {
      annotations.push({
        xref: "paper", x: 0, xanchor: "left", xshift: 6, yref: "paper", y: context.top, yanchor: "top",
        text: `<b>${this.device}</b>`, showarrow: false, font: { size: 11, color: context.colors.text },
      });
    }
    return { axis: this.axis(values, factor, context), traces: this.traces(lines, factor, context), shapes, annotations };
  }

  /** Return the points of the lines, with every extreme that is in view. */
  lines({ range: [from, to], width, spans, toX }) {
    const { store } = this;
    const column = store.columns.get(this.device);
    const lines = { allocatedT: [], allocated: [], reservedT: [], reserved: [], peakT: [], peak: [], ...this.wholeLine([from, to], toX) };
    if (!column) return lines;
    const add = (line, time, bytes) => {
      lines[`${line}T`].push(toX(time));
      lines[line].push(bytes);
    };
    const start = Math.max(0, store.indexAt(from) - 1);
    const end = Math.min(store.times.length, store.indexAt(to) + 1);
    const peaks = store.peaks(this.device);
    const series = [column.allocated, column.reserved, peaks];
    let span = 0;
    let inSpan = -1;
    let last = null;
    for (const i of pickExtremes(store.times, series, start, end, Math.ceil(width / 3))) {
      const time = store.times[i];
      const isGap = last !== null && store.hasGap(last, i);
      for (const line of ["allocated", "reserved"]) {
        if (isGap) for (const k of [last, i]) add(line, store.times[k], null);
        // A single unknown figure is no gap: the line goes on to the next known one.
        if (!Number.isNaN(column[line][i])) add(line, time, column[line][i]);
      }
      last = i;
      while (span < spans.length && spans[span][1] < time) span++;
      const within = span < spans.length && spans[span][0] <= time;
      // A high-water mark belongs to one cell: the line is broken between two.
      if (isGap || (inSpan >= 0 && inSpan !== (within ? span : -1))) add("peak", time, null);
      inSpan = within ? span : -1;
      if (within) add("peak", time, peaks[i]);
    }
    return lines;
  }

  /** Return the memory in use on the whole device, by all processes, up to the newest sample; and
   * what this process has there outside PyTorch. The driver is asked once a second: what this process
   * alone has reserved since then lifts the line. */
  wholeLine([from, to], toX) {
    const { times, lastTime, uses, columns } = this.store;
    const own = uses.get(this.device) ?? { t: [], outside: [] };
    const line = { wholeT: [], whole: [], outside: [] };
    const reserved = columns.get(this.device)?.reserved ?? [];
    own.t.forEach((start, i) => {
      const next = own.t[i + 1] ?? Math.max(start, lastTime);
      const end = Math.min(next, start + GAP_S);
      if (end < from || start > to) return;
      let whole = own.used[i];
      const add = (time, outside = own.outside[i]) => {
        line.wholeT.push(toX(time));
        line.whole.push(whole);
        line.outside.push(outside);
      };
      add(start);
      for (let k = this.store.indexAt(start); times[k] < end; k++) {
        if (!(reserved[k] > whole)) continue;
        whole = reserved[k];
        add(Math.max(start, times[k - 1] ?? start));
      }
      if (end > start && (end < next || !(own.t[i + 1] <= to))) add(end);
      if (end < next) {
        whole = null;
        add(end, null);
      }
    });
    if (!hasOutside(own)) line.outside = [];
    return line;
  }

  /** Return total, limit and budget of the device, the highest first. */
  bounds({ colors }) {
    const info = this.store.devices.get(this.device) || {};
    return [
      { label: "total", bytes: info.total_bytes, dash: "solid", color: colors.total, ink: colors.muted },
      { label: "limit", bytes: info.limit_bytes, dash: "7px,3px", color: colors.limit, ink: colors.limit },
      { label: "budget", bytes: info.budget_bytes, dash: "2px,3px", color: colors.budget, ink: colors.budget },
    ].filter(({ bytes }) => bytes).sort((a, b) => b.bytes - a.bytes);
  }

  chooseScale(highest, bounds, { heightPx, isOneOfSeveral }) {
    // Above the lines of a small chart stand its device's name and total.
    const room = !isOneOfSeveral ? 1.12 : Math.max(1.3, Math.min(1.8, heightPx / (heightPx - NAME_PX)));
    let want = Math.max(highest * room, 1024 * 1024);
    for (const { label, bytes } of bounds) {
      // The device's end is in view as soon as it is near; who sets a bound wants to see how far it is.
      if (bytes < highest * (label === "total" ? 1.8 : 8)) want = Math.max(want, bytes * (label === "total" ? 1 : room));
    }
    // There is nothing above the device's total: the scale ends there.
    const total = bounds.find(({ label }) => label === "total");
    if (total && want > total.bytes / 1.2) want = Math.max(total.bytes, highest);
    // The scale grows at once and shrinks late, so that it does not breathe.
    return this.scale && want <= this.scale && want > this.scale * 0.5 ? this.scale : want;
  }

  axis(values, factor, { colors }) {
    return {
      range: [0, this.scale / factor],
      fixedrange: true,
      tickvals: values.map((value) => value / factor),
      ticktext: values.map((value) => formatTick(value)),
      ticks: "outside",
      ticklen: 6,
      tickcolor: "rgba(0,0,0,0)",
      gridcolor: colors.grid,
      zeroline: true,
      zerolinecolor: colors.line,
      zerolinewidth: 1,
      anchor: "x",
    };
  }

  /** A line for each bound in view; at the top their names, and that of the nearest above. */
  drawBounds(bounds, factor, { colors, width, name, top, said }) {
    const fits = ({ bytes }) => bytes <= this.scale;
    const shapes = bounds.filter(fits).map(({ label, bytes, dash, color }) => ({
      type: "line", xref: "paper", x0: 0, x1: 1, yref: `y${name}`, y0: bytes / factor, y1: bytes / factor,
      line: { color, width: label === "total" ? 1.2 : 1.5, dash }, layer: label === "total" ? "below" : "above",
    }));
    const above = bounds.findLast((bound) => !fits(bound));
    let named = bounds.filter((bound) => fits(bound) || bound === above)
      .map((bound) => ({ ...bound, text: `${fits(bound) ? "" : "↑ "}${bound.label} ${formatBytes(bound.bytes)}` }))
      // Alike devices have one total: among many it is said once.
      .filter(({ label, text }) => label !== "total" || !said?.has(text));
    for (const { text } of named) said?.add(text);
    const widthOf = (some) => some.reduce((sum, { text }) => sum + 6.2 * text.length + 12, 4);
    // Where there is no room for all the total goes, which the cards show too.
    const room = width - MARGIN.l - MARGIN.r - 8 - 7 * this.device.length;
    if (widthOf(named) > room) named = named.filter(({ label }) => label !== "total");
    const annotations = named.map(({ text, ink }, i) => ({
      xref: "paper", x: 1, xanchor: "right", xshift: -widthOf(named.slice(0, i)), showarrow: false,
      yref: "paper", y: top, yanchor: "top", text, font: { size: 10.5, color: ink }, bgcolor: colors.veil, borderpad: 0,
    }));
    return { shapes, annotations };
  }

  traces(lines, factor, { colors, name, hiddenLines, isHovered }) {
    const scaled = (list) => list.map((value) => (value === null ? null : value / factor));
    // Tooltips have their own units; these thousands of texts are made only under the pointer.
    const draw = (curve, words, line, { t = lines[`${curve}T`], hoverWords = words } = {}) => ({
      type: "scatter", mode: "lines", yaxis: `y${name}`, xaxis: "x", connectgaps: false,
      visible: !hiddenLines.has(curve), name: words, x: t, y: scaled(lines[curve]), line,
      ...(isHovered
        ? { customdata: lines[curve].map((value) => formatBytes(value)), hovertemplate: `${hoverWords}: %{customdata}<extra></extra>` }
        : { hovertemplate: `${hoverWords}<extra></extra>` }),
    });
    const curves = [
      draw("allocated", "allocated", { color: colors.allocated, width: 1.8 }),
      draw("reserved", reservedName(this.device), { color: colors.reserved, width: 1.5 }),
      draw("peak", this.device === "host" ? "peak (resident)" : "peak", { color: colors.peak, width: 1.5, dash: "5px,3px" }),
      draw("whole", "whole device", { color: colors.muted, width: 1.2, dash: "1.5px,2px", shape: "hv" }, { hoverWords: "whole device in use" }),
      draw("outside", "outside PyTorch", { color: colors.outside, width: 1.5, shape: "hv" }, { t: lines.outside.length ? lines.wholeT : [] }),
    ];
    // plotly fills an area across the gaps of its line: this one has no line, and falls to 0 at both ends of a gap.
    const y = lines.allocated.map((value) => (value ?? 0) / factor);
    return [...curves, { ...curves[0], y, line: { width: 0 }, fill: "tozeroy", fillcolor: colors.fill, hoverinfo: "skip", hovertemplate: null }];
  }
}

/** True where other libraries than PyTorch have much of a device in this process. */
export function hasOutside(use) {
  return Boolean(use?.outside.some((bytes) => bytes >= LEAST_OUTSIDE));
}
