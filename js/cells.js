// The table of cells, newest first: what each took from the device that is in view.

import { PEAK_MEANS, cellName, crossedDevices, crossedText, leakText, peakText, reservedName, riseText } from "./cellwords.js";
import { formatBytes, formatChange, formatDuration, formatElapsed } from "./format.js";
import { h, setText } from "./html.js";
import { Table } from "./table.js";

/** Number of rows at first, and of those that are added on demand. */
const CELL_ROWS = 100;
/** Number of cells that are named as those which kept most, and the least that counts, in bytes. */
const MOST_NAMED = 3;
const KEPT_BYTES = 1024 ** 2;
/** Changes on the host below this are noise of Python's own: a ``print`` makes some. */
const NOISE_BYTES = 1024;
const MOST_DEVICE_LINES = 3;
const PEAK_TITLE = "Highest allocated during the cell";
const RESIDENT_TITLE = "Highest resident size of the process during the cell: malloc has no peak counter";

export class CellsTable {
  /** ``onToggle`` is called when other cells are to be listed. */
  constructor(store, choices, onToggle) {
    this.store = store;
    this.choices = choices;
    this.onToggle = onToggle;
    this.nRows = CELL_ROWS;
    this.note = h("p", { class: "gmd-note" });
    this.most = h("p", { class: "gmd-figures gmd-most" });
    this.moreButton = h("button", { class: "gmd-link gmd-more-cells", type: "button", onclick: () => this.showMore() });
    this.showsOwn = false;
    this.hiddenWords = h("span");
    this.toggle = h("button", { class: "gmd-link gmd-own", type: "button", onclick: () => this.toggleOwn() });
    this.hidden = h("p", { class: "gmd-figures gmd-hidden-cells" }, this.hiddenWords, " ", this.toggle);
    const number = (by, label, title) => ({ by, label, title, class: "gmd-number" });
    // The newest cell is first until another order is chosen.
    this.table = new Table("gmd-cells", "Recorded cells, newest first", [
      { by: "start", label: "Cell" },
      { label: "Code", class: "gmd-wide" },
      { label: "Status" },
      number("time", "Time", "How long the cell took"),
      number("change", "Change", "Allocated after the cell, less before"),
      number("peak", "Peak"),
      number("rise", "Rise", "Peak, less what stood before the cell"),
    ], { by: "start", down: true }, onToggle);
    this.element = h("div", {}, this.most,
      h("div", { class: "gmd-scroll", tabindex: 0, role: "region", "aria-label": "Cells" }, this.table.element, this.moreButton), this.note, this.hidden);
  }

  toggleOwn() {
    this.showsOwn = !this.showsOwn;
    this.onToggle();
  }

  showMore() {
    this.nRows += CELL_ROWS;
    this.onToggle();
  }

  /** The cells that are listed: those with our own magics alone only on demand. */
  listed() {
    return this.store.cells.filter((cell) => this.showsOwn || !cell.own);
  }

  /** The cells of the table, as they are sorted. */
  shown() {
    const cells = this.listed();
    const { by, down } = this.table.sort;
    const weigh = {
      start: (cell) => cell.start_s,
      time: (cell) => cell.duration_s ?? 0,
    }[by] ?? ((cell) => this.sum(cell, by));
    const sign = down ? -1 : 1;
    return cells.sort((a, b) => sign * (weigh(a) - weigh(b)) || b.start_s - a.start_s);
  }

  /** Bytes of a cell on the device in view; of several those on the GPUs. */
  sum(cell, figure) {
    const devices = (cell.devices ?? []).filter((d) => this.choices.weighs(d.device));
    const of = (device) => (device[figure] ?? 0) + (figure === "change" ? device.outside ?? 0 : 0);
    return devices.reduce((sum, device) => sum + of(device), 0);
  }

  /** Name the cells that kept most memory, each with a link to its time in the plot. */
  drawMost() {
    const kept = this.listed().map((cell) => ({ cell, bytes: this.sum(cell, "change") })).filter(({ bytes }) => bytes >= KEPT_BYTES);
    kept.sort((a, b) => b.bytes - a.bytes);
    this.most.hidden = !kept.length;
    const named = kept.slice(0, MOST_NAMED).flatMap(({ cell, bytes }, i) => [
      i ? " · " : " ",
      h("button", { class: "gmd-link", type: "button", title: cell.first_line, onclick: () => this.choices.zoomTo(cell) }, cellName(cell)),
      ` ${formatChange(bytes)}`,
    ]);
    this.most.replaceChildren("Kept most:", ...named);
  }

  draw() {
    const cells = this.shown();
    const rows = cells.slice(0, this.nRows).map((cell) => this.row(cell));
    const running = this.store.describeRunning();
    if (running) rows.unshift(this.row(running));
    this.table.fill(rows);
    this.table.element.hidden = rows.length === 0;
    const isHost = this.choices.isOfHost;
    const peakHead = this.table.heads.find((head) => head.dataset.sort === "peak");
    setText(peakHead.firstChild, isHost ? "Peak (resident)" : "Peak");
    peakHead.title = isHost ? RESIDENT_TITLE : PEAK_TITLE;
    const nOwn = this.store.cells.filter((cell) => cell.own).length;
    setText(this.hiddenWords, `${nOwn} gpumemwidget ${nOwn === 1 ? "cell" : "cells"} ${this.showsOwn ? "shown." : "hidden."}`);
    setText(this.toggle, this.showsOwn ? "Hide" : "Show");
    this.hidden.hidden = nOwn === 0;
    const nMore = Math.min(CELL_ROWS, cells.length - this.nRows);
    setText(this.moreButton, `Show ${nMore} more`);
    this.moreButton.hidden = nMore <= 0;
    this.note.hidden = rows.length > 0;
    setText(this.note, "No cell has been recorded yet. Every cell that you run from now on appears here.");
    this.drawMost();
  }

