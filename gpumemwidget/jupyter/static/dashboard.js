// The dashboard's frame: header, controls, tabs, and the module's two entries.

const WINDOWS = [["30 s", 30], ["2 min", 120], ["10 min", 600], ["All", null]];
const VARIABLES_KINDS = new Set(["variables", "account", "parts", "found", "sum", "release"]);
const DEVICE_KINDS = new Set(["device", "live"]);
const stores = new Map();

class View {
  constructor(model, store, element) {
    this.model = model;
    this.store = store;
    this.id = `v${Date.now().toString(36)}${Math.random().toString(36).slice(2, 8)}`;
    this.windowS = 120;
    this.device = null;
    this.deviceChosen = false;
    this.zoom = null;
    this.pausedAt = null;
    this.frame = null;
    this.tab = "cells";
    this.root = h("section", { class: "gmd", "aria-label": "GPU memory dashboard", "data-lm-suppress-shortcuts": "true" });
    this.theme = new Theme(this.root, () => this.plot.schedule());
    this.plot = new Plot(this.root, store, this);
    this.chips = new DeviceChips(store, this);
    this.cells = new CellsTable(store, this);
    this.variables = new VariablesPanel(store, this);
    this.devices = new DevicePanel(store, this);
    this.sight = new Sight(this, () => this.plot.schedule());
    this.build();
    element.append(this.root);
    this.timer = setInterval(() => this.everySecond(), 1000);
    store.views.add(this);
    this.chooseDevice();
    this.changed("snapshot");
    this.sight.tell();
  }

  // -- Elements ----------------------------------------------------------------------------------

  build() {
    this.state = h("span", { class: "gmd-state" });
    this.hint = h("span", { class: "gmd-hint", role: "status" });
    this.banner = h("div", { class: "gmd-banner", role: "alert", hidden: true });
    this.pauseButton = h("button", { class: "gmd-button gmd-pause", type: "button", "aria-pressed": "false", onclick: () => this.setPaused(this.pausedAt === null) }, "Pause");
    this.resetButton = h("button", { class: "gmd-button gmd-reset", type: "button", onclick: () => this.setZoom(null) }, "Reset zoom");
    this.windowButtons = WINDOWS.map(([label, seconds]) => h("button", {
      class: "gmd-segment", type: "button", "data-window": label,
      onclick: () => this.setWindow(seconds),
    }, label));
    this.resetButton.hidden = true;
    this.reservedKey = h("span", { class: "gmd-key gmd-key-reserved" }, "reserved");
    const legend = h("div", { class: "gmd-legend", "aria-hidden": "true" },
      h("span", { class: "gmd-key gmd-key-allocated" }, "allocated"),
      this.reservedKey,
      h("span", { class: "gmd-key gmd-key-peak", title: "Highest allocated since the cell began" }, "peak"));
    this.tabs = [["cells", "Cells", this.cells], ["variables", "Variables", this.variables], ["device", "Device", this.devices]].map(
      ([name, label, part]) => {
        const tab = h("button", {
          class: "gmd-tab", type: "button", role: "tab", id: `${this.id}-tab-${name}`,
          "aria-controls": `${this.id}-panel-${name}`, "data-tab": name,
          onclick: () => this.setTab(name), onkeydown: (event) => this.moveTab(event),
        }, label, h("span", { class: "gmd-count" }));
        const panel = h("div", {
          class: "gmd-panel", role: "tabpanel", id: `${this.id}-panel-${name}`,
          "aria-labelledby": tab.id,
        }, part.element);
        return { name, tab, panel };
      });
    this.root.append(
      h("header", { class: "gmd-header" }, h("h2", { class: "gmd-title" }, "Memory"), this.state, this.hint),
      this.banner,
      this.chips.element,
      h("div", { class: "gmd-controls" },
        this.pauseButton,
        h("div", { class: "gmd-segments", role: "group", "aria-label": "Time in the plot" }, this.windowButtons),
        this.resetButton,
        legend),
      this.plot.element,
      h("div", { class: "gmd-tabs", role: "tablist" }, this.tabs.map(({ tab }) => tab)),
      ...this.tabs.map(({ panel }) => panel));
    this.setTab(this.tab);
    this.setWindow(this.windowS);
  }

