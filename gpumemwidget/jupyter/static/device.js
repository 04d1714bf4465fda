// The Device tab: each device as a bar of its parts, one of them as a table with the map of its
// segments, and the processes below the notebook.
//
// The parts are computed in the kernel when no cell runs; what the driver and the system say comes
// about once a second, also while one does.

// What a driver takes and gives back by itself is less.
const MOVED_BYTES = 16 * 1024 ** 2;

class DevicePanel {
  constructor(store, view) {
    this.store = store;
    this.view = view;
    // The device that was clicked on here; else it is the plot's.
    this.picked = null;
    this.table = new BridgeTable();
    this.map = new SegmentMap();
    this.refresh = h("button", { class: "gmd-button gmd-look-again", type: "button", onclick: () => this.ask() }, "Refresh");
    this.words = h("div", { class: "gmd-as-of", role: "status" });
    this.list = h("div", { class: "gmd-devices", role: "group", "aria-label": "Devices" });
    this.heading = h("h3", { class: "gmd-heading" });
    this.notes = h("div", { class: "gmd-notes" });
    this.wait = h("p", { class: "gmd-wait" });
    this.remarks = h("p", { class: "gmd-figures gmd-remarks" });
    this.parts = h("section", { class: "gmd-parts-part" }, this.heading, this.notes,
      h("div", { class: "gmd-parts-scroll" }, this.table.element));
    this.children = new ChildrenTable(store);
    this.element = h("div", {},
      h("div", { class: "gmd-actions" }, this.refresh, this.words),
      this.list, this.remarks, this.wait, this.parts, this.map.element, this.children.element);
  }

  dispose() {
    this.map.dispose();
  }

  /** The device whose parts are shown. */
  get device() {
    const known = this.names();
    if (this.picked && known.includes(this.picked)) return this.picked;
    if (known.includes(this.view.device)) return this.view.device;
    return known.find((name) => name !== "host") ?? known[0] ?? "host";
  }

  /** All devices that can be seen, in their order; those that this process has not touched too. */
  names() {
    const { live, bridges } = this.store;
    const names = live ? live.devices.map(({ device }) => device) : [];
    if (!names.length && bridges) return bridges.bridges.map(({ device }) => device);
    return names.length ? names : [...this.store.devices.keys()];
  }

  pick(device) {
    this.picked = device;
    this.draw();
    const { bridges } = this.store;
    const lacks = !bridges || bridges.old || !(device in bridges.maps);
    this.view.sight.tell({ anyway: true, look: lacks });
  }

  ask() {
    if (this.store.over) return;
    this.view.sight.tell({ anyway: true, look: true });
    this.store.looking = { state: this.store.running ? "queued" : "running" };
    this.draw();
  }

  /** The panel is drawn only while it is seen. */
  draw() {
    if (this.view.tab !== "device") return;
    const { store } = this;
    const bridge = this.bridgeOf(this.device);
    const busy = store.looking && store.looking.state !== "failed";
    this.refresh.disabled = Boolean(store.over || busy);
    setText(this.words, this.stateText());
    this.words.dataset.state = store.looking ? store.looking.state : "";
    this.drawList();
    const drawn = [bridge, this.infoOf(this.device)?.note, store.bridges?.old];
    if (!this.drawn || drawn.some((each, i) => each !== this.drawn[i])) this.drawParts(bridge);
    this.drawn = drawn;
    this.map.draw(store.bridges?.maps[this.device] ?? null);
    this.children.draw();
    const waits = !store.bridges && !store.over && (!store.looking || busy);
    setText(this.wait, !waits ? "" : store.running
      ? "What each device's memory is made of is computed when the running cell ends." : "Looking at the devices…");
    this.wait.hidden = !this.wait.textContent;
    setText(this.remarks, store.bridges ? store.bridges.notes.join(" ") : "");
    this.remarks.hidden = !this.remarks.textContent;
    this.element.toggleAttribute("data-old", Boolean(store.bridges?.old));
  }

  stateText() {
    const { bridges, looking, running } = this.store;
    if (looking?.state === "failed") return `It could not be computed: ${looking.message}`;
    if (!bridges) return "";
    const time = new Date(bridges.wall_s * 1000).toLocaleTimeString([], { hour12: false });
    if (running && looking?.state === "queued") return `Parts as of ${time}: they are computed anew when the cell ends.`;
    if (running && bridges.old) return `Parts as of ${time}, before the running cell; what is in use is live.`;
    return this.hasMoved() ? `As of ${time}: what is in use has changed since.` : `As of ${time}.`;
  }

  /** Whether somebody has taken or freed memory on a GPU since the parts were computed. */
  hasMoved() {
    return this.store.bridges.bridges.some(({ device, used }) => {
      const now = this.infoOf(device)?.used ?? null;
      return device !== "host" && used !== null && now !== null && Math.abs(now - used) >= MOVED_BYTES;
    });
  }

  drawParts(bridge) {
    const info = this.infoOf(this.device);
    this.parts.hidden = !bridge && !info;
    const name = bridge?.name || info?.name;
    this.heading.replaceChildren(this.device, h("span", { class: "gmd-chip-what" }, name && name !== "host memory" ? name : ""));
    const notes = [...(bridge ? bridge.notes : [])];
    if (info?.note && !notes.some((note) => note.includes(info.note))) notes.unshift(info.note);
    if (info && !info.is_touched && this.device !== "host") {
      notes.unshift("This process has not used it: what stands here are the driver's figures, and nothing was done to it.");
    }
    if (!bridge && this.store.bridges) notes.push("Its total is not known, so its parts can't be told.");
    this.notes.replaceChildren(...notes.map((note) => h("p", {}, note)));
    this.notes.hidden = !notes.length;
    this.table.element.hidden = !bridge;
    if (bridge) this.table.draw(bridge);
  }

