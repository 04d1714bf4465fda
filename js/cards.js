// The buttons of the cards that stand below an OOM. The cards are static HTML and stay that, in the
// page and in the saved notebook: this puts buttons into those that it finds, by their class, for as
// long as the kernel that made them is there.

import { h, setText } from "./html.js";
import { hear } from "./incoming.js";

const STYLE = `
.gmw-do { appearance: none; background: none; border: 1px solid currentColor; border-radius: 4px; box-sizing: border-box;
  color: var(--jp-brand-color1, #3b82d6); cursor: pointer; font: 600 12px/18px var(--jp-ui-font-family, system-ui, sans-serif);
  height: 20px; margin: 0 12px 0 0; padding: 0 10px; vertical-align: middle; white-space: nowrap; }
.gmw-cd .gmw-do { margin: -3px 12px -3px 0; }
.gmw-do:hover:not(:disabled) { background: rgba(59, 130, 214, 0.14); }
.gmw-do:focus-visible { outline: 2px solid currentColor; outline-offset: 1px; }
.gmw-do:disabled { border-color: transparent; color: inherit; cursor: default; opacity: 0.6; padding-left: 0; }
.gmw-ask { font-weight: 600; margin: 0 10px 0 0; }
.gmw-said { line-height: 1.45; }
.gmw-said p { font-size: 12px; margin: 1px 0 2px !important; overflow-wrap: anywhere; }
`;
const BUSY = ["queued", "running"];
const VERBS = { release: ["Release", "Releasing…", "Released"], give: ["Give back", "Giving back…", "Given back"], save: ["Save", "Saving…", "Saved"] };
const LABELS = { failed: () => "Try again", gone: () => "No longer there", running: (verb) => verb[1], done: (verb) => verb[2] };
const WAITS = "Waits until the running cell has ended.";

/** The live cards of one kernel, wherever the page shows them. */
class Cards {
  constructor(model) {
    this.model = model;
    this.states = {}; // For each card, by its class, its buttons.
    this.asking = null; // The button whose question stands open: what it does can't be undone.
    this.rows = new Map(); // For each card in the page its rows, by their place.
    this.asked = new Set(); // Clicks that the kernel has not answered.
    // A card may be drawn late, again, or in a second view of the notebook.
    this.observer = new MutationObserver(() => this.find());
    this.observer.observe(document.body, { childList: true, subtree: true });
    const take = (message) => {
      if (!message.cards) return;
      this.states = message.cards;
      this.draw();
    };
    this.unhear = hear(model, take, (question) => this.send(question));
    // A model may also come out of a saved notebook: only a kernel that answers makes buttons.
    this.send({ kind: "hello" });
  }

  send(message) {
    try {
      this.model.send(message);
    } catch (error) {
      console.warn("[gpumemwidget]", error);
      this.end();
    }
  }

  find() {
    const known = [...this.rows.keys()];
    const there = Object.keys(this.states).flatMap((name) => [...document.getElementsByClassName(name)]);
    if (there.some((card) => !this.rows.has(card)) || known.some((card) => !card.isConnected)) this.draw();
  }

  draw() {
    for (const card of [...this.rows.keys()]) {
      if (!card.isConnected || ![...card.classList].some((name) => name in this.states)) this.forget(card);
    }
    for (const [name, ways] of Object.entries(this.states)) {
      for (const card of document.getElementsByClassName(name)) {
        if (!this.rows.has(card)) this.build(card);
        ways.forEach((way, place) => this.drawWay(card, name, way, place));
      }
    }
  }

  build(card) {
    const style = h("style", {}, STYLE);
    card.append(style);
    this.rows.set(card, { style, ways: new Map() });
  }