  // -- The controls: they live here alone, so they work while a cell runs ---------------------------

  setPaused(paused) {
    this.pausedAt = paused ? this.store.lastTime ?? 0 : null;
    this.drawControls();
  }

  setWindow(seconds) {
    this.windowS = seconds;
    this.zoom = null;
    this.drawControls();
  }

  setZoom(range) {
    this.zoom = range;
    this.drawControls();
  }

  zoomTo(cell) {
    const end = this.plot.endOf({ duration_s: null, ...cell });
    const around = Math.max((end - cell.start_s) * 0.15, 0.05);
    this.setZoom([cell.start_s - around, end + around]);
  }

  setDevice(device) {
    this.deviceChosen = true;
    this.device = device;
    this.drawDevices();
    this.devices.picked = device === "all" ? this.devices.device : device;
    this.cells.draw();
    this.variables.draw();
    if (this.tab === "device") this.devices.pick(this.devices.picked);
    this.plot.schedule();
  }

  setTab(name) {
    this.tab = name;
    for (const { name: own, tab, panel } of this.tabs) {
      tab.setAttribute("aria-selected", String(own === name));
      tab.tabIndex = own === name ? 0 : -1;
      panel.hidden = own !== name;
    }
    this.devices.draw();
    if (this.sight.visible !== null) this.sight.tell({ anyway: true, list: name === "variables", look: name === "device" });
  }

  moveTab(event) {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    const at = this.tabs.findIndex(({ name }) => name === this.tab);
    const next = this.tabs[(at + step + this.tabs.length) % this.tabs.length];
    this.setTab(next.name);
    next.tab.focus();
    event.preventDefault();
  }

  drawControls() {
    const paused = this.pausedAt !== null;
    setText(this.pauseButton, paused ? "Resume" : "Pause");
    this.pauseButton.setAttribute("aria-pressed", String(paused));
    this.windowButtons.forEach((button, i) => {
      const on = !this.zoom && WINDOWS[i][1] === this.windowS;
      button.setAttribute("aria-pressed", String(on));
    });
    this.resetButton.hidden = !this.zoom;
    this.drawState();
    this.plot.schedule();
  }

  drawDevices() {
    setText(this.reservedKey, reservedName(this.device));
    this.chips.draw();
  }

  // -- What the kernel says --------------------------------------------------------------------------

  changed(kind, message) {
    if (kind === "snapshot") this.sight.askedAt = null;
    if (kind === "rows") {
      this.plot.schedule();
      this.chips.drawFigures();
      return;
    }
    if (kind === "trouble") this.variables.giveUp();
    if (DEVICE_KINDS.has(kind)) {
      this.devices.draw();
      return;
    }
    if (VARIABLES_KINDS.has(kind)) {
      this.variables.changed(kind, message);
    } else {
      this.chooseDevice();
      this.drawSoon();
      return;
    }
    this.drawCounts();
  }

  /** Draw all with the browser's next frame: hundreds of short cells may end within a second. */
  drawSoon() {
    this.plot.schedule();
    this.frame ??= requestAnimationFrame(() => {
      this.frame = null;
      this.drawDevices();
      this.cells.draw();
      this.variables.draw();
      this.devices.draw();
      this.drawCounts();
    });
  }

  drawCounts() {
    const [cells, variables] = this.tabs.map(({ tab }) => tab.querySelector(".gmd-count"));
    setText(cells, this.store.cells.length ? String(this.store.cells.length) : "");
    setText(variables, this.store.variables ? String(this.store.variables.holdings.length) : "");
    this.drawState();
  }

  /** The GPU where there is one, all of them where there are several, else the host. */
  chooseDevice() {
    if (this.deviceChosen && (this.device === "all" || this.store.devices.has(this.device))) return;
    const names = [...this.store.devices.keys()];
    const gpus = names.filter((name) => name !== "host");
    this.device = gpus.length > 1 ? "all" : gpus[0] ?? names[0] ?? "all";
  }

