// The view under a %%memtrace cell while it runs: the table of the report that follows, and the
// dashboard's chart for the devices whose memory the cell has changed.

import { PEAK_MEANS, cellName, markPeak, reservedName } from "./cellwords.js";
import { Chart } from "./chart.js";
import { Connection } from "./connection.js";
import { UNKNOWN, formatBytes, formatChange, formatElapsed } from "./format.js";
import { Frames } from "./frames.js";
import { h, setText } from "./html.js";
import { MARGIN } from "./margin.js";
import { loadPlotly } from "./plotly.js";
import { LINES } from "./row.js";
import { Theme } from "./theme.js";

const COLUMNS = ["before", "now", "change", "peak", "peak rise"];
const ROW_PX = 120;
/** Maximum number of devices that are drawn. */
const MOST_ROWS = 8;
/** Smallest change that counts, in bytes: the host's counters always move a little. */
const MOVED_BYTES = 1024 ** 2;

/** Return the figures of a traced cell's devices, GPUs first.
 *
 * For each device: its name, whether its peaks are exact, and both counters with their bytes before
 * the cell, now, and at the peak; ``null`` is unknown. */
export function describeDevices(store, startS, only = null) {
  const names = [...store.columns.keys()].filter((device) => !only || device === only);
  // GPUs first, as in the report; a map keeps the order in which devices came into use.
  names.sort((a, b) => (a === "host") - (b === "host"));
  return names.map((device) => {
    const now = store.latest(device);
    // A device that was not there at the start was first touched by the cell: it began at 0.
    const before = store.figuresAt(device, startS) ?? { allocated: 0, reserved: 0 };
    const counter = (name, label, peak) => ({ label, before: before[name], now: now?.[name] ?? null, peak });
    return {
      device,
      peakIs: store.peaksAre.get(device),
      counters: [
        counter("allocated", "allocated", now?.allocatedPeak ?? null),
        counter("reserved", reservedName(device), now?.reservedPeak ?? null),
      ],
    };
  });
}

/** True if the cell has visibly changed the memory of a device. */
export function hasMoved({ counters }) {
  const differs = (value, before) => value !== null && before !== null && Math.abs(value - before) >= MOVED_BYTES;
  return counters.some(({ before, now, peak }) => differs(now, before) || (peak !== null && before !== null && peak - before >= MOVED_BYTES));
}

class TraceView {
  constructor(connection, element) {
    const { model } = connection;
    this.connection = connection;
    this.store = connection.store;
    this.only = model.get("device");
    this.cell = null;
    this.cells = new Map();
    this.frames = new Frames(() => this.draw());
    this.elapsed = h("span", { class: "gmw-m" });
    this.body = h("table", { class: "gmw-t gmw-q", style: "margin: 0; table-layout: auto" });
    const head = h("p", {}, h("strong", {}, cellName({ execution_count: model.get("execution_count") })), " · ",
      h("span", { class: "gmw-m" }, "running"), " · ", this.elapsed);
    this.plot = h("div", { class: "gmd gmd-trace" });
    this.theme = new Theme(this.plot, () => this.frames.schedule());
    this.chart = new Chart(this.store, this.theme, new Set(["whole"]));
    this.keys = h("div", { class: "gmd-legend" });
    this.plot.append(this.keys, h("div", { class: "gmd-plot" }, this.chart.element));
    this.plot.hidden = true;
    this.root = h("div", { class: "gmw-live" },
      // The static copy below this view is for a page without a kernel: static_copies.py.
      h("style", {}, `.${model.get("copy_class")} { display: none !important }`),
      h("style", {}, model.get("css")),
      // JupyterLab gives the report's tables a style of its own; elsewhere the class means nothing.
      h("div", { class: "jp-RenderedHTMLCommon" }, h("div", { class: "gmw" }, head, h("div", { class: "gmw-w", style: "overflow-x: auto" }, this.body))),
      this.plot);
    element.append(this.root);
    this.sizes = new ResizeObserver(() => this.frames.schedule());
    this.sizes.observe(this.root);
    this.chart.element.addEventListener("pointerenter", () => (this.chart.isHovered = true));
    this.chart.element.addEventListener("pointerleave", () => (this.chart.isHovered = false));
    this.unlisten = connection.listen(() => this.frames.schedule());
    this.load = () => this.loadChart();
    model.on("change:plotly", this.load);
    this.loadChart();
    this.draw();
  }

  /** plotly.js comes when the cell has run for a moment: a short one needs no chart. */
  async loadChart() {
    try {
      this.plotly = await loadPlotly(this.connection.model.get("plotly"));
    } catch (error) {
      console.warn("[gpumemwidget] the chart can't be drawn here:", error);
    }
    this.frames.schedule();
  }

