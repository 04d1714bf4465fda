// The strip below the plot: how busy each GPU was, asked of its driver about once a second.

import { UNKNOWN, formatBytes } from "./format.js";
import { h, setText } from "./html.js";
import { MARGIN } from "./row.js";
import { GAP_S } from "./store.js";

// Height of the strip of one device, and the least of each of many.
const STRIP_PX = 24;
const LEAST_STRIP_PX = 8;

export class BusyStrip {
  constructor(store, theme) {
    this.store = store;
    this.theme = theme;
    this.canvas = h("canvas", { class: "gmd-busy-canvas", role: "img" });
    this.names = h("div", { class: "gmd-busy-names", "aria-hidden": "true" });
    this.element = h("div", { class: "gmd-busy" }, this.names, this.canvas);
    this.element.hidden = true;
    this.canvas.addEventListener("pointermove", (event) => this.showTip(event));
  }

  /** Draw those of the devices in view of which it is known. */
  draw(shown, range, width) {
    const devices = shown.filter((device) => this.store.uses.get(device)?.busy.some((busy) => busy !== null));
    this.element.hidden = devices.length === 0;
    if (!devices.length) return;
    const rowPx = Math.max(LEAST_STRIP_PX, Math.round(STRIP_PX / devices.length));
    const gapPx = devices.length === 1 ? 0 : 2;
    const inside = Math.max(1, width - MARGIN.l - MARGIN.r);
    const height = devices.length * (rowPx + gapPx);
    const density = window.devicePixelRatio || 1;
    this.canvas.width = Math.round(inside * density);
    this.canvas.height = Math.round(height * density);
    this.canvas.style.width = `${inside}px`;
    this.canvas.style.height = `${height}px`;
    this.drawn = { devices, range, inside, rowPx: rowPx + gapPx };
    const context = this.canvas.getContext("2d");
    context.scale(density, density);
    devices.forEach((device, row) => this.drawRow(context, device, { top: row * (rowPx + gapPx), rowPx, inside, range }));
    setText(this.names, "busy");
    const newest = devices.map((device) => `${device} ${this.store.use.get(device)?.busy ?? UNKNOWN}%`);
    this.canvas.setAttribute("aria-label", `How busy: ${newest.join(", ")}`);
  }

  drawRow(context, device, { top, rowPx, inside, range }) {
    const { colors } = this.theme;
    const { t, busy } = this.store.uses.get(device);
    const x = (time) => ((time - range[0]) / (range[1] - range[0])) * inside;
    context.fillStyle = colors.grid;
    context.fillRect(0, top, inside, rowPx);
    context.fillStyle = colors.allocated;
    for (let i = 0; i < t.length; i++) {
      const end = Math.min(i + 1 < t.length ? t[i + 1] : Math.max(this.store.lastTime ?? 0, t[i] + 1), t[i] + GAP_S);
      if (end < range[0] || t[i] > range[1] || !busy[i]) continue;
      const left = Math.floor(Math.max(0, x(t[i])));
      const high = (rowPx * busy[i]) / 100;
      context.fillRect(left, top + rowPx - high, Math.max(1, Math.ceil(Math.min(inside, x(end))) - left), high);
    }
  }

  /** Say in the tooltip how busy the device was at the pointer. */
  showTip(event) {
    if (!this.drawn) return;
    const { devices, range, inside, rowPx } = this.drawn;
    const device = devices[Math.min(devices.length - 1, Math.floor(event.offsetY / rowPx))];
    const time = range[0] + (event.offsetX / inside) * (range[1] - range[0]);
    const { t, busy, used } = this.store.uses.get(device);
    let at = t.length - 1;
    while (at > 0 && t[at] > time) at--;
    if (at < 0 || t[at] > time) return;
    this.canvas.title = `${device}: ${busy[at] ?? UNKNOWN}% busy, ${formatBytes(used[at])} in use`;
  }
}
