// The variables and what each holds, with the one button that releases those that are ticked.
//
// What a set of names frees is computed in the kernel, for exactly this set: names that share a
// storage free it only together, so the rows can't be added up here.

const SETTLE_MS = 150;

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
    this.body = h("tbody");
    this.all = h("input", { type: "checkbox", "aria-label": "Tick all", onchange: () => this.tickAll() });
    this.table = h(
      "table",
      { class: "gmd-table gmd-variables" },
      h("caption", { class: "gmd-hidden" }, "Variables that hold memory, biggest first"),
      h("thead", {}, h("tr", {},
        h("th", { scope: "col", class: "gmd-tick" }, this.all),
        h("th", { scope: "col", class: "gmd-wide" }, "Name"),
        h("th", { scope: "col", class: "gmd-detail" }, "Kind"),
        h("th", { scope: "col", class: "gmd-detail" }, "Shape"),
        h("th", { scope: "col", class: "gmd-detail" }, "Dtype"),
        h("th", { scope: "col", class: "gmd-number", title: "Bytes of the distinct storages that it reaches" }, "Holds"),
        h("th", { scope: "col", class: "gmd-number", title: "What goes away if this row alone is released" }, "Frees"),
      )),
      this.body,
    );
    this.note = h("p", { class: "gmd-note" });
    this.summary = h("div", { class: "gmd-sum", "aria-live": "polite" });
    this.keep = h("input", { type: "checkbox", class: "gmd-keep" });
    this.button = h("button", { class: "gmd-button gmd-primary gmd-release", type: "button", onclick: () => this.release() }, "Release");
    this.refresh = h("button", { class: "gmd-button gmd-refresh", type: "button", onclick: () => this.ask() }, "Refresh");
    this.answer = h("div", { class: "gmd-answer", role: "status", hidden: true });
    this.element = h("div", {},
      h("div", { class: "gmd-actions" },
        this.summary,
        h("label", { class: "gmd-check", title: "Leave copies in host memory under the same names" },
          this.keep, "Keep CPU copies"),
        this.refresh,
        this.button),
      this.answer,
      h("div", { class: "gmd-scroll", tabindex: 0 }, this.table),
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

  changed(kind, message) {
    if (kind === "variables") {
      this.waiting = false;
      const names = new Set(this.rows.map((row) => row.name));
      for (const name of this.ticked) if (!names.has(name)) this.ticked.delete(name);
      this.askSum();
    } else if (kind === "sum") {
      this.takeSum(message);
    } else if (kind === "release" && message.id === this.releaseId) {
      this.showRelease(message);
    }
    this.draw();
  }

  /** Something went wrong in the kernel, perhaps with what was asked for: it can be asked again. */
  giveUp() {
    this.waiting = false;
    this.asked = null;
  }

  tickAll() {
    this.ticked = new Set(this.all.checked ? this.rows.map((row) => row.name) : []);
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
    if (message.state === "done") {
      this.ticked.clear();
      this.askSum();
    }
  }

  draw() {
    const over = Boolean(this.store.over);
    const rows = this.rows;
    if (this.drawnFrom !== this.store.variables) {
      this.drawnFrom = this.store.variables;
      const focused = this.body.contains(document.activeElement) && document.activeElement.value;
      this.body.replaceChildren(...rows.map((row) => this.row(row)));
      const again = focused && [...this.body.querySelectorAll("input")].find((i) => i.value === focused);
      if (again) again.focus();
    }
    for (const input of this.body.querySelectorAll("input")) {
      input.checked = this.ticked.has(input.value);
      input.closest("tr").toggleAttribute("data-ticked", input.checked);
      input.disabled = over;
    }
    this.all.checked = rows.length > 0 && this.ticked.size === rows.length;
    this.all.indeterminate = this.ticked.size > 0 && this.ticked.size < rows.length;
    this.all.disabled = over || !rows.length;
    this.table.hidden = rows.length === 0;
    this.button.disabled = over || this.busy || this.ticked.size === 0;
    this.keep.disabled = over || this.busy;
    this.refresh.disabled = over || this.waiting;
    this.drawSummary();
    const running = Boolean(this.store.running);
    const note = !this.store.variables
      ? running ? "The list is made when the running cell ends." : "Reading the variables…"
      : !rows.length ? "No variable holds tensors."
      : running && this.waiting ? "As of the last cell's end. The list is made anew when the running cell ends."
      : "";
    setText(this.note, note);
    this.note.hidden = !note;
  }

  drawSummary() {
    if (!this.ticked.size) {
      setText(this.summary, this.rows.length ? "Tick what you no longer need." : "");
      return;
    }
    const count = `${this.ticked.size} ticked`;
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

  row(holding) {
    const many = holding.held.length > 1 || new Set(this.rows.flatMap((r) => r.held.map(([d]) => d))).size > 1;
    const figures = (pairs, mark = "") => pairs.length
      ? pairs.map(([device, bytes]) => h("div", {},
        many ? h("span", { class: "gmd-tag" }, device) : null, mark + formatBytes(bytes)))
      : mark + formatBytes(0);
    const shape = holding.shape ? (holding.shape.length ? holding.shape.join(" × ") : "scalar") : "";
    const detail = [holding.kind, shape, holding.dtype || ""].filter(Boolean).join(" · ");
    const shared = sharedText(holding);
    const id = `${this.view.id}-${holding.name}`;
    return h("tr", {},
      h("td", { class: "gmd-tick" }, h("input", {
        type: "checkbox", id, value: holding.name,
        onchange: (event) => this.tick(holding.name, event.target.checked),
      })),
      h("th", { scope: "row", class: "gmd-wide" },
        h("label", { for: id, class: holding.root === "name" ? "gmd-name" : "gmd-name gmd-hold" }, holding.name),
        h("div", { class: "gmd-inline-detail" }, detail),
        shared ? h("div", { class: "gmd-shared", title: shared }, shared) : null),
      h("td", { class: "gmd-detail", title: holding.type_name }, holding.kind),
      h("td", { class: "gmd-detail gmd-shape" }, shape),
      h("td", { class: "gmd-detail" }, holding.dtype || ""),
      h("td", { class: "gmd-number" }, figures(holding.held, holding.is_at_least ? "≥ " : "")),
      h("td", { class: "gmd-number gmd-frees" }, figures(holding.frees)));
  }
}

function sharedText(holding) {
  const most = 3;
  const names = holding.shared_with.slice(0, most).join(", ");
  const more = holding.shared_with.length - most;
  const parts = [];
  if (names) parts.push(`shared with ${names}${more > 0 ? ` and ${more} more` : ""}`);
  if (holding.held_elsewhere) parts.push(names ? "and held elsewhere" : "also held elsewhere");
  return parts.join(", ");
}
