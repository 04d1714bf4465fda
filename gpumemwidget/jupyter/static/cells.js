// The table of cells, newest first: what each took from the device that is in view.

const MOST_CELL_ROWS = 100;
const MOST_DEVICE_LINES = 3;

class CellsTable {
  constructor(store, view) {
    this.store = store;
    this.view = view;
    this.body = h("tbody");
    this.note = h("p", { class: "gmd-note" });
    this.table = h(
      "table",
      { class: "gmd-table gmd-cells" },
      h("caption", { class: "gmd-hidden" }, "Recorded cells, newest first"),
      h("thead", {}, h("tr", {},
        h("th", { scope: "col" }, "Cell"),
        h("th", { scope: "col", class: "gmd-wide" }, "Code"),
        h("th", { scope: "col" }, "Status"),
        h("th", { scope: "col", class: "gmd-number" }, "Time"),
        h("th", { scope: "col", class: "gmd-number", title: "Allocated after the cell, less before" }, "Change"),
        h("th", { scope: "col", class: "gmd-number", title: "Highest allocated during the cell" }, "Peak"),
      )),
      this.body,
    );
    this.element = h("div", {}, h("div", { class: "gmd-scroll", tabindex: 0, role: "region", "aria-label": "Cells" }, this.table), this.note);
  }

  draw() {
    const cells = [...this.store.cells].sort((a, b) => b.start_s - a.start_s);
    const rows = cells.slice(0, MOST_CELL_ROWS).map((cell) => this.row(cell));
    if (this.store.running) rows.unshift(this.row(this.store.running));
    const focused = this.body.contains(document.activeElement) && document.activeElement.dataset.start;
    this.body.replaceChildren(...rows);
    if (focused) this.body.querySelector(`[data-start="${focused}"]`)?.focus({ preventScroll: true });
    this.table.hidden = rows.length === 0;
    const more = cells.length > MOST_CELL_ROWS;
    const none = "No cell has been recorded yet. Every cell that you run from now on appears here.";
    const older = `The newest ${MOST_CELL_ROWS} cells. %memledger shows them all.`;
    setText(this.note, rows.length === 0 ? none : more ? older : "");
    this.note.hidden = !this.note.textContent;
  }

  /** A second has passed: only the running cell's time moves on. */
  tick() {
    const cell = this.body.querySelector("[data-running]");
    const { running, lastTime } = this.store;
    if (cell && running) setText(cell, formatElapsed((lastTime ?? running.start_s) - running.start_s));
  }

  row(cell) {
    const running = cell.status === undefined;
    const chosen = this.view.device === "all" ? null : this.view.device;
    const devices = (cell.devices || []).filter((d) => !chosen || d.device === chosen);
    const elapsed = (this.store.lastTime ?? cell.start_s) - cell.start_s;
    const change = (d) => h("span", { class: d.change < 0 ? "gmd-down" : "" }, formatChange(d.change));
    const of = (d) => (d.peak_of === "reserved" ? ` (of ${reservedName(d.device)} memory)` : "");
    const peak = (d) => h("span", {
      title: [`${PEAK_MEANS[d.peak_is] ?? "Unknown"}${of(d)}`, d.crossed ? crossedText(d) : ""].filter(Boolean).join("\n"),
      class: d.crossed ? "gmd-crossed" : null,
    }, peakText(d));
    const crossed = crossedDevices(cell, this.view.device);
    const budget = crossed.length ? h("span", {
      class: "gmd-flag", title: crossed.map((d) => `${d.device}: ${crossedText(d)}`).join("\n"),
    }, "over budget") : null;
    // A narrow page has no column heads: there the figures say themselves what they are.
    const figure = (label, value, text) => h(
      "td",
      { class: "gmd-number", "data-label": label },
      running ? UNKNOWN : this.figures(devices, value, text),
    );
    return h("tr", { "data-status": running ? "running" : cell.status },
      h("th", { scope: "row" },
        h("button", {
          class: "gmd-link", type: "button", title: "Show this cell in the plot", "data-start": cell.start_s,
          onclick: () => this.view.zoomTo(cell),
        }, cellName(cell))),
      h("td", { class: "gmd-wide" }, h("code", { title: cell.first_line }, cell.first_line || "(empty)")),
      h("td", {}, h("span", { class: "gmd-status" }, running ? "running" : cell.status), budget),
      h("td", { class: "gmd-number", "data-running": running },
        running ? formatElapsed(elapsed) : formatDuration(cell.duration_s)),
      figure("change", (d) => d.change, change),
      figure("peak", (d) => d.peak, peak));
  }

  /** A line for each device; of many devices those with the biggest figures. */
  figures(devices, value, text) {
    const line = (d) => h("div", {},
      devices.length > 1 ? h("span", { class: "gmd-tag" }, d.device) : null, text(d));
    if (devices.length <= MOST_DEVICE_LINES) return devices.map(line);
    const biggest = [...devices]
      .sort((a, b) => Math.abs(value(b) || 0) - Math.abs(value(a) || 0))
      .slice(0, MOST_DEVICE_LINES - 1);
    const all = devices.map((d) => `${d.device}: ${formatBytes(value(d))}`).join("\n");
    return [
      ...devices.filter((d) => biggest.includes(d)).map(line),
      h("div", { class: "gmd-tag gmd-more", title: all }, `${devices.length - biggest.length} more`),
    ];
  }
}

const PEAK_MEANS = {
  exact: "The high-water mark itself",
  "at least": "At least this: the mark was cut short",
  sampled: "The highest of what was seen at intervals",
};
