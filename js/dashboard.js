// The dashboard's frame: header, controls, tabs, and what each message and each choice makes anew.

import { CellsTable } from "./cells.js";
import { cellName, reservedName } from "./cellwords.js";
import { DeviceChips } from "./chips.js";
import { Choices, TABS, WINDOWS } from "./choices.js";
import { Connection } from "./connection.js";
import { DevicePanel } from "./device.js";
import { formatElapsed } from "./format.js";
import { h, setText } from "./html.js";
import { Plot } from "./plot.js";
import { ProcessesPanel } from "./processes.js";
import { Preferences } from "./preferences.js";
import { CURVES, hasOutside } from "./row.js";
import { Theme } from "./theme.js";
import { VariablesPanel } from "./variables.js";
import { Visibility } from "./visibility.js";

/** Updates of a view by kind of message; any other kind draws the whole view anew. */
const CHANGES = {
  rows: (view) => view.drawReadings(),
  use: (view) => view.drawUse(),
  uses: (view) => view.drawUse(),
  device: (view) => view.devices.draw(),
  live: (view) => view.devices.draw(),
  plotly: (view) => view.plot.schedule(),
  watching: (view) => view.chooseTab(),
  processes(view) {
    view.processes.draw();
    view.drawCounts();
  },
  process: (view) => view.processes.draw(),
  read: (view) => view.drawState(),
  trouble(view) {
    view.variables.giveUp();
    view.drawSoon();
  },
  snapshot(view) {
    view.visibility.askedAt = null;
    view.drawSoon();
  },
};
for (const kind of ["variables", "account", "parts", "found", "sum", "why", "release"]) {
  CHANGES[kind] = (view, message) => {
    view.variables.changed(kind, message);
    view.drawCounts();
  };
}

/** Updates of a view by choice. */
const CHOSEN = {
  time: (view) => view.drawControls(),
  lines(view) {
    view.drawDevices();
    view.plot.schedule();
  },
  device: (view) => view.chooseDevice(),
  tab: (view) => view.chooseTab(),
};

class View {
  constructor(connection, element) {
    this.connection = connection;
    this.store = connection.store;
    this.element = element;
    this.id = `v${Date.now().toString(36)}${Math.random().toString(36).slice(2, 8)}`;
    this.frame = null;
    this.root = h("section", { class: "gmd", "aria-label": "GPU memory dashboard", "data-lm-suppress-shortcuts": "true" });
    this.choices = new Choices(this.store, (what) => CHOSEN[what](this), new Preferences(connection.model.get("notebook")));
    this.theme = new Theme(this.root, () => this.plot.schedule());
    this.plot = new Plot(this.root, connection, this.choices, this.theme);
    this.chips = new DeviceChips(this.store, this.choices);
    this.cells = new CellsTable(this.store, this.choices, () => this.drawSoon());
    this.variables = new VariablesPanel(connection, this.choices, this.id);
    this.devices = new DevicePanel(connection, this.choices, (look) => this.visibility.report({ anyway: true, look }));
    this.processes = new ProcessesPanel(connection, this.choices);
    this.visibility = new Visibility(connection, this.id, this.root, {
      describe: () => ({
        variables: this.choices.tab === "variables",
        device: this.choices.tab === "device" ? this.devices.device : null,
        processes: this.choices.tab === "processes",
      }),
      onChange: () => this.plot.schedule(),
    });
    this.build();
    this.show();
    this.timer = setInterval(() => this.everySecond(), 1000);
    connection.views.add(this.id);
    this.unlisten = connection.listen((kind, message) => this.changed(kind, message));
    this.drawControls();
    this.drawTabs();
    this.drawSoon();
    this.tellTab();
  }

  // -- Elements ----------------------------------------------------------------------------------

