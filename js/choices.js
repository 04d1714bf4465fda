// The choices of a person in one view: device, span of time, lines, tab.

import { Preferences } from "./preferences.js";
import { COUNTED, CURVES } from "./row.js";

export const WINDOWS = [["30 s", 30], ["2 min", 120], ["10 min", 600], ["All", null]];
export const TABS = ["cells", "variables", "device", "processes"];

export class Choices {
  /** ``onChange`` is called with ``device``, ``time``, ``lines`` or ``tab``;
   * ``preferences`` keep what was chosen for the notebook. */
  constructor(store, onChange, preferences = new Preferences()) {
    this.store = store;
    this.onChange = onChange;
    this.preferences = preferences;
    this.windowS = preferences.recall("window", (seconds) => WINDOWS.some(([, own]) => own === seconds), 120);
    this.hiddenLines = new Set(preferences.recall("hiddenLines", isOfLines, []));
    this.openTab = preferences.recall("tab", (tab) => TABS.includes(tab), "cells");
    // First and last second that were zoomed to, and the moment at which the plot stands still.
    this.zoom = null;
    this.pausedAt = null;
    this.picked = null;
  }

  /** The tabs that there are: that of other processes only while the kernel watches any. */
  get tabs() {
    return TABS.filter((tab) => tab !== "processes" || this.store.watches);
  }

  /** The tab in view. */
  get tab() {
    return this.tabs.includes(this.openTab) ? this.openTab : "cells";
  }

  /** The device in view, or ``all``: unless one was picked the GPU where there is one, all of them
   * where there are several, else the host. */
  get device() {
    if (this.picked === "all" || this.store.devices.has(this.picked)) return this.picked;
    const names = this.store.touched;
    const gpus = names.filter((name) => name !== "host");
    return gpus.length > 1 ? "all" : gpus[0] ?? names[0] ?? "all";
  }

  /** The devices in view. */
  get devices() {
    const { device } = this;
    if (device === "all") return this.store.touched;
    return this.store.devices.has(device) ? [device] : [];
  }

  /** True if the host alone is in view, whose peak is of its resident size. */
  get isOfHost() {
    return this.device === "host" || this.store.touched.join() === "host";
  }

  shows(device) {
    return this.device === "all" || this.device === device;
  }

  /** True for the devices that decide an order: those in view, of several the GPUs. */
  weighs(device) {
    return this.shows(device) && (device !== "host" || this.isOfHost);
  }

  setDevice(device) {
    this.picked = device;
    this.onChange("device");
  }

  setWindow(seconds) {
    this.preferences.remember("window", seconds);
    this.windowS = seconds;
    this.zoom = null;
    this.onChange("time");
  }

  setZoom(range) {
    this.zoom = range;
    this.onChange("time");
  }

  /** Zoom to a cell, with some room around it. */
  zoomTo({ start_s: start, duration_s: duration }) {
    const end = typeof duration === "number" ? start + duration : Math.max(this.store.lastTime ?? 0, start);
    const around = Math.max((end - start) * 0.15, 0.05);
    this.setZoom([start - around, end + around]);
  }

  /** Hold the plot at a moment; ``null`` lets it go on. */
  setPaused(moment) {
    this.pausedAt = moment;
    this.onChange("time");
  }

  toggleLine(line) {
    if (!this.hiddenLines.delete(line)) this.hiddenLines.add(line);
    // A plot without a line would look broken.
    if (COUNTED.every((curve) => this.hiddenLines.has(curve))) for (const curve of CURVES) this.hiddenLines.delete(curve);
    this.preferences.remember("hiddenLines", [...this.hiddenLines]);
    this.onChange("lines");
  }

  setTab(tab) {
    if (tab !== this.openTab) this.preferences.remember("tab", tab);
    this.openTab = tab;
    this.onChange("tab");
  }
}

/** True for a list of lines that can be hidden together: at least one curve that is always drawn stays. */
function isOfLines(lines) {
  return Array.isArray(lines) && lines.every((line) => CURVES.includes(line)) && COUNTED.some((curve) => !lines.includes(curve));
}
