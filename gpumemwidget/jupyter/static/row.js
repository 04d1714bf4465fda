// One device in the plot: its three lines, its axis of bytes, its total and limit.

class PlotRow {
  constructor(device, plot) {
    this.device = device;
    this.plot = plot;
    this.store = plot.store;
    this.view = plot.view;
    this.scale = 0;
  }

  /** What the three lines show of one device, with every extreme that is in view. */
  lines([from, to], width) {
    const store = this.store;
    const column = store.columns.get(this.device);
    const lines = { t: [], allocated: [], reserved: [], peakT: [], peak: [], highest: 0 };
    if (!column) return lines;
    const start = Math.max(0, store.indexAt(from) - 1);
    const end = Math.min(store.times.length, store.indexAt(to) + 1);
    const series = COUNTERS.map((counter) => column[counter]);
    const spans = this.plot.spans();
    let span = 0;
    let inSpan = -1;
    for (const i of pickExtremes(store.times, series, start, end, Math.ceil(width / 3))) {
      const time = store.times[i];
      lines.t.push(this.plot.toX(time));
      lines.allocated.push(column.allocated[i]);
      lines.reserved.push(column.reserved[i]);
      while (span < spans.length && spans[span][1] < time) span++;
      const within = span < spans.length && spans[span][0] <= time;
      // A high-water mark belongs to one cell: the line is broken between two.
      if (inSpan >= 0 && inSpan !== (within ? span : -1)) {
        lines.peakT.push(this.plot.toX(time));
        lines.peak.push(null);
      }
      inSpan = within ? span : -1;
      if (within) {
        lines.peakT.push(this.plot.toX(time));
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

  /** The axis of bytes; the lines of total and limit go into ``layout``. */
  axis(highest, layout, { name, top, heightPx, several }) {
    const device = this.device;
    const colors = this.view.colors;
    const info = this.store.devices.get(device) || {};
    const bound = info.limit_bytes ?? info.total_bytes;
    // Above the lines of a small plot stand its device's name and total.
    let want = Math.max(highest * (several ? 1.3 : 1.12), 1024 * 1024);
    // The device's end is in view as soon as it is near.
    if (bound && bound < want * 1.6) want = Math.max(want, bound * (several ? 1.3 : 1.1));
    const before = this.scale;
    // The scale grows at once and shrinks late, so that it does not breathe.
    const scale = before && want <= before && want > before * 0.5 ? before : want;
    this.scale = scale;
    const { values } = binaryTicks(scale, heightPx < 80 ? 2 : heightPx < 150 ? 3.5 : 4.5);
    let unit = 0;
    while (values.length > 1 && values[1] >= 1024 ** (unit + 1) && unit < UNITS.length - 1) unit++;
    while (scale >= 1024 ** (unit + 1) && unit < UNITS.length - 1) unit++;
    const factor = 1024 ** unit;
    this.addBounds(layout, info, { scale, factor, yref: `y${name}`, top });
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

  /** The device's total and this process's limit: a line where they are in view, else a note. */
  addBounds(layout, info, { scale, factor, yref, top }) {
    const colors = this.view.colors;
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
  }

  traces(lines, axis, name) {
    const colors = this.view.colors;
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
        ...common, name: reservedName(this.device), x: lines.t, y: scaled(lines.reserved), connectgaps: true,
        line: { color: colors.reserved, width: 1.5 },
      },
      {
        ...common, name: "peak", x: lines.peakT, y: scaled(lines.peak), connectgaps: false,
        line: { color: colors.peak, width: 1.5, dash: "5px,3px" },
      },
    ];
  }
}