  bridgeOf(device) {
    return this.store.bridges?.bridges.find((bridge) => bridge.device === device) ?? null;
  }

  infoOf(device) {
    return this.store.live?.devices.find((info) => info.device === device) ?? null;
  }

  // -- All devices -----------------------------------------------------------------------------------

  drawList() {
    const names = this.names();
    const rows = names.map((name) => this.bridgeOf(name));
    if (!this.listed || names.join() !== this.listed.names || rows.some((row, i) => row !== this.listed.rows[i])) {
      const focused = this.list.contains(document.activeElement) && document.activeElement.dataset.pick;
      this.list.replaceChildren(...names.map((name, i) => this.deviceRow(name, rows[i])));
      if (focused) this.list.querySelector(`[data-pick="${focused}"]`)?.focus({ preventScroll: true });
      this.listed = { names: names.join(), rows };
    }
    for (const row of this.list.children) {
      row.setAttribute("aria-pressed", String(row.dataset.pick === this.device));
      const [used, state] = this.figures(row.dataset.pick);
      setText(row.querySelector(".gmd-device-used"), used);
      setText(row.querySelector(".gmd-device-state"), state);
    }
  }

  deviceRow(name, bridge) {
    return h("button", { class: "gmd-device", type: "button", "data-pick": name, onclick: () => this.pick(name) },
      h("span", { class: "gmd-device-name" }, name),
      h("span", { class: "gmd-device-state" }),
      bridge ? bridgeBar(bridge) : h("span", { class: "gmd-bridge" }),
      h("span", { class: "gmd-device-used" }));
  }

  /** What is in use now, and what else is to be said in a word. */
  figures(name) {
    const info = this.infoOf(name);
    const bridge = this.bridgeOf(name);
    const total = info?.total ?? bridge?.total;
    // Of the host no driver tells: what is not free is in use.
    const free = bridge?.parts.find((part) => part.look === "free");
    const used = info?.used ?? bridge?.used ?? (free ? bridge.total - free.bytes : null);
    const text = total ? (used === null ? formatBytes(total) : `${formatBytes(used)} of ${formatBytes(total)} in use`) : "";
    if (!info || name === "host") return [text, ""];
    if (info.note && info.used === null) return [text, "can't be read"];
    if (!info.is_touched) return [text, "not used here"];
    return [text, info.busy === null ? "" : `${info.busy}% busy`];
  }
}

/** The processes below this one: a process comes and goes with the next message. */
class ChildrenTable {
  constructor(store) {
    this.store = store;
    this.body = h("tbody");
    this.note = h("p", { class: "gmd-figures" });
    this.table = h("table", { class: "gmd-table gmd-children" },
      h("caption", { class: "gmd-hidden" }, "Processes below this notebook's"),
      h("thead", {}, h("tr", {},
        h("th", { scope: "col" }, "PID"),
        h("th", { scope: "col", class: "gmd-wide" }, "Process"),
        h("th", { scope: "col", class: "gmd-number" }, "Devices"),
        h("th", { scope: "col", class: "gmd-number", title: "Resident size: pages that processes share count in each of them" }, "Host"))),
      this.body);
    this.element = h("section", { class: "gmd-children-part" },
      h("h3", { class: "gmd-heading" }, "This notebook's children"), this.table, this.note);
  }

  draw() {
    const { live } = this.store;
    this.element.hidden = !live;
    // Where a child can't be told from others, nobody knows on which devices each is.
    const gpus = (this.store.bridges?.bridges ?? []).filter(({ device }) => device !== "host");
    const nowhere = !gpus.length ? "" : gpus.some((bridge) => bridge.hides_children) ? UNKNOWN : "none";
    if (!live || (live === this.drawn && nowhere === this.nowhere)) return;
    this.drawn = live;
    this.nowhere = nowhere;
    const parents = new Set(live.children.map((child) => child.pid));
    this.body.replaceChildren(...live.children.map((child) => h("tr", { "data-pid": child.pid },
      h("th", { scope: "row" }, String(child.pid)),
      h("td", { class: "gmd-wide", title: child.name },
        h("code", {}, child.name || "(no name)"),
        parents.has(child.parent) ? h("span", { class: "gmd-tag" }, `below ${child.parent}`) : null),
      h("td", { class: "gmd-number" }, child.devices.length ? child.devices.map(([device, bytes]) => h("div", {},
        h("span", { class: "gmd-tag" }, device), formatBytes(bytes))) : h("span", { class: "gmd-tag" }, nowhere)),
      h("td", { class: "gmd-number" }, formatBytes(child.resident)))));
    this.table.hidden = !live.children.length;
    const more = live.n_more_children;
    setText(this.note, more ? `${live.are_all_counted ? "" : "At least "}${more} more processes with less memory.` : live.children.length ? ""
      : "No process runs below this notebook. Workers of a DataLoader, launched ranks and the like appear here as they come.");
    this.note.hidden = !this.note.textContent;
  }
}
