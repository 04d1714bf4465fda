// The chart in the output of a %%memtrace cell while the cell runs: the report that will take its
// place, with the numbers and the lines going on. live.py sends that report of the cell's first
// moment as HTML, so that the two have one look and one size, and joins units.js and this file.

const WIDTH = 600; // The report's viewBox: gpumemwidget/report/theme.py.
const HEIGHT = 56;
const MOST_POINTS = 2400; // Then every other one goes, but no extreme.
const FINEST_PART = 200;

/** What is known of one cell: one for all views of a model. */
class Trace {
  constructor(model) {
    this.views = new Set();
    this.takeReport(model.get("report"));
    for (const point of model.get("points")) this.add(point);
    model.on("msg:custom", (message) => {
      if (message.report) this.takeReport(message.report);
      if (message.point) this.add(message.point);
    });
  }

  takeReport(report) {
    const known = new Map((this.devices ?? []).map((device) => [device.name, device]));
    this.report = report;
    this.devices = report.devices.map((device) => known.get(device.name) ?? { ...device, points: [] });
    this.lastTime = this.lastTime ?? 0;
    for (const view of this.views) view.build();
  }

  /** ``point``: seconds since the start, then for each device both counters and both peaks. */
  add([time, ...readings]) {
    this.lastTime = Math.max(this.lastTime, time);
    this.devices.forEach((device, index) => {
      if (!readings[index]) return;
      const [allocated, reserved, allocatedPeak, reservedPeak, mark] = readings[index];
      device.points.push([time, allocated, reserved]);
      if (device.points.length > MOST_POINTS) device.points = thin(device.points, MOST_POINTS / 8);
      device.peaks = [allocatedPeak, reservedPeak];
      device.mark = mark;
    });
    for (const view of this.views) view.schedule();
  }
}

/** The first, the last and the extremes of both counters in each stretch of the points. */
function thin(points, stretches) {
  const kept = new Set([0, points.length - 1]);
  for (let stretch = 0; stretch < stretches; stretch += 1) {
    const start = Math.floor((stretch * points.length) / stretches);
    const end = Math.floor(((stretch + 1) * points.length) / stretches);
    for (const column of [1, 2]) {
      let low = start;
      let high = start;
      for (let index = start; index < end; index += 1) {
        if (points[index][column] < points[low][column]) low = index;
        if (points[index][column] > points[high][column]) high = index;
      }
      kept.add(low).add(high);
    }
  }
  return [...kept].sort((a, b) => a - b).map((index) => points[index]);
}

class View {
  constructor(trace, element) {
    this.trace = trace;
    this.element = element;
    this.frame = null;
    trace.views.add(this);
    this.build();
  }

  /** Take the report's own elements, and keep those that change. */
  build() {
    this.element.innerHTML = this.trace.report.html; // Escaped in report/html.py.
    const root = this.element.querySelector(".gmw");
    const heading = root.querySelector("p");
    this.elapsed = h("span");
    heading.replaceChildren(h("strong", {}, this.trace.report.title), " · ", h("span", { class: "gmw-m" }, "running"), " · ", this.elapsed);
    const titles = [...root.querySelectorAll("thead th")];
    const after = titles.find((title) => title.textContent === "after");
    if (after) after.textContent = "now";
    // Each device has a row with its name, then one for each counter.
    const rows = [...root.querySelectorAll("tbody tr")].filter((row) => row.querySelector("td"));
    this.rows = rows.map((row) => [...row.querySelectorAll("td")]);
    this.charts = root.querySelector(".gmw-s") ?? h("div", { class: "gmw-s" });
    this.charts.replaceChildren();
    root.querySelector(".gmw-w")?.after(this.charts);
    this.figures = new Map();
    this.draw();
  }

  schedule() {
    this.frame ??= requestAnimationFrame(() => {
      this.frame = null;
      this.draw();
    });
  }

  draw() {
    setText(this.elapsed, formatElapsed(this.trace.lastTime));
    this.trace.devices.forEach((device, index) => {
      if (!device.points.length) return;
      const last = device.points[device.points.length - 1];
      for (const counter of [0, 1]) this.drawNumbers(device, 2 * index + counter, counter, last[counter + 1]);
    });
    this.trace.devices.forEach((device, index) => {
      if (index && !hasMoved(device)) return;
      if (!this.figures.has(device.name)) this.addFigure(device, index);
      drawFigure(this.figures.get(device.name), device, this.trace.lastTime);
    });
  }

  drawNumbers(device, row, counter, now) {
    const cells = this.rows[row];
    if (!cells || cells.length !== 5) return;
    const before = device.before[counter];
    const peak = device.peaks[counter];
    const isKnown = (...values) => values.every((value) => value !== null && value !== undefined);
    const mark = device.mark ? `${device.mark} ` : "";
    setText(cells[1], formatBytes(now));
    setText(cells[2], isKnown(now, before) ? formatChange(now - before) : UNKNOWN);
    setText(cells[3], isKnown(peak) ? mark + formatBytes(peak) : UNKNOWN);
    setText(cells[4], isKnown(peak, before) ? mark + formatChange(Math.max(0, peak - before)) : UNKNOWN);
  }

