// The variables and what each holds, with the one button that releases those that are ticked.
//
// The bytes that a set of names frees are computed in the kernel, for exactly this set: names that share a
// storage free it only together, so the rows can't be added up here.

import { formatAmounts, formatDuration, formatElapsed, formatTime } from "./format.js";
import { h, setText } from "./html.js";
import { OwnersTable, jointText } from "./owners.js";

const SETTLE_MS = 150;
// A question that is answered sooner needs no word of it.
const PATIENT_MS = 500;

function isOnGpu(row) {
  return row.held_bytes.by_device.some(([device]) => device !== "host");
}

export class VariablesPanel {
  constructor(connection, choices, id) {
    this.connection = connection;
    this.store = connection.store;
    this.choices = choices;
    this.id = id;
    this.ticks = new Set();
    this.sum = null;
    this.asked = null;
    this.sumIsStale = false;
    // The question whose answer stands below the buttons.
    this.askedId = null;
    this.waiting = false;
    this.filter = choices.preferences.recall("filter", (text) => typeof text === "string", "");
    this.table = new OwnersTable(connection, choices, this.ticks, {
      id, onTick: (names, on) => this.tick(names, on), onOpen: () => this.takeAccount(), onChange: () => this.draw(true), onWhy: (name) => this.askWhy(name),
    });
    this.table.filter = this.filter;
    this.note = h("p", { class: "gmd-note" });
    this.summary = h("div", { class: "gmd-sum", "aria-live": "polite" });
    this.search = h("input", {
      type: "search", class: "gmd-search", value: this.filter, placeholder: "Filter", "aria-label": "Filter by name or path",
      spellcheck: "false", oninput: () => this.setFilter(this.search.value.trim()),
    });
    this.keep = h("input", { type: "checkbox", class: "gmd-keep", onchange: () => this.tick([], true) });
    this.keepLabel = h("label", { class: "gmd-check", title: "Leave copies in host memory under the same names" },
      this.keep, "Keep CPU copies");
    this.button = h("button", { class: "gmd-button gmd-primary gmd-release", type: "button", onclick: () => this.release(false) }, "Release");
    this.confirm = h("div", { class: "gmd-confirm", role: "group", "aria-label": "Confirm the release", hidden: true, onkeydown: (event) => {
      if (event.key === "Escape") this.setQuestion(false);
    } });
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
        this.keepLabel, this.button, this.confirm),
      this.progress,
      this.answer,
      h("div", { class: "gmd-scroll", tabindex: 0, role: "region", "aria-label": "Variables" }, this.table.element),
      this.note);
  }

  /** Ask the kernel for the list: at once where it is idle, else when the cell ends. */
  ask() {
    this.waiting = true;
    this.connection.send({ kind: "variables" });
    this.draw();
  }

  /** Ask for the account of owners; it too waits for a cell's end. */
  takeAccount() {
    const { taking } = this.store;
    if (taking && taking.state !== "failed") return;
    if (!this.connection.send({ kind: "account" })) return;
    this.store.taking = { state: this.store.running ? "queued" : "running", since: performance.now() };
    this.draw();
  }

  setFilter(text) {
    this.filter = this.table.filter = text;
    this.choices.preferences.remember("filter", text);
    this.draw(true);
    clearTimeout(this.filterTimer);
    this.filterTimer = setTimeout(() => this.find(), SETTLE_MS);
  }

  /** Paths that are not open are known to the kernel alone. */
  find() {
    const { account } = this.store;
    if (!account || !this.filter || (account.found && account.found.text === this.filter)) return;
    this.connection.send({ kind: "find", key: account.key, text: this.filter });
  }

  changed(kind, message) {
    if (kind === "variables" || (kind === "account" && message.state === "done")) {
      this.waiting = false;
      this.keepTicks(this.store.rows.map((row) => row.name));
      if (kind === "account") this.find();
    } else if (kind === "sum") {
      this.takeSum(message);
    } else if ((kind === "release" || kind === "why") && message.id === this.askedId) {
      this.showAnswer(message);
    }
    this.draw(!["sum", "why", "release"].includes(kind));
  }

  /** Something went wrong in the kernel, perhaps with what was asked for: it can be asked again. */
  giveUp() {
    this.waiting = false;
    this.asked = null;
  }

  tick(names, on) {
    for (const name of names) {
      if (on) this.ticks.add(name);
      else this.ticks.delete(name);
    }
    this.askSum();
    this.draw();
  }

  /** Untick what is not listed any more. */
  keepTicks(names) {
    this.tick([...this.ticks].filter((name) => !names.includes(name)), false);
  }

  /** One question at a time: the answer takes a walk through all that the names hold. */
  askSum() {
    this.setQuestion(false);
    this.sum = null;
    this.sumIsStale = true;
    this.sendSumSoon();
  }

  sendSumSoon() {
    clearTimeout(this.sumTimer);
    this.sumTimer = setTimeout(() => {
      if (this.asked || !this.sumIsStale || !this.ticks.size) return;
      const id = `${this.id}-${performance.now()}`;
      if (!this.connection.send({ kind: "sum", id, names: [...this.ticks], keep: this.keeps })) return;
      this.asked = id;
      this.sumIsStale = false;
    }, SETTLE_MS);
  }

  takeSum(message) {
    if (message.id !== this.asked) return;
    this.asked = null;
    if (this.sumIsStale) this.sendSumSoon();
    else this.sum = message;
  }

  get tickedRows() {
    return this.store.rows.filter((row) => this.ticks.has(row.name));
  }

  /** True where CPU copies are wanted, and something that is ticked can leave a GPU for one. */
  get keeps() {
    return this.keep.checked && this.tickedRows.some(isOnGpu);
  }

  /** The ticked rows with which a module or an optimizer would be lost: CPU copies keep it. */
  get training() {
    if (this.keeps) return [];
    return this.tickedRows.filter((row) => row.holds_training_state).map((row) => row.name);
  }

  /** Open or close the question that stands in the button's place. */
  setQuestion(on) {
    const wasOpen = !this.confirm.hidden;
    this.confirm.hidden = !on;
    this.button.hidden = on;
    if (on) {
      const names = this.training;
      const some = names.length > 4 ? [...names.slice(0, 3), `${names.length - 3} more`] : names;
      const n = this.ticks.size;
      const what = n === names.length ? some.join(", ") : `${n} names incl. ${some.join(", ")}`;
      const cancel = h("button", { class: "gmd-button gmd-cancel", type: "button", onclick: () => this.setQuestion(false) }, "Cancel");
      this.confirm.replaceChildren(
        h("span", {}, `Release ${what}? This loses training state.`),
        h("span", { class: "gmd-choice" },
          h("button", { class: "gmd-button gmd-primary gmd-confirmed", type: "button", onclick: () => this.release(true) }, "Release"), cancel));
      cancel.focus();
    } else if (wasOpen && this.confirm.contains(document.activeElement)) this.button.focus();
  }

  release(isConfirmed = false) {
    if (!this.ticks.size || this.busy) return;
    if (!isConfirmed && this.training.length) {
      this.setQuestion(true);
      return;
    }
    this.setQuestion(false);
    this.askFor({ kind: "release", names: [...this.ticks], keep: this.keeps });
  }

  /** Ask what holds the memory of a name. */
  askWhy(name) {
    if (!this.busy) this.askFor({ kind: "why", name });
  }

  /** Ask the kernel for what is answered below the buttons. */
  askFor(content) {
    this.askedId = `${this.id}-${performance.now()}`;
    if (!this.connection.send({ ...content, id: this.askedId })) return;
    // A busy kernel may be unable to answer before its cell has ended.
    this.showAnswer({ kind: content.kind, state: this.store.running ? "queued" : "running" });
    this.draw();
  }

  get busy() {
    return this.answerState === "queued" || this.answerState === "running";
  }

  showAnswer(message) {
    this.answerState = message.state;
    const isRelease = message.kind === "release";
    const working = isRelease ? "Releasing" : "Looking for what holds it";
    const texts = {
      queued: `Queued: ${isRelease ? "the release" : "the answer"} waits for the cell's end.`,
      running: message.progress ? `${working}. ${message.progress}…` : `${working}…`,
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
    if (message.state === "done" && isRelease) this.keepTicks([]);
  }

  everySecond() {
    this.drawProgress();
  }

  draw(anew = false) {
    const over = Boolean(this.connection.over);
    const { variables, account } = this.store;
    const now = [variables, this.choices.device, account, account && account.old];
    const fresh = !this.drawnFrom || now.some((each, i) => each !== this.drawnFrom[i]);
    this.drawnFrom = now;
    this.table.draw(anew || fresh);
    this.button.disabled = over || this.busy || this.ticks.size === 0;
    this.keep.disabled = over || this.busy;
    this.keepLabel.hidden = !this.tickedRows.some(isOnGpu);
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
    if (!this.store.rows.length && !account) lines.push("No variable holds tensors.");
    const more = variables.n_more_variables;
    if (more) lines.push(`${more} more variables hold less than each of these.`);
    if (account && account.old) lines.push(`What each row owns is as of ${formatTime(account.at_s)}. Full account counts it anew.`);
    if (account && !account.is_complete) lines.push(`There was too much to look at in ${formatDuration(account.duration_s)}: some of what stands here without a name has one.`);
    if (account && !account.old) lines.push(...account.notes.map((note) => `${note[0].toLocaleUpperCase()}${note.slice(1)}.`));
    if (running && this.waiting) lines.push("As of the last cell's end. The list is made anew when the running cell ends.");
    return lines.join("\n");
  }

  /** How far the account is: at once where it has to wait, else when it takes a while. */
  drawProgress() {
    const { over } = this.connection;
    const { taking } = this.store;
    this.whole.disabled = Boolean(over || (taking && taking.state !== "failed"));
    const since = taking ? performance.now() - taking.since : 0;
    this.progress.hidden = Boolean(!taking || over || (taking.state === "running" && !taking.progress && since < PATIENT_MS));
    if (this.progress.hidden) return;
    this.progress.dataset.state = taking.state;
    const text = {
      queued: "The account waits for the cell's end.",
      running: `${taking.progress ?? "Looking through all objects"}…`,
      failed: `The account could not be taken: ${taking.message}`,
    }[taking.state];
    setText(this.progressWords, text);
    setText(this.progressTime, taking.state === "running" ? ` ${formatElapsed(since / 1000)}` : "");
  }

  drawSummary() {
    if (!this.ticks.size) {
      setText(this.summary, this.store.rows.length ? "Tick what you no longer need." : "");
      return;
    }
    const listed = new Set(this.table.listed);
    const hidden = [...this.ticks].filter((name) => !listed.has(name)).length;
    const count = `${this.ticks.size} ticked${hidden ? ` (${hidden} not shown)` : ""}`;
    if (!this.sum || this.sum.error) setText(this.summary, `${count}: ${this.sum?.error ?? "counting what that releases…"}`);
    else {
      const joint = jointText(this.sum.joint, this.ticks, (names) => this.tick(names, true));
      const stays = this.keeps && !this.tickedRows.every(isOnGpu);
      this.summary.replaceChildren(`${count}: releases `, h("strong", {}, formatAmounts(this.sum.frees_bytes) || "nothing by itself"),
        stays ? "; host rows: nothing to move" : "",
        ...(joint.length ? [". ", ...joint] : []));
    }
  }
}