  draw() {
    const { store } = this;
    this.cell = store.running ?? this.cell;
    if (!this.cell) return;
    const startS = this.cell.start_s;
    const elapsedS = Math.max(0, (store.lastTime ?? startS) - startS);
    setText(this.elapsed, formatElapsed(elapsedS));
    const devices = describeDevices(store, startS, this.only);
    this.drawTable(devices);
    // A device without a change has no chart, as in the report.
    const moved = devices.filter(hasMoved).map(({ device }) => device).slice(0, MOST_ROWS);
    const width = this.plot.parentNode.clientWidth;
    this.plot.hidden = !this.plotly || !moved.length || !this.connection.model.get("plotly")?.byteLength;
    if (this.plot.hidden || !width) return;
    this.chart.plotly = this.plotly;
    const height = MARGIN.t + MARGIN.b + moved.length * ROW_PX;
    this.chart.element.style.height = `${height}px`;
    this.drawKeys(moved);
    this.chart.draw({
      devices: moved, range: [startS, startS + Math.max(elapsedS, 0.1)], width: Math.min(width, this.plot.clientWidth), height,
    });
  }

  drawTable(devices) {
    const names = devices.map(({ device }) => device).join();
    if (names !== this.names) this.buildTable(devices);
    this.names = names;
    for (const { device, counters, peakIs } of devices) {
      counters.forEach(({ label, before, now, peak }) => {
        const isKnown = (...values) => values.every((value) => value !== null);
        const mark = markPeak(peakIs);
        const texts = [
          formatBytes(before),
          formatBytes(now),
          isKnown(now, before) ? formatChange(now - before) : UNKNOWN,
          isKnown(peak) ? mark + formatBytes(peak) : UNKNOWN,
          isKnown(peak, before) ? mark + formatChange(Math.max(0, peak - before)) : UNKNOWN,
        ];
        this.cells.get(`${device} ${label}`).forEach((cell, k) => setText(cell, texts[k]));
        for (const cell of this.cells.get(`${device} ${label}`).slice(3)) cell.title = isKnown(peak) ? PEAK_MEANS[peakIs] ?? "" : "";
      });
    }
  }

  /** Build the table of the report that follows: a body for each device, a row for each counter. */
  buildTable(devices) {
    this.cells.clear();
    const nowrap = "white-space: nowrap; text-align: left";
    const rowOf = (device, { label }) => {
      const cells = COLUMNS.map((name) => h("td", { class: "gmw-r", style: "white-space: nowrap", "data-column": name }));
      this.cells.set(`${device} ${label}`, cells);
      const isMalloc = device === "host" && label === "allocated";
      return h("tr", { "data-device": device, "data-counter": label },
        h("th", { scope: "row", style: nowrap }, label, isMalloc ? [" ", h("span", { class: "gmw-m" }, "(malloc)")] : []), cells);
    };
    this.body.replaceChildren(
      h("thead", {}, h("tr", {}, h("th", { scope: "col", style: nowrap }, "memory"),
        COLUMNS.map((name) => h("th", { scope: "col", class: "gmw-r", style: "white-space: nowrap" }, name)))),
      ...devices.map(({ device, counters }) => h("tbody", {},
        h("tr", {}, h("th", { scope: "rowgroup", colspan: COLUMNS.length + 1, class: "gmw-d", style: nowrap }, device)),
        counters.map((counter) => rowOf(device, counter)))));
  }

  drawKeys(devices) {
    const isOfHost = devices.join() === "host";
    const labels = { reserved: isOfHost ? reservedName("host") : "reserved", peak: isOfHost ? "peak (resident)" : "peak" };
    const shown = LINES.filter((line) => line !== "whole");
    if (this.keys.children.length) shown.forEach((line, i) => setText(this.keys.children[i], labels[line] ?? line));
    else this.keys.append(...shown.map((line) => h("span", { class: `gmd-key gmd-key-${line}` }, labels[line] ?? line)));
  }

  dispose() {
    this.frames.dispose();
    this.sizes.disconnect();
    this.theme.dispose();
    this.unlisten();
    this.connection.model.off("change:plotly", this.load);
    this.chart.dispose();
    this.root.remove();
  }
}

export function createTrace() {
  let connection = null;
  return {
    initialize({ model }) {
      connection = new Connection(model);
    },
    render({ el }) {
      const view = new TraceView(connection, el);
      return () => view.dispose();
    },
  };
}
