// The variables and what each holds, with the one button that releases those that are ticked.
//
// What a set of names frees is computed in the kernel, for exactly this set: names that share a
// storage free it only together, so the rows can't be added up here.

const SETTLE_MS = 150;
// A question that is answered sooner needs no word of it.
const PATIENT_MS = 500;

class VariablesPanel {
  constructor(store, view) {
    this.store = store;
    this.view = view;
    this.ticked = new Set();
    this.sum = null;
    this.asked = null;
    this.sumIsStale = false;
    this.releaseId = null;
    this.waiting = false;
    this.filter = "";
    this.table = new OwnersTable(store, view, this);
    this.note = h("p", { class: "gmd-note" });
    this.summary = h("div", { class: "gmd-sum", "aria-live": "polite" });
    this.search = h("input", {
      type: "search", class: "gmd-search", placeholder: "Filter", "aria-label": "Filter by name or path",
      spellcheck: "false", oninput: () => this.setFilter(this.search.value.trim()),
    });
    this.keep = h("input", { type: "checkbox", class: "gmd-keep" });
    this.button = h("button", { class: "gmd-button gmd-primary gmd-release", type: "button", onclick: () => this.release() }, "Release");
    this.refresh = h("button", { class: "gmd-button gmd-refresh", type: "button", onclick: () => this.ask() }, "Refresh");
    this.whole = h("button", {
      class: "gmd-button gmd-account", type: "button", onclick: () => this.takeAccount(),
      title: "Who owns every allocated byte. Looks through all objects, which may take some seconds",
    }, "Full account");
    this.progressWords = h("span");
    // Not read out every second.
    this.progressTime = h("span", { "aria-hidden": "true" });
    this.progress = h("div", { class: "gmd-progress", role: "status", hidden: true }, this.progressWords, this.progressTime);
    this.answer = h("div", { class: "gmd-answer", role: "status", hidden: true });
    this.element = h("div", {},
      h("div", { class: "gmd-actions" },
        this.search,
        this.refresh,
        this.whole,
        this.summary,
        h("label", { class: "gmd-check", title: "Leave copies in host memory under the same names" },
          this.keep, "Keep CPU copies"),
        this.button),
      this.progress,
      this.answer,
      h("div", { class: "gmd-scroll", tabindex: 0, role: "region", "aria-label": "Variables" }, this.table.element),
      this.note);
  }

  get rows() {
    return this.store.variables ? this.store.variables.holdings : [];
  }

  /** Ask the kernel for the list: at once where it is idle, else when the cell ends. */
  ask() {
    this.waiting = true;
    this.store.send({ kind: "variables" });
    this.draw();
  }

  /** Ask for the account of owners; it too waits for a cell's end. */
  takeAccount() {
    const { taking } = this.store;
    if (taking && taking.state !== "failed") return;
    if (!this.store.send({ kind: "account" })) return;
    this.store.taking = { state: this.store.running ? "queued" : "running", since: performance.now() };
    this.draw();
  }

  setFilter(text) {
    this.filter = text;
    this.draw(true);
    clearTimeout(this.filterTimer);
    this.filterTimer = setTimeout(() => this.find(), SETTLE_MS);
  }

  /** Paths that are not open are known to the kernel alone. */
  find() {
    const { account } = this.store;
    if (!account || !this.filter || (account.found && account.found.text === this.filter)) return;
    this.store.send({ kind: "find", key: account.key, text: this.filter });
  }

  changed(kind, message) {
    if (kind === "variables" || (kind === "account" && message.state === "done")) {
      this.waiting = false;
      const names = new Set(this.rows.map((row) => row.name));
      for (const name of this.ticked) if (!names.has(name)) this.ticked.delete(name);
      this.askSum();
      if (kind === "account") this.find();
    } else if (kind === "sum") {
      this.takeSum(message);
    } else if (kind === "release" && this.isOurs(message.id)) {
      this.showRelease(message);
      if (!this.busy) this.store.send({ kind: "seen", id: message.id });
    }
    this.draw(kind !== "sum" && kind !== "release");
  }

  /** A click of ours, or one of a view that is gone: its page may have been loaded anew. */
  isOurs(id) {
    return id === this.releaseId || ![...this.store.views].some((view) => id.startsWith(`${view.id}-`));
  }

  /** Something went wrong in the kernel, perhaps with what was asked for: it can be asked again. */
  giveUp() {
    this.waiting = false;
    this.asked = null;
  }

  tickAll(on, names) {
    for (const name of names) {
      if (on) this.ticked.add(name);
      else this.ticked.delete(name);
    }
    this.askSum();
    this.draw();
  }

  tick(name, on) {
    if (on) this.ticked.add(name);
    else this.ticked.delete(name);
    this.askSum();
    this.draw();
  }

  /** One question at a time: the answer takes a walk through all that the names hold. */
  askSum() {
    this.sum = null;
    this.sumIsStale = true;
    clearTimeout(this.sumTimer);
    this.sumTimer = setTimeout(() => {
      if (this.asked || !this.sumIsStale || !this.ticked.size) return;
      const id = `${this.view.id}-${performance.now()}`;
      if (!this.store.send({ kind: "sum", id, names: [...this.ticked] })) return;
      this.asked = id;
      this.sumIsStale = false;
    }, SETTLE_MS);
  }

  takeSum(message) {
    if (message.id !== this.asked) return;
    this.asked = null;
    if (this.sumIsStale) this.askSum();
    else this.sum = message;
  }

