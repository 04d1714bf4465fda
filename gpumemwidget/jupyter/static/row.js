// One device in the plot: its three lines, its axis of bytes, its bounds: total, limit, budget.

const LABEL_PX = 13;

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

  /** The axis of bytes; the lines of total, limit and budget go into ``layout``. */
  axis(highest, layout, { name, top, heightPx, several, said }) {
    const device = this.device;
    const colors = this.view.colors;
    const bounds = this.bounds();
    const room = !several ? 1.12 : heightPx < 60 ? 1.45 : 1.3;
    // Above the lines of a small plot stand its device's name and total.
    let want = Math.max(highest * room, 1024 * 1024);
    for (const { label, bytes } of bounds) {
      // The device's end is in view as soon as it is near; who sets a bound wants to see how far it is.
      if (bytes < highest * (label === "total" ? 1.8 : 8)) want = Math.max(want, bytes * room);
    }
    const before = this.scale;
    // The scale grows at once and shrinks late, so that it does not breathe.
    const scale = before && want <= before && want > before * 0.5 ? before : want;
    this.scale = scale;
    const { values } = binaryTicks(scale, heightPx < 80 ? 2 : heightPx < 150 ? 3.5 : 4.5);
    let unit = 0;
    while (values.length > 1 && values[1] >= 1024 ** (unit + 1) && unit < UNITS.length - 1) unit++;
    while (scale >= 1024 ** (unit + 1) && unit < UNITS.length - 1) unit++;
    const factor = 1024 ** unit;
    this.addBounds(layout, bounds, { scale, factor, yref: `y${name}`, top, heightPx, said });
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

  /** What there is of the device, and what may be taken of it: the highest first. */
  bounds() {
    const info = this.store.devices.get(this.device) || {};
    const colors = this.view.colors;
    return [
      { label: "total", bytes: info.total_bytes, dash: "solid", color: colors.total, ink: colors.muted },
      { label: "limit", bytes: info.limit_bytes, dash: "7px,3px", color: colors.limit, ink: colors.limit },
      { label: "budget", bytes: info.budget_bytes, dash: "2px,3px", color: colors.budget, ink: colors.budget },
    ].filter(({ bytes }) => bytes).sort((a, b) => b.bytes - a.bytes);
  }

  /** A line with its name for each bound in view; of those that are higher the nearest is named. */
  addBounds(layout, bounds, { scale, factor, yref, top, heightPx, said }) {
    const { colors } = this.view;
    const above = bounds.filter(({ bytes }) => bytes > scale).pop();
    const places = [];
    for (const bound of bounds) {
      const { label, bytes, dash, color, ink } = bound;
      const fits = bytes <= scale;
      if (fits) {
        layout.shapes.push({
          type: "line", xref: "paper", x0: 0, x1: 1, yref, y0: bytes / factor, y1: bytes / factor,
          line: { color, width: label === "total" ? 1.2 : 1.5, dash }, layer: label === "total" ? "below" : "above",
        });
      } else if (bound !== above) continue;
      const text = fits ? `${label} ${formatBytes(bytes)}` : `↑ ${label} ${formatBytes(bytes)}`;
      // Alike devices have one total: in a small plot it is said once.
      if (said && label === "total" && said.has(text)) continue;
      if (said) said.add(text);
      // Names that would stand on one another stand side by side; where there is no room for that
      // the total goes, which the chips tell too.
      const y = fits ? heightPx * (1 - bytes / scale) - LABEL_PX : 0;
      const own = 6.2 * text.length + 12;
      const room = layout.width - MARGIN.l - MARGIN.r - (y < LABEL_PX ? 8 + 7 * this.device.length : 0);
      const beside = () => places.filter((place) => Math.abs(place.y - y) < LABEL_PX);
      const rightOf = (near) => near.reduce((sum, place) => sum + place.width, 4);
      const total = beside().find((place) => place.label === "total");
      if (total && rightOf(beside()) + own > room) {
        layout.annotations.splice(layout.annotations.indexOf(total.annotation), 1);
        places.splice(places.indexOf(total), 1);
      }
      const right = rightOf(beside());
      if (right > 4 && right + own > room) continue;
      const annotation = {
        xref: "paper", x: 1, xanchor: "right", xshift: -right, showarrow: false,
        yref: fits ? yref : "paper", y: fits ? bytes / factor : top, yanchor: fits ? "bottom" : "top",
        text, font: { size: 10.5, color: ink }, bgcolor: colors.veil, borderpad: 0,
      };
      places.push({ y, width: own, label, annotation });
      layout.annotations.push(annotation);
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
