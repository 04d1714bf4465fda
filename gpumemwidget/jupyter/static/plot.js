// The live plot: allocated, reserved and peak of one or all devices over time, the cells as bands.
//
// plotly.js draws the axes and lines. The strip of cells above them is plain HTML, so that its labels
// are cut off well, can be reached with the keyboard and have a tooltip.

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
    this.tops = new Map();
    this.bands = new Map();
    this.frame = null;
    this.dragging = false;
    this.drawn = 0;
    this.lane = h("div", { class: "gmd-lane", role: "group", "aria-label": "Cells in the plot" });
    this.canvas = h("div", { class: "gmd-canvas", role: "img" });
    this.tip = h("div", { class: "gmd-tip", role: "tooltip", hidden: true });
    this.empty = h("div", { class: "gmd-empty gmd-over-plot" }, "Waiting for the first reading…");
    this.element = h("div", { class: "gmd-plot" }, this.lane, this.canvas, this.tip, this.empty);
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
    if (!this.view.colors) this.view.readColors();
    const devices = this.shownDevices();
    const range = this.range();
    const height = this.height(devices.length, width);
    this.canvas.style.height = `${height}px`;
    this.empty.hidden = this.store.times.length > 0;
    this.drawLane(range, width);
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
    return MARGIN.t + MARGIN.b + rows * (rows > 4 ? 84 : 120);
  }

  figure(devices, range, width, height) {
    const colors = this.view.colors;
    const inside = height - MARGIN.t - MARGIN.b;
    const gap = devices.length > 1 ? 16 / inside : 0;
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
    devices.forEach((device, row) => {
      const name = row === 0 ? "" : String(row + 1);
      const top = 1 - row * (share + gap);
      const lines = this.lines(device, range, width);
      const axis = this.axis(device, lines.highest, layout, name, top, inside * share, devices);
      layout[`yaxis${name}`] = { ...axis.layout, domain: [Math.max(0, top - share), top] };
      traces.push(...this.traces(device, lines, axis, name, colors));
    });
    if (!devices.length) layout.yaxis = { visible: false, range: [0, 1], fixedrange: true };
    this.addBands(layout, range, width);
    return { traces, layout };
  }

  /** What the three lines show of one device, with every extreme that is in view. */
  lines(device, [from, to], width) {
    const store = this.store;
    const column = store.columns.get(device);
    const lines = { t: [], allocated: [], reserved: [], peakT: [], peak: [], highest: 0 };
    if (!column) return lines;
    const start = Math.max(0, store.indexAt(from) - 1);
    const end = Math.min(store.times.length, store.indexAt(to) + 1);
    const series = COUNTERS.map((counter) => column[counter]);
    const spans = this.spans();
    let span = 0;
    let inSpan = -1;
    for (const i of pickExtremes(store.times, series, start, end, Math.ceil(width / 3))) {
      const time = store.times[i];
      lines.t.push(this.toX(time));
      lines.allocated.push(column.allocated[i]);
      lines.reserved.push(column.reserved[i]);
      while (span < spans.length && spans[span][1] < time) span++;
      const within = span < spans.length && spans[span][0] <= time;
      // A high-water mark belongs to one cell: the line is broken between two.
      if (inSpan >= 0 && inSpan !== (within ? span : -1)) {
        lines.peakT.push(this.toX(time));
        lines.peak.push(null);
      }
      inSpan = within ? span : -1;
      if (within) {
        lines.peakT.push(this.toX(time));
        lines.peak.push(column.peak[i]);
      }
      const highest = Math.max(
        column.allocated[i] || 0,
        column.reserved[i] || 0,
        within ? column.peak[i] || 0 : 0,
      );
      if (highest > lines.highest) lines.highest = highest;
    }
    return lines;
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

  axis(device, highest, layout, name, top, heightPx, devices) {
    const colors = this.view.colors;
    const info = this.store.devices.get(device) || {};
    const bound = info.limit_bytes ?? info.total_bytes;
    // Above the lines of a small plot stand its device's name and total.
    const several = devices.length > 1;
    let want = Math.max(highest * (several ? 1.3 : 1.12), 1024 * 1024);
    // The device's end is in view as soon as it is near.
    if (bound && bound < want * 1.6) want = Math.max(want, bound * (several ? 1.3 : 1.1));
    const before = this.tops.get(device);
    // The scale grows at once and shrinks late, so that it does not breathe.
    const scale = before && want <= before && want > before * 0.5 ? before : want;
    this.tops.set(device, scale);
    const { values } = binaryTicks(scale, heightPx < 80 ? 2 : heightPx < 150 ? 3.5 : 4.5);
    let unit = 0;
    while (values.length > 1 && values[1] >= 1024 ** (unit + 1) && unit < UNITS.length - 1) unit++;
    while (scale >= 1024 ** (unit + 1) && unit < UNITS.length - 1) unit++;
    const factor = 1024 ** unit;
    const yref = `y${name}`;
    for (const [label, bytes, dash] of [
      ["total", info.total_bytes, "solid"],
      ["limit", info.limit_bytes, "dash"],
    ]) {
      if (!bytes) continue;
      const fits = bytes <= scale;
      if (fits) {
        layout.shapes.push({
          type: "line", xref: "paper", x0: 0, x1: 1, yref, y0: bytes / factor, y1: bytes / factor,
          line: { color: colors.total, width: 1.2, dash }, layer: "below",
        });
      }
      if (!fits && label === "limit" && info.total_bytes <= scale) continue;
      if (!fits && label === "total" && info.limit_bytes) continue;
      layout.annotations.push({
        xref: "paper", x: 1, xanchor: "right", xshift: -4, showarrow: false,
        yref: fits ? yref : "paper", y: fits ? bytes / factor : top, yanchor: fits ? "bottom" : "top",
        text: fits ? `${label} ${formatBytes(bytes)}` : `↑ ${label} ${formatBytes(bytes)}`,
        font: { size: 10.5, color: colors.muted },
      });
    }
    if (several) {
      layout.annotations.push({
        xref: "paper", x: 0, xanchor: "left", xshift: 6, yref: "paper", y: top, yanchor: "top",
        text: `<b>${device}</b>`, showarrow: false, font: { size: 11, color: colors.text },
      });
    }
    return {
      factor,
      unit: UNITS[unit],
      layout: {
        range: [0, scale / factor],
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
      },
    };
  }

  traces(device, lines, axis, name, colors) {
    const scaled = (list) => list.map((value) => (value === null ? null : value / axis.factor));
    const common = {
      type: "scatter", mode: "lines", yaxis: `y${name}`, xaxis: "x",
      hovertemplate: `%{y:.2f} ${axis.unit}`,
    };
    return [
      {
        // Where one sample's figure is unknown, the line goes on to the next that is known.
        ...common, name: "allocated", x: lines.t, y: scaled(lines.allocated), fill: "tozeroy",
        fillcolor: colors.fill, line: { color: colors.allocated, width: 1.8 }, connectgaps: true,
      },
      {
        ...common, name: reservedName(device), x: lines.t, y: scaled(lines.reserved), connectgaps: true,
        line: { color: colors.reserved, width: 1.5 },
      },
      {
        ...common, name: "peak", x: lines.peakT, y: scaled(lines.peak), connectgaps: false,
        line: { color: colors.peak, width: 1.5, dash: "5px,3px" },
      },
    ];
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
        fillcolor: failed ? this.view.colors.failedBand : this.view.colors.band,
      });
    }
  }

  drawLane(range, width) {
    const inside = width - MARGIN.l - MARGIN.r;
    const scale = inside / (range[1] - range[0]);
    const shown = new Set();
    for (const cell of this.cellsIn(range)) {
      const left = Math.max(0, (cell.start_s - range[0]) * scale);
      const right = Math.min(inside, (this.endOf(cell) - range[0]) * scale);
      const key = cell.start_s;
      shown.add(key);
      let band = this.bands.get(key);
      if (!band) {
        band = h("button", { class: "gmd-band", type: "button" }, h("span"));
        band.addEventListener("click", () => this.view.zoomTo(band.cell));
        for (const name of ["pointerenter", "focus"]) {
          band.addEventListener(name, () => this.showTip(band));
        }
        for (const name of ["pointerleave", "blur"]) {
          band.addEventListener(name, () => (this.tip.hidden = true));
        }
        this.bands.set(key, band);
        this.lane.append(band);
      }
      const wide = Math.max(3, right - left);
      band.cell = cell;
      band.dataset.status = cell.duration_s === null ? "running" : cell.status;
      band.style.transform = `translateX(${(MARGIN.l + Math.min(left, inside - 3)).toFixed(1)}px)`;
      band.style.width = `${wide.toFixed(1)}px`;
      setText(band.firstChild, wide < 34 ? "" : cellName(cell));
      band.setAttribute("aria-label", `${cellName(cell)}: ${cell.first_line}. Zoom to this cell.`);
    }
    for (const [key, band] of this.bands) {
      if (shown.has(key)) continue;
      if (band.matches(":hover, :focus")) this.tip.hidden = true;
      band.remove();
      this.bands.delete(key);
    }
  }

  showTip(band) {
    const cell = band.cell;
    const device = this.view.device === "all" ? null : this.view.device;
    const figures = (cell.devices || []).filter((d) => !device || d.device === device);
    this.tip.replaceChildren(
      h("code", {}, cell.first_line || "(empty)"),
      h("div", {}, cellName(cell), " · ", statusText(cell), " · ",
        cell.duration_s === null ? formatElapsed(this.endOf(cell) - cell.start_s)
          : formatDuration(cell.duration_s)),
      ...figures.map((d) => h("div", {}, `${d.device}: ${formatChange(d.change)}, peak ${peakText(d)}`)),
    );
    this.tip.hidden = false;
    const box = band.getBoundingClientRect();
    const own = this.element.getBoundingClientRect();
    const left = box.left - own.left + Math.min(box.width, 60) / 2 - this.tip.offsetWidth / 2;
    const most = own.width - this.tip.offsetWidth - 4;
    this.tip.style.left = `${Math.max(4, Math.min(left, most))}px`;
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

let plotly = null;

/** plotly.js comes compressed with the model. It is unpacked once, after the rest is on the screen. */
function loadPlotly(model) {
  plotly ??= unpackPlotly(model.get("plotly"));
  return plotly;
}

async function unpackPlotly(bytes) {
  const unpacked = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  const source = await new Response(unpacked).text();
  // It looks for a CommonJS module first. As a module of its own it needs no eval, which a page may
  // forbid, and the page's own Plotly, if it has one, stays what it was.
  const script = `const module = { exports: {} };\n${source}\nexport default module.exports;`;
  const url = URL.createObjectURL(new Blob([script], { type: "text/javascript" }));
  const before = window.Plotly;
  try {
    return (await import(url)).default;
  } finally {
    URL.revokeObjectURL(url);
    if (before) window.Plotly = before;
    else delete window.Plotly;
  }
}

/** The host's counterpart of reserved memory has a name of its own. */
function reservedName(device) {
  return device === "host" ? "resident" : "reserved";
}

function cellName(cell) {
  return `In [${cell.execution_count ?? " "}]`;
}

function statusText(cell) {
  if (cell.duration_s === null || cell.duration_s === undefined) return "running";
  return cell.status;
}

function peakText(device) {
  if (device.peak === null || device.peak === undefined) return UNKNOWN;
  const mark = device.peak_is === "exact" ? "" : device.peak_is === "sampled" ? "~" : "≥ ";
  return mark + formatBytes(device.peak);
}

const CONFIG = { displayModeBar: false, doubleClick: false, showTips: false, displaylogo: false };
const TICK_FORMATS = [
  { dtickrange: [null, 1000], value: "%H:%M:%S.%L" },
  { dtickrange: [1000, 60000], value: "%H:%M:%S" },
  { dtickrange: [60000, null], value: "%H:%M" },
];
