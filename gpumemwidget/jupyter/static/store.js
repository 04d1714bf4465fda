// What the front end knows of one kernel's memory: shared by all views of a dashboard, filled from
// the model's snapshot when a page opens and from the kernel's messages after that.
//
// frontend.py joins the scripts of this folder into one module: they share one scope of names.

const MOST_ROWS = 24000;
const HEAD_BYTES = 32;
const COUNTERS = ["allocated", "reserved", "peak"];

class Store {
  constructor(model) {
    this.model = model;
    this.views = new Set();
    this.over = null;
    this.trouble = [];
    this.variables = null;
    // The account of owners that was taken last, and how far a new one is.
    this.account = null;
    this.taking = null;
    // The parts of the devices as they were computed last, how far new ones are, and what is live.
    this.bridges = null;
    this.looking = null;
    this.live = null;
    this.intervalS = 0.1;
    this.heardAt = performance.now();
    this.asking = false;
    this.isFull = false;
    this.clear();
    const snapshot = model.get("snapshot");
    if (snapshot) this.takeSnapshot(snapshot, snapshot.data);
  }

  clear() {
    this.seq = 0;
    this.times = [];
    this.columns = new Map();
    this.devices = new Map();
    this.cells = [];
    this.running = null;
    this.wallOffset = 0;
  }

  get lastTime() {
    return this.times.length ? this.times[this.times.length - 1] : null;
  }

  /** One message of the kernel's; what it changed is said to every view. */
  receive(message, buffers) {
    this.heardAt = performance.now();
    const handler = this[`on_${message.kind}`];
    if (!handler) return;
    if (message.kind === "rows") message.seq = buffers[0].getFloat64(0, true);
    if (message.seq !== undefined && message.kind !== "snapshot") {
      if (message.seq <= this.seq) return;
      if (message.seq > this.seq + 1) this.askSnapshot();
      this.seq = message.seq;
    }
    handler.call(this, message, buffers);
    for (const view of this.views) view.changed(message.kind, message);
  }

  on_rows(message, buffers) {
    // As ``UpdateHead`` in stream.py; the message's number has been looked at.
    const { buffer, byteOffset, byteLength } = buffers[0];
    const [, runningSince, wallOffset, interval] = [0, 1, 2, 3].map((k) => buffers[0].getFloat64(8 * k, true));
    this.wallOffset = wallOffset;
    this.intervalS = interval;
    this.addRows(message.devices, new DataView(buffer, byteOffset + HEAD_BYTES, byteLength - HEAD_BYTES));
    // A cell that was given up ends without a word.
    if (this.running && runningSince !== this.running.start_s) this.running = null;
  }

  on_devices(message) {
    this.setDevices(message.devices);
  }

  on_started(message) {
    this.running = message.cell;
    if (this.account) this.account.old = true;
    if (this.bridges) this.bridges = { ...this.bridges, old: true };
  }

  on_ended(message) {
    this.running = null;
    if (this.account) this.account.old = true;
    this.addCell(message.record);
  }

  on_snapshot(message, buffers) {
    this.asking = false;
    this.takeSnapshot(message, buffers[0]);
  }

  on_variables(message) {
    this.variables = message;
    if (this.account) this.account.old = message.account_is_old;
  }

  on_account(message) {
    if (message.state === "done") {
      this.account = { ...message, parts: new Map(), asked: new Set(), found: null, old: false };
      this.variables = message;
      this.taking = null;
    } else {
      this.taking = { ...message, since: performance.now() };
    }
  }

  on_device(message) {
    if (message.state === "done") {
      this.bridges = { ...message, old: false };
      this.looking = null;
    } else {
      this.looking = message;
    }
  }

  on_live(message) {
    this.live = message;
  }

  /** Parts come by the hundred. */
  on_parts(message) {
    if (!this.account || message.key !== this.account.key) return;
    const known = message.start ? this.account.parts.get(message.node) : { parts: [] };
    if (!known || known.parts.length !== message.start) return;
    this.account.parts.set(message.node, { ...message, parts: [...known.parts, ...message.parts] });
  }

  on_found(message) {
    if (this.account && message.key === this.account.key) this.account.found = message;
  }

  /** The whole state anew, as a page gets it that finds its kernel again. */
  renew(snapshot) {
    this.asking = false;
    if (snapshot) this.takeSnapshot(snapshot, snapshot.data);
    for (const view of this.views) view.changed("snapshot");
  }

  on_sum() {}

  on_release() {}

  on_trouble(message) {
    // It may have been the answer to what was asked for.
    this.asking = false;
    this.taking = null;
    this.looking = null;
    if (this.account) this.account.asked.clear();
    if (!this.trouble.includes(message.message)) this.trouble.push(message.message);
    if (this.trouble.length > 5) this.trouble.shift();
  }

  on_over(message) {
    this.end(message.message);
  }

  /** A person has read what went wrong. */
  forgetTrouble() {
    this.trouble = [];
    for (const view of this.views) view.drawState();
  }

  /** Seconds without a word after which something is wrong: a sampler that sees no change slows down. */
  get patienceS() {
    return Math.max(5, 2.5 * this.intervalS);
  }