  addFigure(device, index) {
    const figure = buildFigure(device);
    this.figures.set(device.name, figure);
    const behind = this.trace.devices.slice(index + 1).map((other) => this.figures.get(other.name)).find(Boolean);
    this.charts.insertBefore(figure.element, behind ? behind.element : null);
  }

  remove() {
    this.trace.views.delete(this);
    if (this.frame !== null) cancelAnimationFrame(this.frame);
    this.frame = null;
  }
}

function hasMoved(device) {
  return device.points.some((point) => point[1] !== device.before[0] || point[2] !== device.before[1]);
}

/** The elements of ``render_sparkline`` in report/svg.py. */
function buildFigure(device) {
  const svg = (tag, attributes) => {
    const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    return element;
  };
  const area = svg("path", { class: "gmw-a" });
  const line = svg("path", { class: "gmw-v" });
  const top = svg("path", { class: "gmw-p" });
  const chart = svg("svg", { role: "img", "aria-label": `${device.name} while the cell runs`, viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none" });
  chart.append(area, line, top);
  const key = (kind, text) => [" ", h("i", { class: `gmw-k ${kind}` }), text];
  const peak = h("span", { style: "opacity: 1" });
  const peakKey = h("span", {}, ...key("gmw-p", ""), peak);
  const [high, low, span] = [h("span"), h("span"), h("span")];
  const element = h(
    "figure",
    { class: "gmw-g" },
    h("figcaption", {}, h("strong", {}, device.name), ...key("gmw-a", device.allocated), ...key("gmw-v", device.reserved), peakKey),
    h("div", { class: "gmw-b" }, chart, high, low, h("div", { class: "gmw-x" }, h("span", {}, "0 s"), span)),
  );
  return { element, area, line, top, peak, peakKey, high, low, span };
}

function drawFigure(figure, device, duration) {
  const points = device.points.length > 320 ? thin(device.points, 80) : device.points;
  const all = [[0, ...device.before], ...points];
  const [allocatedPeak, reservedPeak] = device.peaks ?? [null, null];
  const peak = allocatedPeak ?? reservedPeak ?? null;
  const known = all.flatMap((point) => [point[1], point[2]]).concat(peak).filter((value) => value !== null);
  const [bottom, top] = chooseRange(known);
  const x = (time) => (duration > 0 ? Math.round((time / duration) * WIDTH) : WIDTH);
  const y = (value) => Math.round((1 - Math.min(Math.max((value - bottom) / (top - bottom), 0), 1)) * HEIGHT * 10) / 10;
  figure.area.setAttribute("d", drawPath(all, 1, x, y, true));
  figure.line.setAttribute("d", drawPath(all, 2, x, y, false));
  figure.top.setAttribute("d", peak === null ? "" : `M0 ${y(peak)}H${WIDTH}`);
  figure.peakKey.style.display = peak === null ? "none" : "";
  const what = allocatedPeak === null ? ` ${device.reserved}` : "";
  setText(figure.peak, `peak${what} ${device.mark ? `${device.mark} ` : ""}${formatBytes(peak)}`);
  setText(figure.high, formatBytes(top));
  setText(figure.low, formatBytes(bottom));
  setText(figure.span, formatElapsed(duration));
}

/** As ``choose_range`` in report/sparkline.py. */
function chooseRange(known) {
  const low = Math.min(...known);
  const high = Math.max(...known);
  if (!known.length || high <= 0) return [0, 1];
  if (low <= high / 2 || low === high) return [0, high];
  return [Math.min(low, high - Math.floor(high / FINEST_PART)), high];
}

/** A piece for each run of known values; what is unknown is a gap. */
function drawPath(points, column, x, y, isArea) {
  const runs = [[]];
  for (const point of points) {
    if (point[column] === null) runs.push([]);
    else runs[runs.length - 1].push([x(point[0]), y(point[column])]);
  }
  return runs
    .filter((run) => run.length)
    .map((run) => {
      const corners = run.length > 1 ? run : [run[0], [run[0][0] + 2, run[0][1]]];
      const line = corners.map((corner) => corner.join(" ")).join("L");
      return isArea ? `M${corners[0][0]} ${HEIGHT}L${line}V${HEIGHT}` : `M${line}`;
    })
    .join("");
}

// One for each model: the factory runs once for a widget, its render once for each view.
export default () => {
  let trace = null;
  return {
    initialize({ model }) {
      trace = new Trace(model);
    },
    render({ el }) {
      const view = new View(trace, el);
      return () => view.remove();
    },
  };
};