  build() {
    const { choices } = this;
    this.state = h("span", { class: "gmd-state" });
    this.hint = h("span", { class: "gmd-hint", role: "status" });
    this.banner = h("div", { class: "gmd-banner", role: "alert", hidden: true });
    this.pauseButton = h("button", {
      class: "gmd-segment gmd-pause", type: "button", "aria-pressed": "false",
      // The plot stands still as it is drawn, though newer readings may have come.
      onclick: () => choices.setPaused(choices.pausedAt === null ? this.plot.liveEnd : null),
    });
    this.resetButton = h("button", { class: "gmd-button gmd-reset", type: "button", hidden: true, onclick: () => choices.setZoom(null) }, "Reset zoom");
    this.windowButtons = WINDOWS.map(([label, seconds]) => h("button", {
      class: "gmd-segment", type: "button", "data-window": label,
      onclick: () => choices.setWindow(seconds),
    }, label));
    this.keys = new Map(CURVES.map((line) => [line, h("button", {
      class: `gmd-key gmd-key-${line}`, type: "button", title: "Show or hide this line", onclick: () => choices.toggleLine(line),
    }, line)]));
    Object.assign(this.keys.get("whole"), { textContent: "whole device", title: "What is in use on the device, by other processes too, as its driver says" });
    Object.assign(this.keys.get("outside"), { textContent: "outside PyTorch", title: "What this process has on the device outside PyTorch: other libraries, the CUDA context" });
    this.saveButton = h("button", {
      class: "gmd-button gmd-save", type: "button", title: "Save the samples in view as a table", onclick: () => this.plot.saveTable(),
    }, "CSV");
    const parts = { cells: this.cells, variables: this.variables, device: this.devices, processes: this.processes };
    this.tabs = TABS.map((name) => {
      const count = h("span", { class: "gmd-count" });
      const tab = h("button", {
        class: "gmd-tab", type: "button", role: "tab", id: `${this.id}-tab-${name}`,
        "aria-controls": `${this.id}-panel-${name}`, "data-tab": name,
        onclick: () => choices.setTab(name), onkeydown: (event) => this.moveTab(event),
      }, name[0].toUpperCase() + name.slice(1), count);
      const panel = h("div", {
        class: "gmd-panel", role: "tabpanel", id: `${this.id}-panel-${name}`,
        "aria-labelledby": tab.id,
      }, parts[name].element);
      return { name, tab, panel, count };
    });
    this.tablist = h("div", { class: "gmd-tabs", role: "tablist" }, this.tabs.map(({ tab }) => tab));
    this.root.append(
      // The static copy below this view is for a page without a kernel: dashboard.py.
      h("style", {}, `.gmw-copy-${this.connection.model.get("dashboard_id")} { display: none !important }`),
      h("header", { class: "gmd-header" }, h("h2", { class: "gmd-title" }, "Memory"), this.state, this.hint),
      this.banner,
      this.chips.element,
      h("div", { class: "gmd-controls" },
        h("div", { class: "gmd-segments", role: "group", "aria-label": "Time in the plot", title: "Drag over the plot to zoom" }, this.pauseButton, this.windowButtons),
        this.resetButton,
        h("div", { class: "gmd-legend", role: "group", "aria-label": "Lines in the plot" }, [...this.keys.values()]),
        this.saveButton),
      this.plot.element,
      this.tablist,
      ...this.tabs.map(({ panel }) => panel));
  }

  // -- What changes: the controls act in the page alone, so they work while a cell runs --------------

  /** Replace the static copy once a kernel has spoken: to a model of a saved notebook none does. */
  show() {
    if (this.connection.isHeard && !this.root.parentNode) this.element.append(this.root);
  }

  changed(kind, message) {
    this.show();
    const change = CHANGES[kind];
    if (change) change(this, message);
    else this.drawSoon();
  }

  chooseDevice() {
    this.drawDevices();
    this.cells.draw();
    this.variables.draw();
    if (this.choices.tab === "device") this.devices.show();
    this.plot.schedule();
  }

  chooseTab() {
    this.drawTabs();
    this.devices.draw();
    this.processes.draw();
    if (this.visibility.visible !== null) this.tellTab();
  }

  /** Ask for what the tab shows. */
  tellTab() {
    const { tab } = this.choices;
    this.visibility.report({ anyway: true, list: tab === "variables", look: tab === "device" });
  }

  moveTab(event) {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    const names = this.choices.tabs;
    const name = names[(names.indexOf(this.choices.tab) + step + names.length) % names.length];
    const next = this.tabs.find((tab) => tab.name === name);
    this.choices.setTab(next.name);
    next.tab.focus();
    event.preventDefault();
  }

  everySecond() {
    if (!this.visibility.visible) return;
    this.visibility.everySecond();
    this.cells.tick();
    this.variables.everySecond();
    this.drawState();
  }

  // -- Drawing -----------------------------------------------------------------------------------

  /** Draw all with the browser's next frame: hundreds of short cells may end within a second. */
  drawSoon() {
    this.plot.schedule();
    this.frame ??= requestAnimationFrame(() => {
      this.frame = null;
      this.drawDevices();
      this.cells.draw();
      this.variables.draw();
      this.devices.draw();
      this.processes.draw();
      this.drawTabs();
      this.drawCounts();
    });
  }

  drawReadings() {
    this.plot.schedule();
    this.chips.drawFigures();
  }

  drawUse() {
    this.drawDevices();
    this.devices.draw();
    this.plot.schedule();
  }

