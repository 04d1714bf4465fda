// The dashboard's plot: the chart with the names of cells above it and how busy the GPUs were below.

import { BusyStrip } from "./busy.js";
import { Chart } from "./chart.js";
import { h, setText } from "./html.js";
import { Lane } from "./lane.js";
import { MARGIN } from "./row.js";
import { findPlotly } from "./plotly.js";

const NARROW_PX = 480;
const MOST_BANDS = 150;
const SHORTEST_S = 20;
const NARROWEST_BAND_PX = 1.5;

export class Plot {
  constructor(root, connection, choices, theme) {
    this.root = root;
    this.connection = connection;
    this.store = connection.store;
    this.choices = choices;
    this.theme = theme;
    this.dragging = false;
    // The newest second that was drawn.
    this.liveEnd = 0;
    this.chart = new Chart(this.store, theme, choices.hiddenLines);
    this.lane = new Lane(this.store, choices);
    this.busy = new BusyStrip(this.store, theme);
    this.empty = h("div", { class: "gmd-empty gmd-over-plot" }, "Waiting for the first reading…");
    this.growth = h("div", { class: "gmd-growth gmd-grows", role: "status" });
    this.element = h("div", { class: "gmd-plot" },
      this.lane.element, this.chart.element, this.busy.element, this.growth, this.lane.tip, this.empty);
    this.sizes = new ResizeObserver(() => this.schedule());
    this.sizes.observe(this.element);
    for (const [name, isHovered] of [["pointerenter", true], ["pointerleave", false]]) {
      this.chart.element.addEventListener(name, () => {
        this.chart.isHovered = isHovered;
        this.schedule();
      });
    }
    this.chart.element.addEventListener("pointerdown", () => (this.dragging = true));
    this.release = () => {
      if (!this.dragging) return;
      this.dragging = false;
      this.schedule();
    };
    window.addEventListener("pointerup", this.release);
    window.addEventListener("pointercancel", this.release);
  }

  dispose() {
    this.isDisposed = true;
    this.sizes.disconnect();
    window.removeEventListener("pointerup", this.release);
    window.removeEventListener("pointercancel", this.release);
    this.chart.dispose();
  }

  /** Draw with the browser's next frame, once for however many changes. As long as a drawing took, the
   * page is left in peace after it: many devices would keep a slow machine drawing all the time. */
  schedule() {
    this.isWanted = true;
    if (this.isBusy || this.isDisposed) return;
    this.isBusy = true;
    requestAnimationFrame(() => {
      this.isWanted = false;
      const begin = performance.now();
      if (!this.isDisposed) this.draw();
      // A timer runs after the browser has painted.
      setTimeout(() => setTimeout(() => {
        this.isBusy = false;
        if (this.isWanted) this.schedule();
      }, performance.now() - begin));
    });
  }

  /** First and last second that are in view, on the kernel's clock. */
  range() {
    const { zoom, pausedAt, windowS } = this.choices;
    if (zoom) return zoom;
    const end = pausedAt ?? this.store.lastTime ?? 0;
    // A young session fills the plot: its window grows to the one that was chosen.
    const first = this.store.times.length ? Math.min(this.store.times[0], end - SHORTEST_S) : end - SHORTEST_S;
    return [windowS === null ? first : Math.max(first, end - windowS), end];
  }

