// The Processes tab: hosts, their GPUs, and the processes on them, with a report of each on a click.
//
// The kernel sends all of it about once a second while the tab is seen, and a report when it is
// asked for. Names come from other machines: all are set as text.

import { PEAK_MEANS, peakText } from "./cellwords.js";
import { Bar, unusedParts } from "./deviceparts.js";
import { UNKNOWN, formatBytes, formatElapsed, formatOf, formatShort, formatTime } from "./format.js";
import { h, setText } from "./html.js";
import { Table, keepFocus } from "./table.js";

const N_COLUMNS = 8;
/** Numbers of bands with a colour of their own. */
const N_COLORS = 8;
/** Hosts are folded from the start, unless something is wrong there, if there are more rows in all. */
const MANY_ROWS = 64;
const LINE = { width: 60, height: 16 };
const SVG = "http://www.w3.org/2000/svg";

export class ProcessesPanel {
  constructor(connection, choices) {
    this.connection = connection;
    this.store = connection.store;
    this.choices = choices;
    // What a person has folded or unfolded, by host, and the id of the process whose report is open.
    this.folded = new Map();
    this.picked = null;
    this.rows = new Map();
    this.words = h("span");
    this.trouble = h("span", { class: "gmd-host-trouble" });
    this.notes = h("div", { class: "gmd-notes gmd-process-notes" });
    this.table = new Table("gmd-processes", "Processes by host and GPU", [
      { label: "GPU" },
      { label: "Process" },
      { label: "State" },
      { label: "Last 2 min", title: "The last two minutes: allocated on the GPU, or resident on the host" },
      ...["Allocated", "Reserved", "Peak"].map((label) => ({ label, class: "gmd-number" })),
      { label: "Peak in", class: "gmd-wide" },
    ]).element;
    this.scroll = h("div", { class: "gmd-scroll" }, this.table);
    this.more = h("p", { class: "gmd-hidden-cells" });
    this.emptyWords = h("span");
    this.note = h("p", { class: "gmd-note gmd-no-process" }, this.emptyWords, h("code", {}, "python -m gpumemwidget run --to FOLDER train.py"));
    this.report = new ProcessReport(this.store, (id) => this.ask(id), () => this.pick(null));
    this.element = h("div", {}, h("div", { class: "gmd-actions" }, h("div", { class: "gmd-said" }, this.words, this.trouble)), this.notes, this.note, this.scroll, this.more,
      this.report.element);
  }

  /** The panel is drawn only while it is seen. */
  draw() {
    const { processes } = this.store;
    if (this.choices.tab !== "processes") return;
    const isEmpty = !processes?.n_processes;
    this.scroll.hidden = isEmpty;
    this.note.hidden = !isEmpty;
    setText(this.emptyWords, isEmpty ? this.emptyText() : "");
    this.note.lastChild.hidden = !processes;
    setText(this.words, isEmpty ? "" : summaryText(processes));
    setText(this.trouble, isEmpty ? "" : troubleText(addHosts(processes.hosts)));
    this.words.parentElement.parentElement.hidden = isEmpty;
    this.drawNotes();
    setText(this.more, processes?.n_unlisted
      ? `${processes.n_unlisted} more processes have no row: these are the ones with the most memory, and those that stand out.` : "");
    this.more.hidden = !this.more.textContent;
    if (!isEmpty) this.drawTable(processes.hosts);
    this.report.draw(isEmpty ? null : this.picked);
  }

  emptyText() {
    const { processes, running } = this.store;
    if (!processes) return running ? "The processes are listed when the running cell ends." : "Looking at the processes…";
    return `Nothing has come from ${processes.sources.join(", ")} yet. A process appears here as soon as its recording begins, as with `;
  }

  drawNotes() {
    const lines = listNotes(this.store.processes);
    this.notes.hidden = !lines.length;
    if (this.notes.dataset.lines === lines.join("\n")) return;
    this.notes.dataset.lines = lines.join("\n");
    this.notes.replaceChildren(...lines.map((line) => h("p", {}, line)));
  }

  // -- Rows ------------------------------------------------------------------------------------------

  isFolded(host, nRows) {
    const { host: name, n_lost: lost, n_failed: failed, n_ooms: ooms, gpus } = host;
    const isFine = !lost && !failed && !ooms && !gpus.some(({ rows }) => rows.some((row) => row.is_skewed));
    return this.folded.get(name) ?? (nRows > MANY_ROWS && isFine);
  }