  /** A second has passed: the running cell's figures move on. Its button stays, as it may be pressed just now. */
  tick() {
    const row = this.table.body.querySelector("[data-status=running]");
    const running = this.store.describeRunning();
    if (row && running) row.replaceChildren(row.firstChild, ...[...this.row(running).children].slice(1));
  }

  row(cell) {
    const running = cell.status === undefined;
    // A device that the cell left as it was says nothing, unless it is the only one in view.
    const isMoved = (d) => {
      const least = d.device === "host" ? NOISE_BYTES : 1;
      return Math.abs(d.change ?? 0) >= least || (d.rise ?? 0) >= least || d.crossed || d.outside || d.change === null || d.rise === null;
    };
    const shown = (cell.devices || []).filter((d) => this.choices.shows(d.device));
    const devices = shown.length > 1 ? shown.filter(isMoved) : shown;
    const changeOf = (d) => (d.device === "host" && Math.abs(d.change) < NOISE_BYTES ? 0 : d.change);
    const outside = (d) => (d.outside ? h("div", { title: "The CUDA context and libraries other than PyTorch, by the driver" },
      h("span", { class: "gmd-tag" }, "outside PyTorch"), formatChange(d.outside)) : null);
    // Beside that line the other columns have nothing, so that each device's lines stay level.
    const blank = (d) => (d.outside ? h("div", { "aria-hidden": "true" }, "\u00a0") : null);
    const change = (d) => [h("span", { class: changeOf(d) < 0 ? "gmd-down" : "" }, formatChange(changeOf(d))), outside(d)];
    const of = (d) => (d.peak_of === "reserved" ? ` (of ${reservedName(d.device)} memory)` : "");
    const mark = (d) => (d.peak_of === "reserved" && !this.choices.isOfHost ? h("span", { class: "gmd-tag gmd-of" }, reservedName(d.device)) : null);
    const peak = (d) => [mark(d), h("span", {
      title: [`${PEAK_MEANS[d.peak_is] ?? "Unknown"}${of(d)}`, d.crossed ? crossedText(d) : ""].filter(Boolean).join("\n"),
      class: d.crossed ? "gmd-crossed" : null,
    }, peakText(d)), blank(d)];
    const rise = (d) => [h("span", {}, riseText(d)), blank(d)];
    const crossed = crossedDevices(cell, this.choices);
    const budget = crossed.length ? h("span", {
      class: "gmd-flag", title: crossed.map((d) => `${d.device}: ${crossedText(d)}`).join("\n"),
    }, "over budget") : null;
    const leaks = cell.leaks ?? [];
    const growth = leaks.length ? h("span", {
      class: "gmd-flag gmd-grows", title: leaks.map(({ sentence }) => sentence).join("\n"),
    }, leakText(leaks, this.choices)) : null;
    // A narrow page has no column heads: there the figures say themselves what they are.
    const figure = (label, value, text, weigh) => h(
      "td",
      { class: "gmd-number", "data-label": label, "data-merged": devices.length > MOST_DEVICE_LINES },
      devices.length ? this.figures(devices, value, text, weigh)
        : shown.length && label === "change" ? h("span", { class: "gmd-tag" }, "no change") : null,
    );
    const changed = (d) => Math.abs((d.change ?? 0) + (d.outside ?? 0));
    const risen = (d) => d.rise || 0;
    return h("tr", { "data-status": running ? "running" : cell.status },
      h("th", { scope: "row" },
        h("button", {
          class: "gmd-link", type: "button", title: "Show this cell in the plot", "data-focus": cell.start_s,
          onclick: () => this.choices.zoomTo(cell),
        }, cellName(cell))),
      h("td", { class: "gmd-wide" }, h("code", { title: cell.first_line }, cell.first_line || "(empty)")),
      h("td", {}, h("span", { class: "gmd-status" }, running ? "running, so far" : cell.status), " ", budget, " ", growth),
      h("td", { class: "gmd-number" },
        running ? formatElapsed(this.store.elapsedS) : formatDuration(cell.duration_s)),
      figure("change", (d) => d.change, change, changed),
      figure("peak", (d) => d.peak, peak, risen),
      figure("rise", (d) => d.rise, rise, risen));
  }

  /** A line for each device; of many GPUs the one that weighs most in this column, and the others together. */
  figures(devices, value, text, weigh) {
    const line = (d) => h("div", {},
      devices.length > 1 ? h("span", { class: "gmd-tag" }, d.device) : null, text(d));
    if (devices.length <= MOST_DEVICE_LINES) return devices.map(line);
    const hosts = devices.filter((d) => d.device === "host");
    const gpus = devices.filter((d) => d.device !== "host");
    const most = gpus.reduce((best, d) => (weigh(d) > weigh(best) ? d : best));
    const rest = gpus.filter((d) => d !== most);
    if (rest.every((d) => value(d) === value(most))) {
      return [h("div", {}, h("span", { class: "gmd-tag" }, `all ${gpus.length}`), text(most)), ...hosts.map(line)];
    }
    const title = rest.map((d) => `${d.device}: ${formatBytes(value(d))}`).join("\n");
    return [line(most), h("div", { class: "gmd-tag gmd-more", title }, `${rest.length} more`), ...hosts.map(line)];
  }
}