  everySecond() {
    if (!this.sight.visible) return;
    this.sight.everySecond();
    this.cells.tick();
    this.variables.everySecond();
    this.drawState();
  }

  drawState() {
    const store = this.store;
    const running = store.running;
    const quiet = performance.now() - store.heardAt > 1000 * store.patienceS;
    let state = "live";
    let text = "Live";
    if (store.over) [state, text] = ["over", "Over"];
    else if (this.pausedAt !== null) [state, text] = ["paused", "Paused"];
    else if (quiet && this.sight.visible) {
      [state, text] = ["quiet", `No news for ${formatElapsed((performance.now() - store.heardAt) / 1000)}`];
    } else if (running) {
      const elapsed = formatElapsed((store.lastTime ?? running.start_s) - running.start_s);
      [state, text] = ["running", `${cellName(running)} running, ${elapsed}`];
    }
    this.state.dataset.state = state;
    this.root.dataset.state = state;
    setText(this.state, text);
    const lines = [];
    if (store.over) lines.push(store.over);
    else if (quiet && this.sight.visible && !running) {
      lines.push("The kernel does not answer. If it was restarted, run %memdash again.");
    }
    lines.push(...store.trouble);
    setText(this.hint, this.sight.waits && !store.over ? "The kernel is busy and answers when the cell ends." : "");
    if (this.banner.dataset.lines !== lines.join("\n")) {
      this.banner.dataset.lines = lines.join("\n");
      const dismiss = () => this.store.forgetTrouble();
      this.banner.replaceChildren(
        h("div", {}, lines.map((line) => h("p", {}, line))),
        store.trouble.length ? h("button", { class: "gmd-dismiss", type: "button", "aria-label": "Dismiss", title: "Dismiss", onclick: dismiss }, "×") : "");
      this.banner.hidden = lines.length === 0;
    }
    this.root.toggleAttribute("data-over", Boolean(store.over));
    this.pauseButton.disabled = Boolean(store.over);
  }

  get colors() {
    return this.theme.colors;
  }

  dispose() {
    if (this.isDisposed) return;
    this.isDisposed = true;
    clearInterval(this.timer);
    cancelAnimationFrame(this.frame);
    this.sight.dispose();
    this.theme.dispose();
    this.devices.dispose();
    this.store.views.delete(this);
    this.plot.dispose();
    this.root.remove();
  }
}

/** The store of a model: all of its views, and what stays when one is closed. */
function storeOf(model) {
  const key = model.get("dashboard_id");
  if (stores.has(key)) return stores.get(key);
  const store = new Store(model);
  stores.set(key, store);
  model.on("msg:custom", (message, buffers) => store.receive(message, buffers));
  // Sent anew when a page finds its kernel again.
  model.on("change:snapshot", () => store.renew(model.get("snapshot")));
  model.on("comm:close", () => store.end(CLOSED));
  model.on("comm_live_update", () => store.end(RESTARTED));
  // JupyterLab's manager knows its kernel: the only word that comes when a kernel dies.
  const kernel = model.widget_manager && model.widget_manager.kernel;
  if (kernel && kernel.statusChanged) {
    kernel.statusChanged.connect((_, status) => {
      if (["restarting", "autorestarting"].includes(status)) store.end(RESTARTED);
      if (["dead", "terminating"].includes(status)) store.end(GONE);
    });
  }
  return store;
}

const RESTARTED = "The kernel was restarted. Run %memdash again.";
const CLOSED = "The dashboard was closed. Run %memdash to open it again.";

export default {
  initialize({ model }) {
    storeOf(model);
    // Begun before there is a view; whether it worked is seen when the first plot is drawn.
    loadPlotly(model).catch(() => {});
  },
  render({ model, el, signal }) {
    const view = new View(model, storeOf(model), el);
    // Heard at once, while the page can still speak to the kernel; the returned call comes later.
    if (signal) signal.addEventListener("abort", () => view.dispose());
    return () => view.dispose();
  },
};
