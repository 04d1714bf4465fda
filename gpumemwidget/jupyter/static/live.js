// The chart in the output of a %%memtrace cell while the cell runs: the report that will take its
// place, with the numbers and the lines going on. live.py sends that report of the cell's first
// moment as HTML, so that the two have one look and one size, and joins units.js and this file.

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
      if (message.before) this.devices.forEach((device, index) => (device.before = message.before[index] ?? device.before));
      if (message.point) this.add(message.point);
    });
  }

  takeReport(report) {
    const known = new Map((this.devices ?? []).map((device) => [device.name, device]));
    this.report = report;
    this.devices = report.devices.map((device) => known.get(device.name) ?? { ...device, points: [], peaks: [null, null] });
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
    this.frame = null;
    // JupyterLab gives the report's tables a style of its own; elsewhere the class means nothing.
    this.element = h("div", { class: "jp-RenderedHTMLCommon" });
    element.append(this.element);
    trace.views.add(this);
    this.build();
  }

  /** Take the report's own elements, and find those that change. */
  build() {
    this.element.innerHTML = this.trace.report.html; // Escaped in report/html.py.
    const root = this.element.querySelector(".gmw");
    this.elapsed = h("span", { class: "gmw-m" });
    root.querySelector("p").replaceChildren(
      ...[h("strong", {}, this.trace.report.title), " · ", h("span", { class: "gmw-m" }, "running"), " · ", this.elapsed],
    );
    const after = [...root.querySelectorAll("thead th")].find((title) => title.textContent === "after");
    if (after) after.textContent = "now";
    // Each device has a row with its name alone, then one for each of its two counters.
    const rows = [...root.querySelectorAll("tbody tr")].filter((row) => row.querySelector("td"));
    this.rows = rows.map((row) => [...row.querySelectorAll("td")]);
    for (const cells of this.rows) for (const cell of cells) cell.classList.remove("gmw-m");
    // Every device has a chart here; those of devices that have not moved wait outside of the page.
    this.charts = root.querySelector(".gmw-s");
    this.figures = [...this.element.querySelectorAll("figure")].map(findParts);
    this.charts?.replaceChildren();
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
      for (const counter of [0, 1]) this.drawNumbers(device, counter, this.rows[2 * index + counter]);
      const figure = this.figures[index];
      if (!figure || (index && !hasMoved(device))) return;
      if (!figure.element.parentNode) this.addFigure(figure, index);
      drawFigure(figure, device, this.trace.lastTime);
    });
  }

  drawNumbers(device, counter, cells) {
    if (!cells || cells.length !== 5) return;
    const before = device.before[counter];
    const peak = device.peaks[counter];
    const now = lastKnown(device.points, counter + 1);
    const isKnown = (...values) => values.every((value) => value !== null && value !== undefined);
    const mark = device.mark ? `${device.mark} ` : "";
    setText(cells[0], formatBytes(before));
    setText(cells[1], formatBytes(now));
    setText(cells[2], isKnown(now, before) ? formatChange(now - before) : UNKNOWN);
    setText(cells[3], isKnown(peak) ? mark + formatBytes(peak) : UNKNOWN);
    setText(cells[4], isKnown(peak, before) ? mark + formatChange(Math.max(0, peak - before)) : UNKNOWN);
  }

  addFigure(figure, index) {
    const behind = this.figures.slice(index + 1).find((other) => other.element.parentNode);
    this.charts.insertBefore(figure.element, behind ? behind.element : null);
  }

  remove() {
    this.trace.views.delete(this);
    if (this.frame !== null) cancelAnimationFrame(this.frame);
    this.frame = null;
  }
}

/** The last value that is known: malloc's count is not taken with every sample. */
function lastKnown(points, column) {
  for (let index = points.length - 1; index >= 0; index -= 1) {
    if (points[index][column] !== null) return points[index][column];
  }
  return null;
}

function hasMoved(device) {
  const [allocated, reserved] = device.before;
  return device.points.some(
    (point) => (point[1] !== null && point[1] !== allocated) || (point[2] !== null && point[2] !== reserved),
  );
}

/** What changes in a chart of ``render_sparkline`` (report/svg.py). */
function findParts(element) {
  const find = (selector) => element.querySelector(selector);
  const [high, low] = element.querySelectorAll(".gmw-b > span");
  const times = [...element.querySelectorAll(".gmw-x > span")];
  for (const middle of times.slice(1, -1)) middle.remove();
  const peakKey = find("figcaption i.gmw-p")?.parentNode;
  return {
    element,
    viewBox: find("svg").viewBox.baseVal,
    area: find("path.gmw-a"),
    line: find("path.gmw-v"),
    top: find("path.gmw-p"),
    peak: peakKey?.lastChild,
    high,
    low,
    span: times[times.length - 1],
  };
}

function drawFigure(figure, device, duration) {
  const points = device.points.length > 320 ? thin(device.points, 80) : device.points;
  const all = [[0, ...device.before], ...points];
  const [allocatedPeak, reservedPeak] = device.peaks;
  const peak = allocatedPeak ?? reservedPeak ?? null;
  const known = all.flatMap((point) => [point[1], point[2]]).concat(peak).filter((value) => value !== null);
  const [bottom, top] = chooseRange(known);
  const { width, height } = figure.viewBox;
  const x = (time) => (duration > 0 ? Math.round((time / duration) * width) : width);
  const y = (value) => Math.round((1 - Math.min(Math.max((value - bottom) / (top - bottom), 0), 1)) * height * 10) / 10;
  figure.area?.setAttribute("d", drawPath(all, 1, x, y, height));
  figure.line?.setAttribute("d", drawPath(all, 2, x, y, null));
  figure.top?.setAttribute("d", peak === null ? "" : `M0 ${y(peak)}H${width}`);
  const what = allocatedPeak === null ? ` ${device.reserved}` : "";
  if (figure.peak) setText(figure.peak, `peak${what} ${device.mark ? `${device.mark} ` : ""}${formatBytes(peak)}`);
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

/** A piece for each run of known values, an area down to ``floor``; what is unknown is a gap. */
function drawPath(points, column, x, y, floor) {
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
      return floor ? `M${corners[0][0]} ${floor}L${line}V${floor}` : `M${line}`;
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
