// The dashboard's frame: header, controls, tabs; what is said to the kernel about being seen.

const WINDOWS = [["30 s", 30], ["2 min", 120], ["10 min", 600], ["All", null]];
const STALE_MS = 5000;
const TELL_MS = 10000;
const stores = new Map();
let viewCount = 0;

class View {
  constructor(model, store, element) {
    this.model = model;
    this.store = store;
    this.id = `v${Date.now().toString(36)}${(viewCount++).toString(36)}`;
    this.windowS = 120;
    this.device = null;
    this.deviceChosen = false;
    this.zoom = null;
    this.pausedAt = null;
    this.tab = "cells";
    this.onScreen = true;
    this.wentOffScreen = "";
    this.visible = null;
    this.askedAt = null;
    this.answered = true;
    this.root = h("section", { class: "gmd", "aria-label": "GPU memory dashboard", "data-lm-suppress-shortcuts": "true" });
    this.colors = null;
    this.plot = new Plot(this.root, store, this);
    this.cells = new CellsTable(store, this);
    this.variables = new VariablesPanel(store, this);
    this.build();
    element.append(this.root);
    this.watch();
    store.views.add(this);
    this.chooseDevice();
    this.changed("snapshot");
    this.tell();
  }

  // -- Elements ----------------------------------------------------------------------------------

