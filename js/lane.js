// The strip of cells above the plot: plain HTML, so that its labels are cut off well, can be reached
// with the keyboard and have a tooltip.

import { cellName, crossedDevices, crossedText, peakName, peakText } from "./cellwords.js";
import { formatChange, formatDuration, formatElapsed } from "./format.js";
import { h, setText } from "./html.js";
import { MARGIN } from "./row.js";

const NARROWEST_PX = 3;
const NARROWEST_LABEL_PX = 38;
const NARROWEST_NUMBER_PX = 26;

export class Lane {
  constructor(store, choices) {
    this.store = store;
    this.choices = choices;
    this.bands = new Map();
    this.element = h("div", { class: "gmd-lane", role: "group", "aria-label": "Cells in the plot" });
    this.tip = h("div", { class: "gmd-tip", role: "tooltip", hidden: true });
  }

  /** Draw the cells that are in view, each with its ``end_s``. */
  draw(cells, range, width) {
    const inside = width - MARGIN.l - MARGIN.r;
    const scale = inside / (range[1] - range[0]);
    const shown = new Set();
    for (const cell of cells) {
      const left = Math.max(0, (cell.start_s - range[0]) * scale);
      const right = Math.min(inside, (cell.end_s - range[0]) * scale);
      const key = cell.start_s;
      shown.add(key);
      const band = this.bands.get(key) ?? this.addBand(key);
      const wide = Math.max(NARROWEST_PX, right - left);
      band.cell = cell;
      band.dataset.status = cell.duration_s === null ? "running" : cell.status;
      band.toggleAttribute("data-crossed", crossedDevices(cell, this.choices).length > 0);
      band.toggleAttribute("data-grows", Boolean(cell.leaks?.length));
      band.style.transform = `translateX(${(MARGIN.l + Math.min(left, inside - NARROWEST_PX)).toFixed(1)}px)`;
      band.style.width = `${wide.toFixed(1)}px`;
      setText(band.firstChild, wide >= NARROWEST_LABEL_PX + 6 * String(cell.execution_count).length ? cellName(cell)
        : wide >= NARROWEST_NUMBER_PX + 6 * (String(cell.execution_count).length - 1) ? `[${cell.execution_count ?? " "}]` : "");
      band.setAttribute("aria-label", `${cellName(cell)}: ${cell.first_line}. Zoom to this cell.`);
    }
    if (!this.tip.hidden) this.showTip(this.tipped);
    for (const [key, band] of this.bands) {
      if (shown.has(key)) continue;
      if (band.matches(":hover, :focus")) this.tip.hidden = true;
      band.remove();
      this.bands.delete(key);
    }
  }

  addBand(key) {
    const band = h("button", { class: "gmd-band", type: "button" }, h("span"));
    band.addEventListener("click", () => this.choices.zoomTo(band.cell));
    for (const name of ["pointerenter", "focus"]) {
      band.addEventListener(name, () => this.showTip(band));
    }
    for (const name of ["pointerleave", "blur"]) {
      band.addEventListener(name, () => (this.tip.hidden = true));
    }
    this.bands.set(key, band);
    this.element.append(band);
    return band;
  }

  showTip(band) {
    this.tipped = band;
    const cell = band.cell;
    const figures = (cell.devices || []).filter((d) => this.choices.shows(d.device));
    this.tip.replaceChildren(
      h("code", {}, cell.first_line || "(empty)"),
      h("div", {}, [cellName(cell), cell.status ?? "running",
        cell.duration_s === null ? formatElapsed(cell.end_s - cell.start_s) : formatDuration(cell.duration_s)].join(" · ")),
      ...figures.flatMap((d) => [
        h("div", {}, `${d.device}: ${formatChange(d.change)}, ${peakName(d)} ${peakText(d)}`),
        d.crossed ? h("div", { class: "gmd-crossed" }, crossedText(d)) : null,
      ]).filter(Boolean),
      ...(cell.leaks ?? []).map(({ sentence }) => h("div", { class: "gmd-grows" }, sentence)),
    );
    this.tip.hidden = false;
    const box = band.getBoundingClientRect();
    const own = this.element.getBoundingClientRect();
    const left = box.left - own.left + Math.min(box.width, 60) / 2 - this.tip.offsetWidth / 2;
    const most = own.width - this.tip.offsetWidth - 4;
    this.tip.style.left = `${Math.max(4, Math.min(left, most))}px`;
  }
}
