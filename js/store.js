// The page's knowledge of one kernel's memory: readings over time, cells, whole devices, and the lists
// that were asked for. The handlers in ``connection.js`` write it; views only read.

/** Maximum number of readings, and of moments of the drivers' figures. */
const MOST_ROWS = 24000;
const MOST_MOMENTS = 3600;
const MOST_CELLS = 500;
/** Seconds between two readings from which on something is missing between them: history.py has the same. */
export const GAP_S = 5;
/** A row's figures for each device, in their order. */
const COUNTERS = ["allocated", "reserved", "allocatedPeak", "reservedPeak"];

export class Store {
  constructor() {
    // Readings: a column of times, and for each device one for each counter; NaN is unknown.
    this.times = [];
    this.columns = new Map();
    // Between which two times nothing was sampled: readings are thinned, so their distance does not say it.
    this.gaps = [];
    this.devices = new Map();
    this.cells = [];
    this.running = null;
    // The wall's clock less the kernel's.
    this.wallOffset = 0;
    // The variables; the account of owners that was taken last, and how far a new one is.
    this.variables = null;
    this.account = null;
    this.taking = null;
    // The parts of the devices as they were computed last, how far new ones are, and the children now.
    this.breakdowns = null;
    this.looking = null;
    this.live = null;
    // Whether the kernel watches other processes; the newest state of them, and reports by their ids.
    this.watches = false;
    this.processes = null;
    this.reports = new Map();
    // Figures of the drivers for each whole device: the newest, and over time.
    this.use = new Map();
    this.uses = new Map();
  }

  /** The devices that this process uses, the host among them. */
  get touched() {
    return [...this.devices.values()].filter((info) => info.is_touched !== false).map(({ device }) => device);
  }

  /** The rows of the variables that were listed last. */
  get rows() {
    return this.variables ? this.variables.variables : [];
  }

  get lastTime() {
    return this.times.at(-1) ?? null;
  }

  /** Seconds since the running cell began. */
  get elapsedS() {
    return this.running ? (this.lastTime ?? this.running.start_s) - this.running.start_s : 0;
  }

  // -- Cells and devices -----------------------------------------------------------------------------

  takeSnapshot(snapshot, data) {
    if (snapshot.since_s === null || snapshot.since_s === undefined) {
      this.times = [];
      this.columns = new Map();
      this.cells = [];
    }
    this.wallOffset = snapshot.wall_offset_s;
    this.setDevices(snapshot.devices);
    this.running = snapshot.running;
    for (const cell of snapshot.cells) this.addCell(cell);
    if (snapshot.use) this.setUses(snapshot.use);
    if (snapshot.watches !== undefined) this.watches = snapshot.watches;
    if (data) this.addRows(snapshot.columns, data);
    this.gaps = snapshot.gaps ?? [];
  }

  setDevices(devices) {
    this.devices = new Map(devices.map((device) => [device.device, device]));
  }

  startCell(cell) {
    this.running = cell;
    if (this.account) this.account.old = true;
    if (this.breakdowns) this.breakdowns = { ...this.breakdowns, old: true };
  }

  endCell(record) {
    this.running = null;
    if (this.account) this.account.old = true;
    this.addCell(record);
  }

  addCell(record) {
    const at = this.cells.findIndex((cell) => cell.start_s === record.start_s);
    if (at >= 0) this.cells[at] = record;
    else this.cells.push(record);
    if (this.cells.length > MOST_CELLS) this.cells.splice(0, this.cells.length - MOST_CELLS);
  }

  /** A cell may grow while it runs, or be found to have grown at its end. */
  addLeak(start, leak) {
    const cell = [this.running, ...this.cells].find((each) => each?.start_s === start);
    if (cell) cell.leaks = [...(cell.leaks ?? []), leak];
  }

  // -- Readings --------------------------------------------------------------------------------------

  /** Rows of float64: time, then the counters of each device; NaN is unknown. */
  addRows(devices, view) {
    const width = 1 + COUNTERS.length * devices.length;
    const n = Math.floor(view.byteLength / 8 / width);
    devices.forEach((device) => {
      if (this.columns.has(device)) return;
      const blank = () => new Array(this.times.length).fill(NaN);
      this.columns.set(device, Object.fromEntries(COUNTERS.map((counter) => [counter, blank()])));
      if (!this.devices.has(device)) this.devices.set(device, { device, name: "" });
    });
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
    const before = this.times.at(-1);
    if (last && time - before > GAP_S) this.gaps = [...this.gaps.slice(-MOST_CELLS), [before, time]];
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
    const series = [...this.columns.values()].flatMap((column) => COUNTERS.map((counter) => column[counter]));
    const keep = pickExtremes(this.times, series, 0, end, Math.floor(end / (8 * series.length)));
    for (let i = end; i < this.times.length; i++) keep.push(i);
    const pick = (list) => keep.map((i) => list[i]);
    this.times = pick(this.times);
    for (const column of this.columns.values()) {
      for (const counter of COUNTERS) column[counter] = pick(column[counter]);
    }
  }

