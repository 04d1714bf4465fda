// Devices over time, a row for each, drawn with plotly.js.

import { reservedName } from "./cellwords.js";
import { formatBytes } from "./format.js";
import { h } from "./html.js";
import { ChartRow, MARGIN } from "./row.js";

const CONFIG = { displayModeBar: false, doubleClick: false, showTips: false, displaylogo: false };
const TICK_FORMATS = [
  { dtickrange: [null, 1000], value: "%H:%M:%S.%3f" },
  { dtickrange: [1000, 60000], value: "%H:%M:%S" },
  { dtickrange: [60000, null], value: "%H:%M" },
];
/** A cell's last sample is stamped as its record is made: allow for the moment between the two. */
const CELL_END_SLACK_S = 0.05;
/** The chart is described in words once in so many drawings. */
const DESCRIBE_EVERY = 20;

export class Chart {
  /** ``theme`` has the colours; ``hiddenLines`` the names of lines that are not drawn. */
  constructor(store, theme, hiddenLines = new Set()) {
    this.store = store;
    this.theme = theme;
    this.hiddenLines = hiddenLines;
    this.rows = new Map();
    // plotly.js, once it is there.
    this.plotly = null;
    this.drawn = 0;
    // Texts for the pointer are made only while there is one.
    this.isHovered = false;
    this.element = h("div", { class: "gmd-canvas", role: "img" });
  }

  dispose() {
    if (this.plotly) this.plotly.purge(this.element);
  }

  /** Draw ``{ devices, range, width, height, shapes }``, the range in seconds on the kernel's clock. */
  draw(view) {
    const { traces, layout } = this.figure(view);
    this.plotly.react(this.element, traces, layout, CONFIG);
    // Read out when asked for, not ten times a second.
    if (this.drawn % DESCRIBE_EVERY === 0) this.element.setAttribute("aria-label", this.describe(view.devices));
    this.drawn += 1;
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

  figure({ devices, range, width, height, shapes = [] }) {
    const { colors } = this.theme;
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
        nticks: Math.max(2, Math.floor(width / 110)),
        tickangle: 0,
        tickformatstops: TICK_FORMATS,
        hoverformat: range[1] - range[0] > 60 ? "%H:%M:%S" : "%H:%M:%S.%2f",
        showspikes: false,
      },
      shapes: [...shapes],
      annotations: [],
    };
    const traces = [];
    const said = devices.length > 4 ? new Set() : null;
    const context = {
      colors, width, said, range,
      toX: (time) => this.toX(time),
      spans: this.spans(),
      hiddenLines: this.hiddenLines,
      isHovered: this.isHovered,
      isOneOfSeveral: devices.length > 1,
      heightPx: inside * share,
    };
    devices.forEach((device, row) => {
      const name = row === 0 ? "" : String(row + 1);
      const top = 1 - row * (share + gap);
      if (!this.rows.has(device)) this.rows.set(device, new ChartRow(device, this.store));
      const drawn = this.rows.get(device).draw({ ...context, name, top });
      layout[`yaxis${name}`] = { ...drawn.axis, domain: [Math.max(0, top - share), top] };
      layout.shapes.push(...drawn.shapes);
      layout.annotations.push(...drawn.annotations);
      traces.push(...drawn.traces);
    });
    if (!devices.length) layout.yaxis = { visible: false, range: [0, 1], fixedrange: true };
    return { traces, layout };
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

  /** The chart in one sentence, for who can't see it. */
  describe(devices) {
    const parts = devices.map((device) => {
      const now = this.store.latest(device);
      if (!now) return device;
      return `${device} ${formatBytes(now.allocated)} allocated, ${formatBytes(now.reserved)} ${reservedName(device)}`;
    });
    return `Memory over time: ${parts.join("; ")}`;
  }
}