  drawTabs() {
    for (const { name, tab, panel } of this.tabs) {
      const isOpen = name === this.choices.tab;
      tab.setAttribute("aria-selected", String(isOpen));
      tab.tabIndex = isOpen ? 0 : -1;
      tab.hidden = !this.choices.tabs.includes(name);
      panel.hidden = !isOpen;
    }
  }

  drawControls() {
    const { pausedAt, zoom, windowS } = this.choices;
    const isPaused = pausedAt !== null;
    setText(this.pauseButton, isPaused ? "▶" : "❚❚");
    this.pauseButton.setAttribute("aria-label", isPaused ? "Resume" : "Pause");
    this.pauseButton.title = isPaused ? "Resume" : "Pause: the plot stands still";
    this.pauseButton.setAttribute("aria-pressed", String(isPaused));
    this.windowButtons.forEach((button, i) => {
      button.setAttribute("aria-pressed", String(!zoom && WINDOWS[i][1] === windowS));
    });
    this.resetButton.hidden = !zoom;
    this.drawState();
    this.plot.schedule();
  }

  drawDevices() {
    const { isOfHost, devices, hiddenLines } = this.choices;
    for (const [line, key] of this.keys) key.setAttribute("aria-pressed", String(!hiddenLines.has(line)));
    this.keys.get("whole").hidden = !devices.some((device) => this.store.uses.has(device));
    this.keys.get("outside").hidden = !devices.some((device) => hasOutside(this.store.uses.get(device)));
    setText(this.keys.get("reserved"), isOfHost ? reservedName("host") : "reserved");
    setText(this.keys.get("peak"), isOfHost ? "peak (resident)" : "peak");
    this.keys.get("peak").title = isOfHost ? "Highest resident size since the cell began" : "Highest allocated since the cell began";
    this.chips.draw();
  }

  drawCounts() {
    const counts = {
      cells: this.cells.listed().length || "",
      variables: this.store.variables ? this.store.rows.length : "",
      device: "",
      processes: this.store.processes?.n_processes ?? "",
    };
    for (const { name, count } of this.tabs) setText(count, String(counts[name]));
    this.drawState();
  }

  drawState() {
    const { connection, store, visibility } = this;
    const silentS = visibility.visible ? connection.silentS : null;
    let state = "live";
    let text = "Live";
    if (connection.over) [state, text] = ["over", "Disconnected"];
    else if (this.choices.pausedAt !== null) [state, text] = ["paused", "Paused"];
    else if (silentS !== null) [state, text] = ["quiet", `${store.running ? `${cellName(store.running)} running, no` : "No"} news for ${formatElapsed(silentS)}`];
    else if (store.running) [state, text] = ["running", `${cellName(store.running)} running, ${formatElapsed(store.elapsedS)}`];
    this.state.dataset.state = state;
    this.root.dataset.state = state;
    setText(this.state, text);
    setText(this.hint, visibility.waits && !connection.over ? "The kernel is busy and answers when the cell ends." : "");
    this.drawBanner(silentS !== null && !store.running);
    this.root.toggleAttribute("data-over", Boolean(connection.over));
    this.pauseButton.disabled = Boolean(connection.over);
  }

  drawBanner(isSilent) {
    const { over, trouble } = this.connection;
    const lines = [...trouble];
    if (over) lines.unshift(over);
    else if (isSilent) lines.unshift("The kernel does not answer. If it was restarted, run %load_ext gpumemwidget and %memdash again.");
    if (this.banner.dataset.lines === lines.join("\n")) return;
    this.banner.dataset.lines = lines.join("\n");
    this.banner.replaceChildren(
      h("div", {}, lines.map((line) => h("p", {}, line))),
      trouble.length ? h("button", {
        class: "gmd-dismiss", type: "button", "aria-label": "Dismiss", title: "Dismiss", onclick: () => this.connection.forgetTrouble(),
      }, "×") : "");
    this.banner.hidden = lines.length === 0;
  }

  dispose() {
    if (this.isDisposed) return;
    this.isDisposed = true;
    clearInterval(this.timer);
    cancelAnimationFrame(this.frame);
    this.visibility.dispose();
    this.theme.dispose();
    this.connection.views.delete(this.id);
    this.unlisten();
    this.plot.dispose();
    this.root.remove();
  }
}

/** anywidget calls this once for each model, ``initialize`` once, and ``render`` for each view. */
export default () => {
  let connection = null;
  return {
    initialize({ model }) {
      connection = new Connection(model);
    },
    render({ el, signal }) {
      const view = new View(connection, el);
      // Heard at once, while the page can still speak to the kernel; the returned call comes later.
      if (signal) signal.addEventListener("abort", () => view.dispose());
      return () => view.dispose();
    },
  };
};
