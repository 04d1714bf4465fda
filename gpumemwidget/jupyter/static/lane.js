// The strip of cells above the plot: plain HTML, so that its labels are cut off well, can be reached
// with the keyboard and have a tooltip.

const NARROWEST_PX = 3;
const NARROWEST_LABEL_PX = 34;

class Lane {
  constructor(plot, view) {
    this.plot = plot;
    this.view = view;
    this.bands = new Map();
    this.element = h("div", { class: "gmd-lane", role: "group", "aria-label": "Cells in the plot" });
    this.tip = h("div", { class: "gmd-tip", role: "tooltip", hidden: true });
  }

  draw(range, width) {
    const inside = width - MARGIN.l - MARGIN.r;
    const scale = inside / (range[1] - range[0]);
    const shown = new Set();
    for (const cell of this.plot.cellsIn(range)) {
      const left = Math.max(0, (cell.start_s - range[0]) * scale);
      const right = Math.min(inside, (this.plot.endOf(cell) - range[0]) * scale);
      const key = cell.start_s;
      shown.add(key);
      const band = this.bands.get(key) ?? this.addBand(key);
      const wide = Math.max(NARROWEST_PX, right - left);
      band.cell = cell;
      band.dataset.status = cell.duration_s === null ? "running" : cell.status;
      band.toggleAttribute("data-crossed", crossedDevices(cell, this.view.device).length > 0);
      band.style.transform = `translateX(${(MARGIN.l + Math.min(left, inside - NARROWEST_PX)).toFixed(1)}px)`;
      band.style.width = `${wide.toFixed(1)}px`;
      setText(band.firstChild, wide < NARROWEST_LABEL_PX ? "" : cellName(cell));
      band.setAttribute("aria-label", `${cellName(cell)}: ${cell.first_line}. Zoom to this cell.`);
    }
    for (const [key, band] of this.bands) {
      if (shown.has(key)) continue;
      if (band.matches(":hover, :focus")) this.tip.hidden = true;
      band.remove();
      this.bands.delete(key);
    }
  }

  addBand(key) {
    const band = h("button", { class: "gmd-band", type: "button" }, h("span"));
    band.addEventListener("click", () => this.view.zoomTo(band.cell));
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
    const cell = band.cell;
    const device = this.view.device === "all" ? null : this.view.device;
    const figures = (cell.devices || []).filter((d) => !device || d.device === device);
    this.tip.replaceChildren(
      h("code", {}, cell.first_line || "(empty)"),
      h("div", {}, cellName(cell), " · ", statusText(cell), " · ",
        cell.duration_s === null ? formatElapsed(this.plot.endOf(cell) - cell.start_s)
          : formatDuration(cell.duration_s)),
      ...figures.flatMap((d) => [
        h("div", {}, `${d.device}: ${formatChange(d.change)}, peak ${peakText(d)}`),
        d.crossed ? h("div", { class: "gmd-crossed" }, crossedText(d)) : null,
      ]).filter(Boolean),
    );
    this.tip.hidden = false;
    const box = band.getBoundingClientRect();
    const own = this.element.getBoundingClientRect();
    const left = box.left - own.left + Math.min(box.width, 60) / 2 - this.tip.offsetWidth / 2;
    const most = own.width - this.tip.offsetWidth - 4;
    this.tip.style.left = `${Math.max(4, Math.min(left, most))}px`;
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

/** On which of the shown devices a cell went beyond its budget. */
function crossedDevices(cell, shown) {
  return (cell.devices || []).filter((d) => d.crossed && (shown === "all" || d.device === shown));
}

function crossedText(device) {
  const stopped = device.stopped_at ? `, interrupted at ${formatBytes(device.stopped_at)}` : "";
  return `over the budget of ${formatBytes(device.crossed)}${stopped}`;
}

function peakText(device) {
  if (device.peak === null || device.peak === undefined) return UNKNOWN;
  const mark = device.peak_is === "exact" ? "" : device.peak_is === "sampled" ? "~" : "≥ ";
  return mark + formatBytes(device.peak);
}