  /** Say once, for good, that nothing more will come. */
  end(why) {
    if (this.over) return;
    this.over = why;
    this.running = null;
    for (const view of this.views) view.changed("over");
  }

  askSnapshot() {
    if (this.asking) return;
    this.asking = this.send({ kind: "snapshot", since_s: this.lastTime });
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

  takeSnapshot(snapshot, data) {
    if (snapshot.since_s === null || snapshot.since_s === undefined) {
      this.times = [];
      this.columns = new Map();
      this.cells = [];
    }
    this.seq = Math.max(this.seq, snapshot.seq);
    this.wallOffset = snapshot.wall_offset_s;
    this.intervalS = snapshot.interval_s;
    this.setDevices(snapshot.devices);
    this.running = snapshot.running;
    for (const cell of snapshot.cells) this.addCell(cell);
    if (data) this.addRows(snapshot.columns, data);
  }

  setDevices(devices) {
    this.devices = new Map(devices.map((device) => [device.device, device]));
  }

  addCell(record) {
    const at = this.cells.findIndex((cell) => cell.start_s === record.start_s);
    if (at >= 0) this.cells[at] = record;
    else this.cells.push(record);
    if (this.cells.length > 500) this.cells.splice(0, this.cells.length - 500);
  }

  /** Rows of float64: time, then allocated, reserved and peak of each device; NaN is unknown. */
  addRows(devices, view) {
    const width = 1 + COUNTERS.length * devices.length;
    const n = Math.floor(view.byteLength / 8 / width);
    for (const device of devices) {
      if (this.columns.has(device)) continue;
      const blank = () => new Array(this.times.length).fill(NaN);
      this.columns.set(device, { allocated: blank(), reserved: blank(), peak: blank() });
      if (!this.devices.has(device)) this.devices.set(device, { device, name: "" });
    }
    for (let row = 0; row < n; row++) {
      const number = (k) => view.getFloat64((row * width + k) * 8, true);
      this.addRow(number(0), devices, (k) => number(1 + k));
    }
    if (this.times.length > MOST_ROWS) this.thin();
  }

  addRow(time, devices, number) {
    // A cell's exact end may come a moment after a sample that was taken later.
    let at = this.times.length;
    while (at > 0 && this.times[at - 1] > time) at--;
    if (at > 0 && this.times[at - 1] === time) return;
    const last = at === this.times.length;
    const put = (list, value) => (last ? list.push(value) : list.splice(at, 0, value));
    put(this.times, time);
    for (const [device, column] of this.columns) {
      const k = devices.indexOf(device) * COUNTERS.length;
      COUNTERS.forEach((counter, j) => put(column[counter], k < 0 ? NaN : number(k + j)));
    }
  }

  /** Halve the older three quarters; every extreme of every device stays. */
  thin() {
    const end = Math.floor(this.times.length * 0.75);
    const series = [];
    for (const column of this.columns.values()) series.push(...COUNTERS.map((c) => column[c]));
    const keep = pickExtremes(this.times, series, 0, end, Math.floor(end / (8 * series.length)));
    for (let i = end; i < this.times.length; i++) keep.push(i);
    const pick = (list) => keep.map((i) => list[i]);
    this.times = pick(this.times);
    for (const column of this.columns.values()) {
      for (const counter of COUNTERS) column[counter] = pick(column[counter]);
    }
  }

  /** The newest known figures of a device, or null. */
  latest(device) {
    const column = this.columns.get(device);
    if (!column || !this.times.length) return null;
    return { allocated: lastKnown(column.allocated), reserved: lastKnown(column.reserved) };
  }

  /** The first index whose time is not before ``time``. */
  indexAt(time) {
    let low = 0;
    let high = this.times.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.times[middle] < time) low = middle + 1;
      else high = middle;
    }
    return low;
  }
}

/** A figure may be unknown now and then (malloc's count, where it is slow): the one before stands. */
function lastKnown(values) {
  for (let i = values.length - 1; i >= 0 && i > values.length - 100; i--) {
    if (!Number.isNaN(values[i])) return values[i];
  }
  return null;
}

/** Indices in [start, end) that keep the first, last, lowest and highest of each series in each of
 * ``buckets`` equal spans of time: what a line drawn through all points would show. */
function pickExtremes(times, series, start, end, buckets) {
  if (end - start <= buckets * 2) return Array.from({ length: end - start }, (_, i) => start + i);
  const span = (times[end - 1] - times[start]) / Math.max(1, buckets) || 1;
  const keep = [];
  let from = start;
  while (from < end) {
    const until = times[start] + (Math.floor((times[from] - times[start]) / span) + 1) * span;
    let to = from + 1;
    while (to < end && times[to] < until) to++;
    const chosen = new Set([from, to - 1]);
    for (const values of series) {
      let low = from;
      let high = from;
      for (let i = from; i < to; i++) {
        if (!(values[i] >= values[low])) low = Number.isNaN(values[i]) ? low : i;
        if (!(values[i] <= values[high])) high = Number.isNaN(values[i]) ? high : i;
      }
      chosen.add(low).add(high);
    }
    keep.push(...[...chosen].sort((a, b) => a - b));
    from = to;
  }
  return keep;
}

const GONE = "The kernel is gone. Run %memdash again.";