  build() {
    this.state = h("span", { class: "gmd-state" });
    this.hint = h("span", { class: "gmd-hint", role: "status" });
    this.chips = h("div", { class: "gmd-chips", role: "group", "aria-label": "Device in the plot" });
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
    this.tabs = [["cells", "Cells", this.cells], ["variables", "Variables", this.variables]].map(
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
      this.chips,
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
    this.cells.draw();
    this.plot.schedule();
  }

  setTab(name) {
    this.tab = name;
    for (const { name: own, tab, panel } of this.tabs) {
      tab.setAttribute("aria-selected", String(own === name));
      tab.tabIndex = own === name ? 0 : -1;
      panel.hidden = own !== name;
    }
    if (this.visible !== null) this.tell({ anyway: true, list: name === "variables" });
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

  // -- What the kernel says --------------------------------------------------------------------------

  changed(kind, message) {
    if (kind === "snapshot") this.answered = true;
    if (kind === "rows") {
      this.plot.schedule();
      this.drawFigures();
      return;
    }
    if (kind === "variables" || kind === "sum" || kind === "release") {
      this.variables.changed(kind, message);
    } else {
      this.chooseDevice();
      this.drawDevices();
      this.cells.draw();
      this.variables.draw();
      this.plot.schedule();
    }
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

  drawDevices() {
    const names = [...this.store.devices.keys()];
    const wanted = names.length > 1 ? [...names, "all"] : names;
    if (this.chipNames !== wanted.join()) {
      this.chipNames = wanted.join();
      this.chips.replaceChildren(...wanted.map((name) => this.chip(name)));
    }
    setText(this.reservedKey, reservedName(this.device));
    for (const chip of this.chips.children) {
      chip.setAttribute("aria-pressed", String(chip.dataset.device === this.device));
    }
    this.drawFigures();
  }

  chip(name) {
    const click = { type: "button", "data-device": name, onclick: () => this.setDevice(name) };
    if (name === "all") return h("button", { class: "gmd-chip gmd-chip-all", ...click }, "All devices");
    const info = this.store.devices.get(name);
    return h("button", { class: "gmd-chip", ...click },
      h("span", { class: "gmd-chip-head" },
        h("span", { class: "gmd-chip-name" }, name),
        h("span", { class: "gmd-chip-what" }, info.name === "host memory" ? "" : info.name)),
      h("span", { class: "gmd-chip-figures" },
        h("strong", { "data-figure": "allocated" }), h("span", { "data-figure": "rest" })),
      h("span", { class: "gmd-bar", "aria-hidden": "true" },
        h("span", { class: "gmd-bar-reserved" }), h("span", { class: "gmd-bar-allocated" })));
  }

  drawFigures() {
    for (const chip of this.chips.children) {
      const now = this.store.latest(chip.dataset.device);
      const info = this.store.devices.get(chip.dataset.device);
      if (!now || !info) continue;
      const bound = info.limit_bytes ?? info.total_bytes;
      setText(chip.querySelector("[data-figure=allocated]"), formatBytes(now.allocated));
      const of = bound ? ` of ${formatBytes(bound)}` : "";
      setText(chip.querySelector("[data-figure=rest]"), of);
      chip.title = `${formatBytes(now.allocated)} allocated, ${formatBytes(now.reserved)} reserved${of}`;
      const share = (bytes) => `${bound && bytes ? Math.min(100, (100 * bytes) / bound).toFixed(2) : 0}%`;
      chip.querySelector(".gmd-bar-reserved").style.width = share(now.reserved);
      chip.querySelector(".gmd-bar-allocated").style.width = share(now.allocated);
    }
  }

  drawState() {
    const store = this.store;
    const running = store.running;
    const quiet = performance.now() - store.heardAt > STALE_MS;
    let state = "live";
    let text = "Live";
    if (store.over) [state, text] = ["over", "Over"];
    else if (this.pausedAt !== null) [state, text] = ["paused", "Paused"];
    else if (quiet && this.visible) {
      [state, text] = ["quiet", `No news for ${formatElapsed((performance.now() - store.heardAt) / 1000)}`];
    } else if (running) {
      const elapsed = formatElapsed((store.lastTime ?? running.start_s) - running.start_s);
      [state, text] = ["running", `${cellName(running)} running, ${elapsed}`];
    }
    this.state.dataset.state = state;
    this.root.dataset.state = state;
    setText(this.state, text);
    const late = this.askedAt !== null && !this.answered && performance.now() - this.askedAt > 1000;
    const lines = [];
    if (store.over) lines.push(store.over);
    else if (quiet && this.visible && !running) {
      lines.push("The kernel does not answer. If it was restarted, run %memdash again.");
    }
    lines.push(...store.trouble);
    setText(this.hint, late && !store.over ? "The kernel is busy and answers when the cell ends." : "");
    if (this.banner.dataset.lines !== lines.join("\n")) {
      this.banner.dataset.lines = lines.join("\n");
      this.banner.replaceChildren(...lines.map((line) => h("p", {}, line)));
      this.banner.hidden = lines.length === 0;
    }
    this.root.toggleAttribute("data-over", Boolean(store.over));
    this.pauseButton.disabled = Boolean(store.over);
  }

  // -- Being seen: a view that nobody sees costs the kernel nothing ------------------------------------

  watch() {
    this.observer = new IntersectionObserver((entries) => {
      const entry = entries[entries.length - 1];
      this.onScreen = entry.isIntersecting;
      const box = entry.boundingClientRect;
      // No box: its notebook's tab is hidden. Out of the page: scrolled away, or its cell was detached.
      const gone = this.root.isConnected && box.width === 0 && box.height === 0;
      this.wentOffScreen = this.onScreen ? "" : gone ? "hidden" : "scrolled";
      this.tell();
      if (this.onScreen) this.plot.schedule();
    });
    this.observer.observe(this.root);
    this.onVisibility = () => this.tell();
    document.addEventListener("visibilitychange", this.onVisibility);
    this.onPageHide = () => this.store.send({ kind: "gone", view: this.id, page_left: true });
    window.addEventListener("pagehide", this.onPageHide);
    this.model.on("change:hears_in_mid_cell", () => this.tell());
    this.themes = new MutationObserver(() => {
      this.readColors();
      this.plot.schedule();
    });
    this.themes.observe(document.body, { attributes: true, attributeFilter: ["data-jp-theme-light", "data-jp-theme-name", "class", "data-vscode-theme-kind"] });
    this.scheme = window.matchMedia("(prefers-color-scheme: dark)");
    this.onScheme = () => {
      this.readColors();
      this.plot.schedule();
    };
    this.scheme.addEventListener("change", this.onScheme);
    this.timer = setInterval(() => this.everySecond(), 1000);
  }

  isSeen() {
    if (document.visibilityState === "hidden") return false;
    if (this.onScreen) return true;
    if (this.wentOffScreen === "hidden") return false;
    // Scrolled away. A kernel that is deaf in mid-cell could not hear that we are back.
    return !this.model.get("hears_in_mid_cell");
  }

  /** Tell the kernel whether this view is seen, when that changed, and now and then that it lives. */
  tell({ anyway = false, list = false } = {}) {
    const visible = this.isSeen();
    if (visible === this.visible && !anyway) return;
    const back = visible && this.visible === false;
    const first = this.visible === null;
    const onVariables = this.tab === "variables";
    this.visible = visible;
    this.toldAt = performance.now();
    if (back) {
      this.askedAt = this.store.heardAt = performance.now();
      this.answered = false;
    }
    this.store.send({
      kind: "view", view: this.id, visible, variables: onVariables,
      // What came with the page is coarse: the first view asks for more of the past.
      snapshot: back || (first && !this.store.isFull),
      since_s: back && this.store.isFull ? this.store.lastTime : null,
      list: visible && onVariables && (list || back),
    });
    if (first) this.store.isFull = true;
  }

  everySecond() {
    if (!this.visible) return;
    if (performance.now() - this.toldAt > TELL_MS) this.tell({ anyway: true });
    this.cells.tick();
    this.drawState();
  }

  /** The theme's colours, as plotly needs them; known once the view is in the page. */
  readColors() {
    this.root.dataset.theme = isDark() ? "dark" : "light";
    const style = getComputedStyle(this.root);
    const color = (name) => style.getPropertyValue(`--gmd-${name}`).trim() || "#888";
    const names = ["text", "muted", "grid", "line", "panel", "allocated", "fill", "reserved", "peak", "total", "band"];
    this.colors = Object.fromEntries(names.map((name) => [name, color(name)]));
    this.colors.failedBand = color("failed-band");
    this.colors.font = style.fontFamily || "sans-serif";
  }

  dispose() {
    if (this.isDisposed) return;
    this.isDisposed = true;
    this.store.send({ kind: "gone", view: this.id, page_left: false });
    clearInterval(this.timer);
    this.observer.disconnect();
    this.themes.disconnect();
    document.removeEventListener("visibilitychange", this.onVisibility);
    window.removeEventListener("pagehide", this.onPageHide);
    this.scheme.removeEventListener("change", this.onScheme);
    this.store.views.delete(this);
    this.plot.dispose();
    this.root.remove();
  }
}

function isDark() {
  const { dataset, classList } = document.body;
  if (dataset.jpThemeLight) return dataset.jpThemeLight === "false";
  if (dataset.vscodeThemeKind) return !dataset.vscodeThemeKind.includes("light");
  if (classList.contains("theme-dark")) return true;
  return window.matchMedia("(prefers-color-scheme: dark)").matches;
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
