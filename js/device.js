// The Device tab: the static report of the device whose card is chosen, with its parts and the map of
// its segments, and the processes that this notebook has started.
//
// The report is made in the kernel when no cell runs; which processes there are (``live``) comes
// about once a second, also while one does.

import { UNKNOWN, formatBytes, formatTime } from "./format.js";
import { h, setText } from "./html.js";
import { Table } from "./table.js";

export class DevicePanel {
  /** ``onLook`` is called when the kernel is to describe the device in view, with whether its parts
   * are to be computed anew. */
  constructor(connection, choices, onLook) {
    this.connection = connection;
    this.store = connection.store;
    this.choices = choices;
    this.onLook = onLook;
    this.refresh = h("button", { class: "gmd-button gmd-look-again", type: "button", onclick: () => this.ask() }, "Refresh");
    this.words = h("div", { class: "gmd-as-of", role: "status" });
    this.notes = h("div", { class: "gmd-notes" });
    this.wait = h("p", { class: "gmd-wait" });
    this.report = h("div", { class: "gmd-report" });
    this.parts = h("section", { class: "gmd-parts-part" }, this.notes, this.report);
    this.children = new ChildrenTable(this.store);
    this.element = h("div", {},
      h("div", { class: "gmd-actions" }, this.refresh, this.words),
      this.wait, this.parts, this.children.element);
  }

  /** The device whose parts are shown: that of the plot, of several the first GPU. */
  get device() {
    const { device, devices } = this.choices;
    return device !== "all" ? device : devices.find((name) => name !== "host") ?? "host";
  }

  /** Show the device that was chosen, and ask for its report where there is none. */
  show() {
    this.draw();
    const { breakdowns } = this.store;
    this.onLook(!breakdowns || breakdowns.old || !this.breakdownOf(this.device)?.html);
  }

  ask() {
    if (this.connection.over) return;
    this.onLook(true);
    this.store.looking = { state: this.store.running ? "queued" : "running" };
    this.draw();
  }

  /** The panel is drawn only while it is seen. */
  draw() {
    if (this.choices.tab !== "device") return;
    const { store } = this;
    const breakdown = this.breakdownOf(this.device);
    const busy = store.looking && store.looking.state !== "failed";
    this.refresh.disabled = Boolean(this.connection.over || busy);
    setText(this.words, this.stateText());
    this.words.dataset.state = store.looking ? store.looking.state : "";
    const drawn = [breakdown, this.infoOf(this.device)?.note, store.breakdowns?.old];
    if (!this.drawn || drawn.some((each, i) => each !== this.drawn[i])) this.drawParts(breakdown);
    this.drawn = drawn;
    this.children.draw();
    const waits = !store.breakdowns && !this.connection.over && (!store.looking || busy);
    setText(this.wait, !waits ? "" : store.running
      ? "What each device's memory is made of is computed when the running cell ends." : "Looking at the devices…");
    this.wait.hidden = !this.wait.textContent;
    this.element.toggleAttribute("data-old", Boolean(store.breakdowns?.old));
  }

  stateText() {
    const { breakdowns, looking, running } = this.store;
    if (looking?.state === "failed") return `It could not be computed: ${looking.message}`;
    if (!breakdowns) return "";
    const time = formatTime(breakdowns.wall_s);
    if (running && looking?.state === "queued") return `As of ${time}: computed anew when the cell ends.`;
    if (running && breakdowns.old) return `As of ${time}, before the running cell.`;
    return `As of ${time}.`;
  }

  drawParts(breakdown) {
    const info = this.infoOf(this.device);
    const notes = info?.note && !breakdown?.html ? [info.note] : [];
    if (info && !info.is_touched && this.device !== "host") {
      notes.unshift("This process has not used it: what stands here are the driver's figures, and nothing was done to it.");
    }
    if (!breakdown && this.store.breakdowns) notes.push("Its total is not known, so neither are its parts.");
    this.notes.replaceChildren(...notes.map((note) => h("p", {}, note)));
    this.notes.hidden = !notes.length;
    this.parts.hidden = !breakdown && !notes.length;
    this.report.innerHTML = breakdown?.html ?? "";
  }

  breakdownOf(device) {
    return this.store.breakdowns?.breakdowns.find((breakdown) => breakdown.device === device) ?? null;
  }

  infoOf(device) {
    return this.store.use.get(device) ?? null;
  }
}

/** The processes that this notebook has started: one comes and goes with the next message. */
class ChildrenTable {
  constructor(store) {
    this.store = store;
    this.note = h("p", { class: "gmd-figures" });
    this.table = new Table("gmd-children", "Processes that this notebook has started", [
      { label: "PID" },
      { label: "Process", class: "gmd-wide" },
      { label: "Devices", class: "gmd-number" },
      { label: "Host", class: "gmd-number", title: "Resident size: pages that processes share count in each of them" },
    ]);
    this.element = h("section", { class: "gmd-children-part" },
      h("h3", { class: "gmd-heading" }, "This notebook's children"), this.table.element, this.note);
  }

  draw() {
    const { live } = this.store;
    this.element.hidden = !live;
    // If children can't be distinguished from other processes, their devices are unknown.
    const gpus = (this.store.breakdowns?.breakdowns ?? []).filter(({ device }) => device !== "host");
    const nowhere = !gpus.length ? "" : gpus.some((breakdown) => breakdown.hides_children) ? UNKNOWN : "none";
    if (!live || (live === this.drawn && nowhere === this.nowhere)) return;
    this.drawn = live;
    this.nowhere = nowhere;
    const parents = new Set(live.children.map((child) => child.pid));
    this.table.fill(live.children.map((child) => h("tr", { "data-pid": child.pid },
      h("th", { scope: "row" }, String(child.pid)),
      h("td", { class: "gmd-wide", title: child.name },
        h("code", {}, child.name || "(no name)"),
        parents.has(child.parent) ? h("span", { class: "gmd-tag" }, `below ${child.parent}`) : null),
      h("td", { class: "gmd-number" }, child.devices.length ? child.devices.map(([device, bytes]) => h("div", {},
        h("span", { class: "gmd-tag" }, device), formatBytes(bytes))) : h("span", { class: "gmd-tag" }, nowhere)),
      h("td", { class: "gmd-number" }, formatBytes(child.resident)))));
    this.table.element.hidden = !live.children.length;
    const more = live.n_more_children;
    setText(this.note, more ? `${more} more processes with less memory.` : live.children.length ? ""
      : "This notebook has started no other process, such as a worker of a DataLoader.");
    this.note.hidden = !this.note.textContent;
  }
}