  drawWay(card, name, way, place) {
    const { ways } = this.rows.get(card);
    if (!ways.has(place)) {
      const cell = card.querySelectorAll(".gmw-out tbody tr")[way.row]?.lastElementChild;
      if (!cell) return;
      const button = h("button", { class: "gmw-do", type: "button", "data-lm-suppress-shortcuts": "true", onclick: () => this.click(name, place) });
      const cancel = way.question && h("button", { class: "gmw-do", type: "button", "data-lm-suppress-shortcuts": "true", hidden: true, onclick: () => this.ask(null) }, "Cancel");
      const question = way.question && h("span", { class: "gmw-ask", hidden: true }, way.question);
      const said = h("div", { class: "gmw-said", role: "status" });
      const command = cell.querySelector(".gmw-cd");
      const line = command ?? h("div", { class: "gmw-cd" });
      if (!command) cell.append(line);
      const added = [question, button, cancel].filter(Boolean);
      line.prepend(...added);
      cell.append(said);
      ways.set(place, { button, cancel, question, said, added: command ? [...added, said] : [line, said] });
    }
    const key = `${name} ${place}`;
    if (way.state !== "ready" && way.state !== "failed") this.asked.delete(key);
    const isAsked = this.asked.has(key);
    const state = isAsked ? (this.isBusy ? "queued" : "running") : way.state;
    const { button, cancel, question, said } = ways.get(place);
    const isOpen = this.asking === key && !["queued", "running", "done", "gone"].includes(state);
    const verb = VERBS[way.act];
    setText(button, (!isOpen && LABELS[state]?.(verb)) || verb[0]);
    if (question) question.hidden = cancel.hidden = !isOpen;
    button.disabled = BUSY.includes(state) || state === "done" || state === "gone";
    button.dataset.state = state;
    // Until the kernel answers a click, its older words are not shown.
    const lines = state === "queued" ? [WAITS] : isAsked ? [] : way.lines;
    const text = lines.join("\n");
    if (said.dataset.text === text && said.dataset.state === state) return;
    said.dataset.text = text;
    said.dataset.state = state;
    const tone = { failed: "gmw-bad", queued: "gmw-m", running: "gmw-m", gone: "gmw-m" }[state];
    said.replaceChildren(...lines.map((line, index) => h("p", { class: index ? "gmw-m" : tone }, line)));
    // JupyterLab's extension (labextension/src/index.ts) runs the cell. A view of the output alone has none.
    if (!way.has_room || !("gmlRunsCells" in document.body.dataset) || !card.closest(".jp-Notebook .jp-Cell")) return;
    const run = () => said.dispatchEvent(new CustomEvent("gpumemwidget:run-cell", { bubbles: true }));
    said.append(h("button", { class: "gmw-do", type: "button", "data-lm-suppress-shortcuts": "true", onclick: run }, "Run the cell again"));
  }

  /** JupyterLab knows whether its kernel is at work; then a click waits in the kernel's queue. */
  get isBusy() {
    return this.model.widget_manager?.kernel?.status === "busy";
  }

  click(name, place) {
    const key = `${name} ${place}`;
    if (this.asked.has(key)) return;
    if (this.states[name]?.[place]?.question && this.asking !== key) {
      this.ask(key);
      return;
    }
    this.asking = null;
    this.asked.add(key);
    this.draw();
    this.send({ kind: "do", card: name, way: place });
  }

  /** Open the question of one button, or close the one that is open. */
  ask(key) {
    this.asking = key;
    this.draw();
  }

  forget(card) {
    const { style, ways } = this.rows.get(card);
    style.remove();
    for (const { added } of ways.values()) for (const element of added) element.remove();
    this.rows.delete(card);
  }

  /** The kernel is gone, or the extension is: the cards are what they were. */
  end() {
    this.observer.disconnect();
    this.unhear();
    for (const card of [...this.rows.keys()]) this.forget(card);
  }
}

/** anywidget calls this once for each model. */
export default () => ({
  initialize({ model }) {
    const cards = new Cards(model);
    const end = () => cards.end();
    model.on("comm:close", end);
    model.on("comm_live_update", end);
    // The only word that comes when a kernel dies.
    const kernel = model.widget_manager?.kernel;
    const follow = (_, status) => {
      if (["restarting", "autorestarting", "dead", "terminating"].includes(status)) end();
    };
    kernel?.statusChanged?.connect(follow);
    return () => {
      kernel?.statusChanged?.disconnect(follow);
      end();
    };
  },
});
