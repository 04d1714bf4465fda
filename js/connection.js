// The line to one kernel: its messages, which fill a store, and what a page asks of it.

import { ASK_AGAIN_MS, hear, toView } from "./incoming.js";
import { unpackPlotly } from "./plotly.js";
import { Store } from "./store.js";

const MOST_TROUBLE = 5;
/** Between cells the kernel sends an update a second. */
const LONG_SILENCE_S = 5;
/** The wall's clock less the kernel's is read a little later each time: what is no more than that
 * would make a plot tremble that stands still. */
const CLOCK_STEP_S = 0.02;

const GONE = "The kernel is gone. Start one, and run %load_ext gpumemwidget and %memdash again.";
const RESTARTED = "The kernel was restarted. Run %load_ext gpumemwidget and %memdash again.";
const CLOSED = "The dashboard was closed. Run %memdash to open it again.";

/** Handlers by kind of message: most write its facts into the store. Python writes the messages in
 * feed.py and the panels. */
const HANDLERS = {
  snapshot: ({ store }, message, [data]) => store.takeSnapshot(message, data),
  plotly(connection, message, [data]) {
    connection.askedAt.delete("plotly");
    unpackPlotly(data);
  },
  rows({ store }, message, [rows]) {
    if (Math.abs(message.wall_offset_s - store.wallOffset) > CLOCK_STEP_S) store.wallOffset = message.wall_offset_s;
    store.addRows(message.devices, rows);
    // A cell that was given up ends without a word.
    if (store.running && message.running_s !== store.running.start_s) store.running = null;
  },
  devices: ({ store }, { devices }) => store.setDevices(devices),
  started: ({ store }, { cell }) => store.startCell(cell),
  ended: ({ store }, { record }) => store.endCell(record),
  leak: ({ store }, { start_s: start, leak }) => store.addLeak(start, leak),
  variables: ({ store }, message) => store.setVariables(message),
  account({ store }, message) {
    if (message.state === "done") {
      store.setAccount(message);
      return;
    }
    const since = message.progress && store.taking ? store.taking.since : performance.now();
    store.taking = { ...message, since };
  },
  parts: ({ store }, message) => store.addParts(message),
  found: ({ store }, message) => store.setFound(message),
  device({ store }, message) {
    if (message.state === "done") store.setBreakdowns(message);
    else store.looking = message;
  },
  use({ store }, { devices, time_s: time }) {
    store.setUse(devices);
    store.addMoment(time, Object.fromEntries(devices.map(({ device, used, busy, outside }) => [device, [used, busy, outside]])));
  },
  uses: ({ store }, message) => store.setUses(message),
  live: ({ store }, message) => (store.live = message),
  watching: ({ store }, { watches }) => (store.watches = watches),
  processes: ({ store }, message) => (store.processes = message),
  process: ({ store }, message) => store.reports.set(message.id, message),
  // Answers to one view, which takes them out of the message itself.
  sum() {},
  why() {},
  release() {},
  trouble(connection, { message }) {
    // The failure may have been the answer to a question: each can be asked again.
    connection.askedAt.clear();
    connection.store.forgetQuestions();
    if (!connection.trouble.includes(message)) connection.trouble.push(message);
    if (connection.trouble.length > MOST_TROUBLE) connection.trouble.shift();
  },
  over: (connection, { message }) => connection.end(message),
};

export class Connection {
  constructor(model) {
    this.model = model;
    this.store = new Store();
    this.listeners = new Set();
    // The reason why nothing more will come, once that is certain.
    this.over = null;
    // Failures in the kernel that nobody has dismissed.
    this.trouble = [];
    this.heardAt = performance.now();
    // Whether the kernel has spoken: to a model that comes out of a saved notebook none does.
    this.isHeard = false;
    // The number of the newest message that carries one.
    this.seq = 0;
    // When each question was sent that has had no answer, by its kind.
    this.askedAt = new Map();
    // The ids of the views.
    this.views = new Set();
    this.renew(model.get("snapshot"));
    this.unhear = hear(model, (message, buffers) => this.receive(message, buffers), (question) => this.send(question));
    // Sent anew when a page finds its kernel again.
    model.on("change:snapshot", () => this.renew(model.get("snapshot")));
    model.on("comm:close", () => this.end(CLOSED));
    model.on("comm_live_update", () => this.end(RESTARTED));
    // JupyterLab's manager knows its kernel: the only word that comes when a kernel dies.
    model.widget_manager?.kernel?.statusChanged?.connect((_, status) => {
      if (["restarting", "autorestarting"].includes(status)) this.end(RESTARTED);
      if (["dead", "terminating"].includes(status)) this.end(GONE);
    });
  }

  /** Call ``listener`` with the kind of each message and the message, once it is in the store. */
  listen(listener) {
    this.listeners.add(listener);
    return () => this.listeners.delete(listener);
  }

  receive(message, buffers = []) {
    this.heardAt = performance.now();
    this.isHeard = true;
    const handle = HANDLERS[message.kind];
    if (!handle) return;
    const { seq } = message;
    if (message.kind === "snapshot") {
      this.askedAt.delete("snapshot");
      this.seq = Math.max(this.seq, seq);
    } else if (seq !== undefined) {
      if (seq <= this.seq) return;
      if (seq > this.seq + 1) this.askOnce({ kind: "snapshot", since_s: this.store.lastTime });
      this.seq = seq;
    }
    handle(this, message, buffers);
    this.notify(message.kind, message);
  }

  notify(kind, message) {
    for (const listener of this.listeners) listener(kind, message);
  }

  /** The whole state, as a page gets it with its model and when it finds its kernel again. */
  renew(snapshot) {
    this.askedAt.delete("snapshot");
    if (snapshot) {
      this.seq = Math.max(this.seq, snapshot.seq);
      this.store.takeSnapshot(snapshot, toView(snapshot.data));
    }
    this.notify("snapshot");
  }

  /** Ask the kernel once, and again when the answer must have been lost: a busy kernel owes it still. */
  askOnce(question) {
    const at = this.askedAt.get(question.kind);
    if (at !== undefined && (this.store.running || performance.now() - at < ASK_AGAIN_MS)) return;
    if (this.send(question)) this.askedAt.set(question.kind, performance.now());
  }

  /** Send to the kernel; false where it is gone for good. */
  send(content) {
    if (this.over) return false;
    try {
      this.model.send(content);
      return true;
    } catch (error) {
      console.warn("[gpumemwidget]", error);
      this.end(GONE);
      return false;
    }
  }

  /** Say once, for good, that nothing more will come. */
  end(why) {
    if (this.over) return;
    this.over = why;
    this.unhear();
    this.store.running = null;
    this.notify("over");
  }

  /** A person has read what went wrong. */
  forgetTrouble() {
    this.trouble = [];
    this.notify("read");
  }

  /** Seconds since the last word of the kernel, where that is too long. */
  get silentS() {
    const silent = (performance.now() - this.heardAt) / 1000;
    return silent > LONG_SILENCE_S ? silent : null;
  }
}