  /** Return the column of a device's peaks: of allocated memory, or of reserved memory if allocated
   * has no peak counter, as on the host. */
  peaks(device) {
    const column = this.columns.get(device);
    return lastKnown(column.allocatedPeak) === null ? column.reservedPeak : column.allocatedPeak;
  }

  /** The newest known figures of a device by counter, or null. */
  latest(device) {
    const column = this.columns.get(device);
    if (!column || !this.times.length) return null;
    return Object.fromEntries(COUNTERS.map((counter) => [counter, lastKnown(column[counter])]));
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

  /** True if nothing was sampled for a while between two readings. */
  hasGap(first, second) {
    const [start, end] = [this.times[first], this.times[second]];
    return end - start > GAP_S && this.gaps.some(([from, to]) => from >= start && to <= end);
  }

  /** The running cell with what it did so far to each device, by the readings since it began; or null. */
  describeRunning() {
    const { running } = this;
    if (!running) return null;
    const start = this.indexAt(running.start_s);
    const devices = [...(running.before && start < this.times.length ? this.columns.keys() : [])].map((device) => {
      const { allocated, allocatedPeak } = this.columns.get(device);
      const counted = lastKnown(allocatedPeak) === null ? "reserved" : "allocated";
      // The rows of a long cell's start are thinned; a device that was not in use had nothing.
      const [allocatedBefore, reservedBefore] = running.before[device] ?? [0, 0];
      const before = counted === "allocated" ? allocatedBefore : reservedBefore;
      const peak = this.peaks(device).slice(start).reduce((most, bytes) => (Number.isNaN(most) || bytes > most ? bytes : most), NaN);
      return {
        device, peak, rise: before === null ? null : peak - before,
        change: allocatedBefore === null ? null : lastKnown(allocated) - allocatedBefore,
        peak_of: counted, peak_is: counted === "allocated" ? "exact" : "sampled",
      };
    });
    return { ...running, devices };
  }

  /** Return the samples of a span of time as CSV, a row for each device: seconds since 1970, the same
   * time by ISO 8601, and bytes by counter, empty where they are unknown. */
  formatTable(devices, from, to) {
    const rows = [["time_s", "time", "device", "allocated_bytes", "reserved_bytes", "allocated_peak_bytes", "reserved_peak_bytes"]];
    const known = devices.filter((device) => this.columns.has(device));
    for (let i = this.indexAt(from); i < this.times.length && this.times[i] <= to; i++) {
      const ms = Math.round((this.times[i] + this.wallOffset) * 1000);
      for (const device of known) {
        const figures = COUNTERS.map((counter) => this.columns.get(device)[counter][i]);
        rows.push([(ms / 1000).toFixed(3), new Date(ms).toISOString(), device, ...figures.map((figure) => (Number.isNaN(figure) ? "" : figure))]);
      }
    }
    return `${rows.map((row) => row.join(",")).join("\n")}\n`;
  }

  // -- What the drivers say -------------------------------------------------------------------------

  setUses({ devices, moments }) {
    this.uses = new Map();
    this.setUse(devices);
    for (const [time, figures] of moments) this.addMoment(time, figures);
  }

  setUse(devices) {
    this.use = new Map(devices.map((info) => [info.device, info]));
  }

  addMoment(time, figures) {
    for (const [device, [used, busy, outside]] of Object.entries(figures)) {
      if (device === "host" || used === null) continue;
      if (!this.uses.has(device)) this.uses.set(device, { t: [], used: [], busy: [], outside: [] });
      const own = this.uses.get(device);
      own.t.push(time);
      own.used.push(used);
      own.busy.push(busy);
      own.outside.push(outside ?? null);
      if (own.t.length > MOST_MOMENTS) for (const list of Object.values(own)) list.splice(0, MOST_MOMENTS / 10);
    }
  }

  // -- What was asked for ----------------------------------------------------------------------------

  setVariables(message) {
    this.variables = message;
    if (this.account) this.account.old = message.account_is_old;
  }

  setAccount(message) {
    this.account = { ...message, parts: new Map(), asked: new Set(), found: null, old: false, at_s: Date.now() / 1000 };
    this.variables = message;
    this.taking = null;
  }

  /** Parts come by the hundred. */
  addParts(message) {
    if (!this.account || message.key !== this.account.key) return;
    const known = message.start ? this.account.parts.get(message.node) : { parts: [] };
    if (!known || known.parts.length !== message.start) return;
    this.account.parts.set(message.node, { ...message, parts: [...known.parts, ...message.parts] });
  }

  setFound(message) {
    if (this.account && message.key === this.account.key) this.account.found = message;
  }

  setBreakdowns(message) {
    this.breakdowns = { ...message, old: false };
    this.looking = null;
  }

  /** Forget open questions, whose answers may never come, so that they can be asked again. */
  forgetQuestions() {
    this.taking = null;
    this.looking = null;
    if (this.account) this.account.asked.clear();
    for (const [id, { state }] of this.reports) if (state === "asked") this.reports.delete(id);
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
export function pickExtremes(times, series, start, end, buckets) {
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
