// The devices: what each holds now, and the choice of those that the plot shows.

class DeviceChips {
  constructor(store, view) {
    this.store = store;
    this.view = view;
    this.names = "";
    this.element = h("div", { class: "gmd-chips", role: "group", "aria-label": "Device in the plot" });
  }

  draw() {
    const names = [...this.store.devices.keys()];
    const wanted = names.length > 1 ? [...names, "all"] : names;
    if (this.names !== wanted.join()) {
      this.names = wanted.join();
      this.element.replaceChildren(...wanted.map((name) => this.chip(name)));
      // Of many devices each has less room, so that the plot is not pushed out of the page.
      this.element.toggleAttribute("data-many", wanted.length > 5);
    }
    for (const chip of this.element.children) {
      chip.setAttribute("aria-pressed", String(chip.dataset.device === this.view.device));
    }
    this.drawFigures();
  }

  chip(name) {
    const click = { type: "button", "data-device": name, onclick: () => this.view.setDevice(name) };
    if (name === "all") return h("button", { class: "gmd-chip gmd-chip-all", ...click }, "All devices");
    const what = this.store.devices.get(name).name;
    return h("button", { class: "gmd-chip", ...click },
      h("span", { class: "gmd-chip-head" },
        h("span", { class: "gmd-chip-name" }, name),
        h("span", { class: "gmd-chip-what" }, what === "host memory" ? "" : what)),
      h("span", { class: "gmd-chip-figures" },
        h("strong", { "data-figure": "allocated" }), h("span", { "data-figure": "rest" })),
      h("span", { class: "gmd-bar", "aria-hidden": "true" },
        h("span", { class: "gmd-bar-reserved" }), h("span", { class: "gmd-bar-allocated" })));
  }

  drawFigures() {
    for (const chip of this.element.children) {
      const now = this.store.latest(chip.dataset.device);
      const info = this.store.devices.get(chip.dataset.device);
      if (!now || !info) continue;
      const bound = info.limit_bytes ?? info.total_bytes;
      const of = bound ? ` of ${formatBytes(bound)}` : "";
      setText(chip.querySelector("[data-figure=allocated]"), formatBytes(now.allocated));
      setText(chip.querySelector("[data-figure=rest]"), of);
      const reserved = `${formatBytes(now.reserved)} ${reservedName(info.device)}`;
      chip.title = `${formatBytes(now.allocated)} allocated, ${reserved}${of}`;
      const share = (bytes) => `${bound && bytes ? Math.min(100, (100 * bytes) / bound).toFixed(2) : 0}%`;
      chip.querySelector(".gmd-bar-reserved").style.width = share(now.reserved);
      chip.querySelector(".gmd-bar-allocated").style.width = share(now.allocated);
    }
  }
}