  draw() {
    const width = this.element.clientWidth;
    if (!width || this.dragging) return;
    const { devices } = this.choices;
    const range = this.range();
    this.liveEnd = this.choices.pausedAt ?? this.store.lastTime ?? 0;
    const height = this.height(devices.length, width);
    const cells = this.cellsIn(range);
    this.chart.element.style.height = `${height}px`;
    this.empty.hidden = this.store.times.length > 0;
    // A running cell that grows says so in the plot; afterwards its row does.
    setText(this.growth, (this.store.running?.leaks ?? []).map(({ note }) => note).filter(Boolean).join("; "));
    this.lane.draw(cells, range, width);
    this.busy.draw(devices, range, width);
    if (!this.chart.plotly) {
      if (findPlotly()) this.loading ??= this.load();
      else this.connection.askOnce({ kind: "plotly" });
      return;
    }
    this.chart.draw({ devices, range, width, height, shapes: this.bands(cells, range, width) });
    if (this.chart.drawn === 1) this.listen();
    this.root.dataset.drawn = this.chart.drawn;
    this.root.dataset.lastTime = this.store.lastTime ?? "";
  }

  async load() {
    try {
      this.chart.plotly = await findPlotly();
    } catch (error) {
      this.connection.receive({ kind: "trouble", message: `The plot can't be drawn here: ${error}` });
      return;
    }
    if (!this.isDisposed) this.draw();
  }

  listen() {
    const { element } = this.chart;
    element.on("plotly_relayout", (change) => {
      if (!("xaxis.range[0]" in change)) return;
      const axis = element._fullLayout.xaxis;
      const [from, to] = axis.range.map((x) => this.chart.fromX(axis.r2l(x)));
      if (to > from) this.choices.setZoom([from, to]);
    });
    element.on("plotly_doubleclick", () => this.choices.setZoom(null));
  }

  height(rows, width) {
    if (rows <= 1) return width < NARROW_PX ? 210 : 250;
    return MARGIN.t + MARGIN.b + rows * (rows > 6 ? 66 : rows > 4 ? 84 : 120);
  }

  /** The cells that are in view with their ends, newest last; a running one too. */
  cellsIn([from, to]) {
    const cells = this.store.cells
      .map((cell) => ({ ...cell, end_s: cell.start_s + cell.duration_s }))
      .filter((cell) => cell.start_s <= to && cell.end_s >= from);
    const { running, lastTime } = this.store;
    if (running && running.start_s <= to) {
      cells.push({ ...this.store.describeRunning(), duration_s: null, end_s: Math.max(lastTime ?? 0, running.start_s) });
    }
    return cells.slice(-MOST_BANDS);
  }

  bands(cells, range, width) {
    const perPixel = (range[1] - range[0]) / Math.max(1, width);
    const { colors } = this.theme;
    return cells
      .filter((cell) => (cell.end_s - cell.start_s) / perPixel >= NARROWEST_BAND_PX)
      .map((cell) => ({
        type: "rect", xref: "x", x0: this.chart.toX(cell.start_s), x1: this.chart.toX(cell.end_s), yref: "paper",
        y0: 0, y1: 1, line: { width: 0 }, layer: "below",
        fillcolor: cell.status === "error" || cell.status === "interrupted" ? colors["failed-band"] : colors.band,
      }));
  }

  /** Save the samples in view as a table. */
  saveTable() {
    const [from, to] = this.range();
    const text = this.store.formatTable(this.choices.devices, from, to);
    const url = URL.createObjectURL(new Blob([text], { type: "text/csv" }));
    const name = nameFile(this.connection.model.get("notebook"), new Date());
    const link = h("a", { href: url, download: name });
    document.body.append(link);
    link.click();
    link.remove();
    setTimeout(() => URL.revokeObjectURL(url), 10000);
  }
}

/** Return the name of a table of a notebook's memory, with the local time. */
export function nameFile(notebook, now) {
  const name = (notebook ?? "").split(/[\\/]/).at(-1).replace(/\.ipynb$/, "").replace(/[^\p{L}\p{N}._-]+/gu, "-");
  const two = (figure) => String(figure).padStart(2, "0");
  const day = [now.getFullYear(), two(now.getMonth() + 1), two(now.getDate())].join("-");
  const time = [now.getHours(), now.getMinutes(), now.getSeconds()].map(two).join("");
  return `${[name, "gpu-memory", day, time].filter(Boolean).join("-")}.csv`;
}
