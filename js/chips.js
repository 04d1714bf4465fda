// The devices: how full each is, and the choice of those that the plot shows.

import { Bar, deviceParts } from "./deviceparts.js";
import { formatBytes, formatOf, formatShort } from "./format.js";
import { h, setText } from "./html.js";

export class DeviceChips {
  constructor(store, choices) {
    this.store = store;
    this.choices = choices;
    this.bars = new Map();
    this.names = "";
    this.element = h("div", { class: "gmd-chips", role: "group", "aria-label": "Device in the plot" });
  }

  draw() {
    const names = [...this.store.devices.keys()];
    if (this.names !== names.join()) {
      this.names = names.join();
      this.element.replaceChildren(...names.map((name) => this.chip(name)));
      // Many devices are shown small, so that the plot is not pushed out of the page.
      this.element.toggleAttribute("data-many", names.length > 4);
    }
    for (const chip of this.element.children) {
      chip.setAttribute("aria-pressed", String(chip.dataset.device === this.choices.device));
    }
    this.drawFigures();
  }

  chip(name) {
    const what = this.store.devices.get(name).name;
    const bar = new Bar();
    bar.element.setAttribute("aria-hidden", "true");
    this.bars.set(name, bar);
    // The pressed card lets go again: then all devices are shown.
    const choose = () => this.choices.setDevice(this.choices.device === name ? "all" : name);
    return h("button", { class: "gmd-chip", type: "button", "data-device": name, onclick: choose },
      h("span", { class: "gmd-chip-head" },
        h("span", { class: "gmd-chip-name" }, name),
        h("span", { class: "gmd-chip-what" }, what === "host memory" ? "" : what),
        h("span", { class: "gmd-chip-busy", title: "How busy the device is, as its driver says" })),
      h("span", { class: "gmd-chip-figures" },
        h("strong", { "data-figure": "here" }), h("span", { "data-figure": "whole" })),
      bar.element);
  }

  drawFigures() {
    for (const chip of this.element.children) {
      const info = this.store.devices.get(chip.dataset.device);
      if (info) this.drawChip(chip, info);
    }
  }

  drawChip(chip, info) {
    const use = this.store.use.get(info.device);
    const parts = deviceParts(info, this.store.latest(info.device), use);
    const total = use?.total ?? info.total_bytes;
    const isMany = this.element.hasAttribute("data-many");
    const isLost = Boolean(use && use.used === null && use.note);
    const here = isLost ? "can't be read" : info.is_touched === false ? "not used here" : `${formatShort(parts.here)} here`;
    const { used } = parts;
    const whole = !total ? "" : used === null ? `of ${formatBytes(total)}` : `${formatOf(used, total)} in use`;
    const isShort = isMany && used !== null;
    setText(chip.querySelector("[data-figure=here]"), isShort ? formatOf(used, total) : here);
    setText(chip.querySelector("[data-figure=whole]"), isMany || isLost || !whole ? "" : used === null ? ` ${whole}` : ` · ${whole}`);
    setText(chip.querySelector(".gmd-chip-busy"), typeof use?.busy === "number" ? `${use.busy}% busy` : "");
    chip.title = [`${info.device}${info.name ? ` (${info.name})` : ""}: ${here}`, used === null ? "" : whole,
      ...parts.list.map(({ label, bytes }) => `${label}: ${formatBytes(bytes)}`),
      info.limit_bytes ? `limit of this process: ${formatBytes(info.limit_bytes)}` : "", use?.note ?? ""].filter(Boolean).join("\n");
    this.bars.get(info.device).draw({ parts: parts.list, total, marks: { limit: info.limit_bytes } });
  }
}
