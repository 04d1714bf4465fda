// The live plot: allocated, reserved and peak of one or all devices over time, the cells as bands.
//
// plotly.js draws the axes, the lines and the cells' bands behind them; ``lane.js`` names the bands.

const MARGIN = { l: 70, r: 14, t: 6, b: 26 };
const MOST_BANDS = 150;
const SHORTEST_S = 20;
// A cell's last sample is stamped as its record is made: allow for the moment between the two.
const CELL_END_SLACK_S = 0.05;

class Plot {
  constructor(root, store, view) {
    this.root = root;
    this.store = store;
    this.view = view;
    this.rows = new Map();
    this.frame = null;
    this.dragging = false;
    this.drawn = 0;
    this.lane = new Lane(this, view);
    this.canvas = h("div", { class: "gmd-canvas", role: "img" });
    this.empty = h("div", { class: "gmd-empty gmd-over-plot" }, "Waiting for the first reading…");
    this.element = h("div", { class: "gmd-plot" },
      this.lane.element, this.canvas, this.lane.tip, this.empty);
    this.sizes = new ResizeObserver(() => this.schedule());
    this.sizes.observe(this.element);
    this.canvas.addEventListener("pointerdown", () => (this.dragging = true));
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
    cancelAnimationFrame(this.frame);
    this.sizes.disconnect();
    window.removeEventListener("pointerup", this.release);
    window.removeEventListener("pointercancel", this.release);
    if (this.plotly) this.plotly.purge(this.canvas);
  }

  /** Draw with the browser's next frame, once, however many messages arrive until then. */
  schedule() {
    if (this.frame !== null) return;
    this.frame = requestAnimationFrame(() => {
      this.frame = null;
      this.draw();
    });
  }

  shownDevices() {
    const all = [...this.store.devices.keys()];
    return this.view.device === "all" ? all : all.filter((d) => d === this.view.device);
  }

  /** First and last second that are in view, on the kernel's clock. */
  range() {
    if (this.view.zoom) return this.view.zoom;
    const end = this.view.pausedAt ?? this.store.lastTime ?? 0;
    // A young session fills the plot: its window grows to the one that was chosen.
    const first = this.store.times.length ? Math.min(this.store.times[0], end - SHORTEST_S) : end - SHORTEST_S;
    return [this.view.windowS === null ? first : Math.max(first, end - this.view.windowS), end];
  }

  toX(time) {
    // plotly's dates are UTC; shifted, they read as the clock on the wall.
    const ms = (time + this.store.wallOffset) * 1000;
    return ms - new Date(ms).getTimezoneOffset() * 60000;
  }

  fromX(x) {
    const zone = new Date(x).getTimezoneOffset() * 60000;
    return (x + zone) / 1000 - this.store.wallOffset;
  }

  draw() {
    const width = this.element.clientWidth;
    if (!width || this.dragging) return;
    const devices = this.shownDevices();
    const range = this.range();
    const height = this.height(devices.length, width);
    this.canvas.style.height = `${height}px`;
    this.empty.hidden = this.store.times.length > 0;
    this.lane.draw(range, width);
    if (!this.plotly) {
      this.loading ??= this.load();
      return;
    }
    const { traces, layout } = this.figure(devices, range, width, height);
    this.plotly.react(this.canvas, traces, layout, CONFIG);
    if (!this.drawn) this.listen();
    this.drawn += 1;
    this.describe(devices);
    this.root.dataset.drawn = this.drawn;
    this.root.dataset.lastTime = this.store.lastTime ?? "";
  }

  async load() {
    try {
      this.plotly = await loadPlotly(this.store.model);
    } catch (error) {
      this.store.receive({ kind: "trouble", message: `The plot can't be drawn here: ${error}` });
      return;
    }
    if (!this.isDisposed) this.draw();
  }

  listen() {
    this.canvas.on("plotly_relayout", (change) => {
      if (!("xaxis.range[0]" in change)) return;
      const axis = this.canvas._fullLayout.xaxis;
      const [from, to] = axis.range.map((x) => this.fromX(axis.r2l(x)));
      if (to > from) this.view.setZoom([from, to]);
    });
    this.canvas.on("plotly_doubleclick", () => this.view.setZoom(null));
  }

  height(rows, width) {
    if (rows <= 1) return width < 480 ? 210 : 250;
    return MARGIN.t + MARGIN.b + rows * (rows > 6 ? 66 : rows > 4 ? 84 : 120);
  }