  /** What is where, as text: only where that changes the table is built anew. */
  drawTable(hosts) {
    const groups = listGroups(hosts);
    const nRows = groups.reduce((sum, { rows }) => sum + rows.length, 0);
    const shown = hosts.map((host) => ({
      host, isFolded: this.isFolded(host, nRows), groups: groups.filter((group) => group.host === host),
    }));
    const plan = JSON.stringify(shown.map(({ host, isFolded, groups: own }) => [
      host.host, isFolded, isFolded ? 0 : own.map(({ rows }) => rows.map((row) => row.key)),
    ]));
    if (plan !== this.plan) {
      this.plan = plan;
      this.build(shown);
    }
    for (const { host, isFolded, groups: own } of shown) {
      this.drawHost(host);
      if (isFolded) continue;
      for (const group of own) {
        if (group.gpu) this.drawGpu(group);
        for (const row of group.rows) this.drawRow(row);
      }
    }
  }

  build(shown) {
    this.rows = new Map();
    keepFocus(this.table, () => {
      for (const body of this.table.querySelectorAll("tbody")) body.remove();
      for (const { host, isFolded, groups } of shown) {
        this.table.append(this.makeHost(host, isFolded), ...(isFolded ? [] : groups.map((group) => this.makeGroup(group))));
      }
    });
  }

  makeHost({ host }, isFolded) {
    const parts = { summary: h("span", { class: "gmd-host-summary" }), trouble: h("span", { class: "gmd-host-trouble" }) };
    this.rows.set(`host ${host}`, parts);
    const toggle = () => {
      this.folded.set(host, !isFolded);
      this.draw();
    };
    return h("tbody", { class: "gmd-host", "data-host": host }, h("tr", {},
      h("th", { scope: "rowgroup", colspan: N_COLUMNS },
        h("button", { class: "gmd-fold", type: "button", "aria-expanded": String(!isFolded), "data-focus": `host ${host}`, onclick: toggle }, h("bdi", {}, host)),
        parts.summary, parts.trouble)));
  }

  drawHost(host) {
    const { summary, trouble } = this.rows.get(`host ${host.host}`);
    setText(summary, hostText(host));
    setText(trouble, troubleText(host));
  }

  makeGroup({ key, gpu, rows }) {
    const parts = { name: h("bdi", { class: "gmd-gpu-name" }), used: h("span", { class: "gmd-gpu-used" }), bar: new Bar() };
    this.rows.set(key, parts);
    const cell = h("td", { class: "gmd-gpu", rowspan: rows.length }, gpu
      ? [h("span", { class: "gmd-gpu-head" }, parts.name, parts.used), parts.bar.element]
      : h("span", { class: "gmd-gpu-used" }, "no GPU: host memory"));
    return h("tbody", { "data-gpu": gpu?.uuid ?? "" }, rows.map((row, i) => this.makeRow(row, i ? null : cell)));
  }

  drawGpu({ key, host, gpu }) {
    const { name, used, bar } = this.rows.get(key);
    setText(name, host.gpu_name && gpu.uuid ? shortenUuid(gpu.uuid) : gpu.name);
    name.title = [gpu.name, gpu.uuid].filter(Boolean).join("\n");
    setText(used, gpu.total === null ? formatBytes(gpu.used) : gpu.used === null ? `${UNKNOWN} of ${formatShort(gpu.total)}` : formatOf(gpu.used, gpu.total));
    used.title = gpu.used === null ? "No process that could read what is in use runs any more" : "In use, by all processes";
    const parts = gpuParts(gpu);
    bar.draw({ parts, total: gpu.total });
    bar.element.title = parts.map(({ label, bytes }) => `${label}: ${formatBytes(bytes)}`).join("\n");
  }

  makeRow(row, cell) {
    const { key, id, gpu, look } = row;
    const line = document.createElementNS(SVG, "svg");
    line.setAttribute("viewBox", `0 0 ${LINE.width} ${LINE.height}`);
    line.setAttribute("preserveAspectRatio", "none");
    line.setAttribute("aria-hidden", "true");
    const [area, stroke] = ["gmd-line-area", "gmd-line-stroke"].map((name) => {
      const path = document.createElementNS(SVG, "path");
      path.setAttribute("class", name);
      line.append(path);
      return path;
    });
    const parts = {
      area, stroke,
      name: h("bdi"),
      pid: h("span", { class: "gmd-tag" }),
      state: h("bdi"),
      since: h("span", { class: "gmd-tag gmd-since" }),
      oom: h("span", { class: "gmd-oom" }, "out of memory"),
      allocated: h("span"), reserved: h("span"), peak: h("span"),
      peakIn: h("bdi"),
    };
    this.rows.set(key, parts);
    // A single process needs no colour of its own.
    const swatch = gpu?.rows.length > 1 ? h("span", { class: "gmd-swatch", "data-look": look, "aria-hidden": "true" }) : null;
    parts.button = h("button", {
      class: "gmd-pick", type: "button", title: "Show its spans, its timeline and its errors", "data-focus": key, onclick: () => this.pick(id),
    }, parts.name);
    parts.tr = h("tr", { class: "gmd-process" }, cell,
      h("th", { scope: "row" }, swatch, parts.button, parts.pid),
      h("td", { class: "gmd-process-state" }, parts.state, parts.since, parts.oom),
      h("td", { class: "gmd-line" }, line),
      h("td", { class: "gmd-number", "data-label": "allocated" }, parts.allocated),
      h("td", { class: "gmd-number", "data-label": gpu ? "reserved" : "resident" }, parts.reserved),
      h("td", { class: "gmd-number", "data-label": "peak" }, parts.peak),
      h("td", { class: "gmd-wide gmd-peak-in" }, parts.peakIn));
    return parts.tr;
  }