  release() {
    if (!this.ticked.size || this.busy) return;
    this.releaseId = `${this.view.id}-${performance.now()}`;
    const content = {
      kind: "release", id: this.releaseId, names: [...this.ticked], keep: this.keep.checked,
    };
    if (!this.store.send(content)) return;
    // Where a cell is running the kernel may only be able to say so when the cell has ended.
    this.showRelease({ state: this.store.running ? "queued" : "running" });
    this.draw();
  }

  get busy() {
    return this.releaseState === "queued" || this.releaseState === "running";
  }

  showRelease(message) {
    this.releaseState = message.state;
    const texts = {
      queued: "Queued: the release waits for the cell's end.",
      running: "Releasing…",
      failed: message.message,
    };
    const dismiss = h("button", {
      class: "gmd-dismiss", type: "button", "aria-label": "Dismiss", title: "Dismiss",
      onclick: () => {
        this.answer.hidden = true;
        this.button.focus();
      },
    }, "×");
    const body = h("div", { class: "gmd-answer-body" });
    if (message.state === "done") body.innerHTML = message.html;
    else body.textContent = texts[message.state];
    this.answer.dataset.state = message.state;
    this.answer.replaceChildren(body, ...(this.busy ? [] : [dismiss]));
    this.answer.hidden = false;
    if (message.state === "done" && message.id === this.releaseId) {
      this.ticked.clear();
      this.askSum();
    }
  }

  everySecond() {
    this.drawProgress();
  }

  draw(anew = false) {
    const over = Boolean(this.store.over);
    const { variables, account } = this.store;
    const now = [variables, this.view.device, account, account && account.old];
    const fresh = !this.drawnFrom || now.some((each, i) => each !== this.drawnFrom[i]);
    this.drawnFrom = now;
    this.table.draw(anew || fresh);
    this.button.disabled = over || this.busy || this.ticked.size === 0;
    this.keep.disabled = over || this.busy;
    this.refresh.disabled = over || this.waiting;
    this.drawSummary();
    this.drawProgress();
    setText(this.note, this.noteText());
    this.note.hidden = !this.note.textContent;
  }
  noteText() {
    const { variables, account, running } = this.store;
    if (!variables) return running ? "The list is made when the running cell ends." : "Reading the variables…";
    if (this.filter && !this.table.n) return `Nothing here has “${this.filter}” in its name${account ? " or path" : ""}.`;
    const lines = [];
    if (!this.rows.length && !account) lines.push("No variable holds tensors.");
    const more = variables.n_more_holdings;
    if (more) lines.push(`${more} more variables hold less than each of these.`);
    if (account && account.old) lines.push(`What each row owns is as of before the ${running ? "running" : "last"} cell: take the full account anew.`);
    if (account && !account.is_complete) lines.push(`There was too much to look at in ${formatDuration(account.duration_s)}: some of what stands here without a name has one.`);
    if (account && !account.old) lines.push(...account.notes.map((note) => `${note[0].toLocaleUpperCase()}${note.slice(1)}.`));
    if (running && this.waiting) lines.push("As of the last cell's end. The list is made anew when the running cell ends.");
    return lines.join("\n");
  }

  /** How far the account is: at once where it has to wait, else when it takes a while. */
  drawProgress() {
    const { taking, over } = this.store;
    this.whole.disabled = Boolean(over || (taking && taking.state !== "failed"));
    const since = taking ? performance.now() - taking.since : 0;
    const patient = taking && taking.state === "running" && since < PATIENT_MS;
    clearTimeout(this.progressTimer);
    if (patient) this.progressTimer = setTimeout(() => this.drawProgress(), PATIENT_MS - since + 1);
    this.progress.hidden = Boolean(!taking || patient || over);
    if (this.progress.hidden) return;
    this.progress.dataset.state = taking.state;
    const text = {
      queued: "The account waits for the cell's end.",
      running: "Looking through all objects…",
      failed: `The account could not be taken: ${taking.message}`,
    }[taking.state];
    setText(this.progressWords, text);
    setText(this.progressTime, taking.state === "running" ? ` ${formatElapsed(since / 1000)}` : "");
  }

  drawSummary() {
    if (!this.ticked.size) {
      setText(this.summary, this.rows.length ? "Tick what you no longer need." : "");
      return;
    }
    const listed = new Set(this.table.listed);
    const hidden = [...this.ticked].filter((name) => !listed.has(name)).length;
    const count = `${this.ticked.size} ticked${hidden ? ` (${hidden} not shown)` : ""}`;
    if (this.sum && this.sum.error) setText(this.summary, `${count}: ${this.sum.error}`);
    else if (this.sum) {
      const parts = this.sum.frees.map(([device, bytes]) => h("span", {}, h("strong", {}, formatBytes(bytes)), ` on ${device}`));
      this.summary.replaceChildren(`${count}: releases `,
        ...(parts.length ? parts.flatMap((part, i) => (i ? [", ", part] : [part])) : ["nothing by itself"]));
    } else setText(this.summary, `${count}: releases at least ${this.lowerBound()}`);
  }

  /** Each row's own share goes in any case; what rows share can only add to it. */
  lowerBound() {
    const totals = new Map();
    for (const row of this.rows.filter((r) => this.ticked.has(r.name))) {
      for (const [device, bytes] of row.frees) totals.set(device, (totals.get(device) || 0) + bytes);
    }
    return [...totals].map(([d, bytes]) => `${formatBytes(bytes)} on ${d}`).join(", ") || formatBytes(0);
  }
}