  figure(devices, range, width, height) {
    const colors = this.view.colors;
    const inside = height - MARGIN.t - MARGIN.b;
    const gap = devices.length > 1 ? (devices.length > 6 ? 12 : 16) / inside : 0;
    const share = devices.length ? (1 - gap * (devices.length - 1)) / devices.length : 1;
    const layout = {
      width,
      height,
      margin: MARGIN,
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: colors.font, size: 11, color: colors.muted },
      showlegend: false,
      hovermode: "x unified",
      hoversubplots: "single",
      hoverlabel: {
        bgcolor: colors.panel,
        bordercolor: colors.line,
        font: { color: colors.text, size: 11, family: colors.font },
      },
      dragmode: "zoom",
      xaxis: {
        type: "date",
        range: range.map((time) => this.toX(time)),
        anchor: devices.length > 1 ? `y${devices.length}` : "y",
        gridcolor: colors.grid,
        linecolor: colors.line,
        zeroline: false,
        nticks: Math.max(3, Math.floor(width / 110)),
        tickformatstops: TICK_FORMATS,
        hoverformat: "%H:%M:%S.%L",
        showspikes: false,
      },
      shapes: [],
      annotations: [],
    };
    const traces = [];
    const said = devices.length > 4 ? new Set() : null;
    devices.forEach((device, row) => {
      const name = row === 0 ? "" : String(row + 1);
      const top = 1 - row * (share + gap);
      const own = this.rowOf(device);
      const lines = own.lines(range, width);
      const heightPx = inside * share;
      const axis = own.axis(lines.highest, layout, { name, top, heightPx, several: devices.length > 1, said });
      layout[`yaxis${name}`] = { ...axis.layout, domain: [Math.max(0, top - share), top] };
      traces.push(...own.traces(lines, axis, name));
    });
    if (!devices.length) layout.yaxis = { visible: false, range: [0, 1], fixedrange: true };
    this.addBands(layout, range, width);
    return { traces, layout };
  }

  rowOf(device) {
    if (!this.rows.has(device)) this.rows.set(device, new PlotRow(device, this));
    return this.rows.get(device);
  }

  /** When cells ran, in order: [start, end] in seconds. */
  spans() {
    const spans = this.store.cells.map((cell) => [
      cell.start_s,
      cell.start_s + cell.duration_s + CELL_END_SLACK_S,
    ]);
    if (this.store.running) spans.push([this.store.running.start_s, Infinity]);
    return spans.sort((a, b) => a[0] - b[0]);
  }

  /** The cells that are in view, newest last; a running one too. */
  cellsIn([from, to]) {
    const cells = this.store.cells.filter(
      (cell) => cell.start_s <= to && cell.start_s + cell.duration_s >= from,
    );
    const running = this.store.running;
    if (running && running.start_s <= to) cells.push({ ...running, duration_s: null });
    return cells.slice(-MOST_BANDS);
  }

  endOf(cell) {
    const now = Math.max(this.store.lastTime ?? 0, cell.start_s);
    return cell.duration_s === null ? now : cell.start_s + cell.duration_s;
  }

  addBands(layout, range, width) {
    const perPixel = (range[1] - range[0]) / Math.max(1, width);
    for (const cell of this.cellsIn(range)) {
      const end = this.endOf(cell);
      if ((end - cell.start_s) / perPixel < 1.5) continue;
      const failed = cell.status === "error" || cell.status === "interrupted";
      layout.shapes.push({
        type: "rect", xref: "x", x0: this.toX(cell.start_s), x1: this.toX(end), yref: "paper",
        y0: 0, y1: 1, line: { width: 0 }, layer: "below",
        fillcolor: failed ? this.view.colors["failed-band"] : this.view.colors.band,
      });
    }
  }

  /** The plot in one sentence, for who can't see it. */
  describe(devices) {
    const parts = devices.map((device) => {
      const now = this.store.latest(device);
      if (!now) return device;
      return `${device} ${formatBytes(now.allocated)} allocated, ${formatBytes(now.reserved)} reserved`;
    });
    const label = `Memory over time: ${parts.join("; ")}`;
    // Read out when asked for, not ten times a second.
    if (this.drawn % 20 === 1) this.canvas.setAttribute("aria-label", label);
  }
}

const CONFIG = { displayModeBar: false, doubleClick: false, showTips: false, displaylogo: false };
const TICK_FORMATS = [
  { dtickrange: [null, 1000], value: "%H:%M:%S.%L" },
  { dtickrange: [1000, 60000], value: "%H:%M:%S" },
  { dtickrange: [60000, null], value: "%H:%M" },
];