  drawRow(row) {
    const parts = this.rows.get(row.key);
    parts.tr.dataset.status = row.status;
    parts.tr.toggleAttribute("data-skewed", row.is_skewed);
    setText(parts.name, row.name);
    parts.name.title = [row.what, row.label, `pid ${row.pid}`, row.peak_in && `peak in ${row.peak_in}`, row.gpu ? `${row.device} in that process` : ""].filter(Boolean).join("\n");
    setText(parts.pid, `pid ${row.pid}`);
    setText(parts.state, row.words);
    parts.state.title = row.error;
    setText(parts.since, sinceText(row));
    parts.oom.hidden = !row.n_ooms;
    setText(parts.allocated, formatBytes(row.allocated));
    setText(parts.reserved, formatBytes(row.reserved));
    setText(parts.peak, peakText(row));
    parts.peak.title = PEAK_MEANS[row.peak_is] ?? "";
    setText(parts.peakIn, row.peak_in);
    parts.peakIn.title = row.peak_in;
    parts.button.setAttribute("aria-pressed", String(row.id === this.picked));
    const { area, stroke } = linePaths(row.line, LINE);
    parts.stroke.setAttribute("d", stroke);
    parts.area.setAttribute("d", area);
  }

  /** Show the report of a process, or none; a second click takes it away. */
  pick(id) {
    this.picked = id === this.picked ? null : id;
    if (this.picked !== null) this.ask(id);
    this.draw();
  }

  ask(id) {
    const known = this.store.reports.get(id);
    if (this.connection.send({ kind: "process", id })) this.store.reports.set(id, { ...known, state: "asked" });
    this.draw();
  }
}

/** The report of one process, which the kernel makes when it is asked for. */
class ProcessReport {
  constructor(store, onAsk, onClose) {
    this.store = store;
    this.words = h("span", { class: "gmd-as-of", role: "status" });
    this.again = h("button", { class: "gmd-button", type: "button", onclick: () => onAsk(this.id) }, "Refresh");
    this.close = h("button", { class: "gmd-dismiss", type: "button", "aria-label": "Close the report", title: "Close", onclick: onClose }, "×");
    this.report = h("div", { class: "gmd-report" });
    this.element = h("section", { class: "gmd-process-report", "aria-label": "Report of a process" },
      h("div", { class: "gmd-process-report-head" }, this.words, this.again, this.close), this.report);
  }

  draw(id) {
    this.id = id;
    this.element.hidden = id === null;
    const known = this.store.reports.get(id);
    const time = known?.wall_s ? `As of ${formatTime(known.wall_s)}.` : "";
    const words = { failed: `It could not be made: ${known?.message}`, done: time, asked: time || "Making its report…" };
    setText(this.words, words[known?.state] ?? "");
    this.words.dataset.state = known?.state ?? "";
    this.again.disabled = known?.state === "asked";
    if (this.drawn === known?.html) return;
    this.drawn = known?.html;
    // Made in the kernel, which escapes what comes from elsewhere.
    this.report.innerHTML = known?.html ?? "";
  }
}

// -- Facts as text and as parts: what the unit tests hold ------------------------------------------

/** Return the groups of rows: a GPU with its processes, or the processes of a host without a GPU. */
export function listGroups(hosts) {
  const group = (host, gpu, own, name) => {
    const key = `${host.host} ${name}`;
    const rows = own.map((row, i) => ({ ...row, gpu, key: `${key} ${row.id}`, look: gpu ? `k${i % N_COLORS}` : null }));
    return { host, gpu, key, rows };
  };
  return hosts.flatMap((host) => [
    ...host.gpus.map((gpu, i) => group(host, gpu, gpu.rows, gpu.uuid ?? `gpu ${i}`)),
    ...(host.rows.length ? [group(host, null, host.rows, "no GPU")] : []),
  ]);
}

/** Return a GPU's memory in parts: each process, other recorded ones, all others, what nobody has. */
export function gpuParts({ rows, others, unlisted, used, free, total }) {
  const parts = rows.map(({ name, taken }, i) => ({ look: `k${i % N_COLORS}`, label: name, bytes: taken ?? 0 }));
  parts.push({ look: "unlisted", label: "recorded processes without a row", bytes: unlisted });
  parts.push({ look: "others", label: "others", bytes: others ?? 0 });
  // The figures of two processes are of different moments: they may add up to more than is in use.
  const taken = parts.reduce((sum, { bytes }) => sum + bytes, 0);
  parts.push(...unusedParts({ used, free, total }, Math.max(0, taken - used)));
  return parts.filter(({ bytes }) => bytes > 0);
}

/** Return a line through points in percent, and the area below it, as paths of an SVG.
 *
 * Where a point is unknown the line is broken. The newest point is at the right end. */
export function linePaths(points, { width, height }) {
  const step = width / 59;
  const stretches = [];
  let last = null;
  points.forEach((percent, i) => {
    if (percent === null) {
      last = null;
      return;
    }
    if (!last) stretches.push((last = []));
    // Half a stroke of room above and below.
    last.push([(width - (points.length - 1 - i) * step).toFixed(1), (height - 1 - (height - 2) * percent / 100).toFixed(1)]);
  });
  const draw = (stretch) => `M${stretch.map((point) => point.join(" ")).join("L")}`;
  return {
    // A single point is drawn as a short line.
    stroke: stretches.map((stretch) => draw(stretch) + (stretch.length === 1 ? "h0.5" : "")).join(""),
    area: stretches.map((stretch) => `${draw(stretch)}V${height}H${stretch[0][0]}Z`).join(""),
  };
}

/** What stands out, and what can't be read, a line each. */
export function listNotes(processes) {
  if (!processes) return [];
  const lines = processes.skews.map(({ words }) => words);
  if (processes.n_more_skews) lines.push(`${processes.n_more_skews} more processes are well above the median.`);
  lines.push(...processes.unread.map((why) => `${why}.`));
  if (processes.n_more_unread) lines.push(`${processes.n_more_unread} more files can't be read.`);
  return lines;
}

export function summaryText({ n_processes: nProcesses, n_hosts: nHosts, hosts }) {
  const nGpus = addHosts(hosts).n_gpus;
  const count = (n, noun, nouns = `${noun}s`) => `${n} ${n === 1 ? noun : nouns}`;
  return `${count(nProcesses, "process", "processes")} on ${count(nHosts, "host")}${nGpus ? ` with ${count(nGpus, "GPU")}` : ""}`;
}

/** Return what is counted of each host, of all of them. */
function addHosts(hosts) {
  const total = { silent_since: null };
  for (const field of ["n_gpus", "n_lost", "n_failed", "n_ooms"]) {
    total[field] = hosts.reduce((sum, host) => sum + host[field], 0);
  }
  return total;
}

/** Return the beginning and the end of a UUID, by which the GPUs of a host differ: ``GPU-1a2b…9c0d``. */
export function shortenUuid(uuid) {
  return uuid.length > 14 ? `${uuid.slice(0, 8)}…${uuid.slice(-4)}` : uuid;
}

export function hostText({ n_processes: nProcesses, n_gpus: nGpus, gpu_name: name, used, total }) {
  const parts = [`${nProcesses} ${nProcesses === 1 ? "process" : "processes"}`];
  if (nGpus) parts.push(name ? `${nGpus} × ${name}` : `${nGpus} GPUs`);
  if (nGpus && used !== null && total) parts.push(formatOf(used, total));
  return parts.join(" · ");
}

/** Return what is wrong on a host, in words. */
export function troubleText({ n_lost: lost, n_failed: failed, n_ooms: ooms, silent_since: since }) {
  const parts = [];
  if (since !== null) parts.push(`no word since ${formatTime(since)}`);
  else if (lost) parts.push(`${lost} lost`);
  if (failed) parts.push(`${failed} failed`);
  if (ooms) parts.push(`${ooms} out of memory`);
  return parts.join(" · ");
}

function sinceText({ status, silent_since: since, running_s: runningS }) {
  if (status === "lost" || (status === "running" && since !== null)) return `silent since ${formatTime(since)}`;
  if (status !== "running") return `at ${formatTime(since)}`;
  return runningS === null ? "" : formatElapsed(runningS);
}
