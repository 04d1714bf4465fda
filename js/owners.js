// The table of what holds memory: the user's names, each of which can be opened once there is an
// account of owners, and below them what is no variable's, so that the whole adds up to what is
// allocated.

import { UNKNOWN, formatAmounts, formatBytes, markOf } from "./format.js";
import { h } from "./html.js";
import { Table } from "./table.js";

const NATURAL = new Intl.Collator(undefined, { numeric: true });
// Kinds of rows without parts: before there is an account only their kind is known.
const PLAIN_KINDS = new Set(["tensor", "view", "parameter"]);

// Columns that sort the rows.
const SORTS = ["name", "owns", "bytes", "frees"];

export class OwnersTable {
  /** ``id`` begins the ids of its elements. ``onTick`` is called with names, and whether to tick them,
   * ``onOpen`` is called for rows that only an account can
   * open, ``onChange`` when the table is to be drawn anew, ``onWhy`` with the name of which somebody
   * asks what holds it. */
  constructor(connection, choices, ticks, { id, onTick, onOpen, onChange, onWhy }) {
    this.connection = connection;
    this.store = connection.store;
    this.choices = choices;
    this.ticks = ticks;
    this.id = id;
    this.onTick = onTick;
    this.onOpen = onOpen;
    this.onChange = onChange;
    this.onWhy = onWhy;
    // Text that a name or a path must contain.
    this.filter = "";
    // By what stands in them from the top, so that they stay open in the next account.
    this.opened = new Set();
    const sort = choices.preferences.recall("sort", (kept) => SORTS.includes(kept?.by) && typeof kept.down === "boolean", { by: "owns", down: true });
    this.foot = h("tfoot");
    this.all = h("input", { type: "checkbox", "aria-label": "Tick all that hold no training state", title: "Tick all that are listed, but for modules, optimizers and what holds them", onchange: () => onTick(this.all.checked ? this.harmless : this.listed, this.all.checked) });
    const number = (by, label, title, look) => ({ by, label, title, class: `gmd-number ${look}` });
    this.table = new Table("gmd-variables", "What holds memory", [
      { label: this.all, class: "gmd-tick" },
      { by: "name", label: "Name", class: "gmd-wide" },
      { label: "Kind", class: "gmd-detail" },
      number("owns", "Owns", "Each byte once, in the row whose path leads to it best: the column adds up to what is allocated", "gmd-owns"),
      number("bytes", "Reaches", "All that it reaches: what rows share counts in each of them", "gmd-holds"),
      number("frees", "Frees", "What goes away if this row alone is released", "gmd-frees"),
    ], sort, () => {
      choices.preferences.remember("sort", this.table.sort);
      onChange();
    });
    this.element = this.table.element;
    this.element.setAttribute("role", "treegrid");
    this.element.append(this.foot);
    // The rows that can be ticked, as they are listed now.
    this.listed = [];
    // Names that the head's box ticks: rows with training state are ticked one by one.
    this.harmless = [];
  }

  /** Without an account there is no such column: what each holds decides. */
  get sortedBy() {
    const { by } = this.table.sort;
    return by === "owns" && !this.account ? "bytes" : by;
  }

  get account() {
    return this.store.account;
  }

  // -- What is listed --------------------------------------------------------------------------------

  /** The rows of the table as plain objects, in order. */
  list() {
    const account = this.account;
    const owners = new Map(account ? account.rows.filter((row) => row.is_variable).map((row) => [row.label, row]) : []);
    const counted = new Set(account ? account.variables.map((variable) => variable.name) : []);
    const items = this.store.rows.map((variable) => {
      const owner = owners.get(variable.name) ?? null;
      // A name of after the account is unknown to it; one that it has no line for owns nothing.
      const owns = owner ? owner.owns : counted.has(variable.name) ? [] : null;
      return { key: `h ${variable.name}`, label: variable.name, level: 0, variable, node: owner, owns };
    });
    const listed = new Set(items.map(({ label }) => label));
    // A name that is gone stands in an old account still.
    const isOther = (row) => !row.is_variable || (!account.old && !listed.has(row.label));
    const others = (account ? account.rows : []).filter(isOther)
      .map((row) => ({ key: `o ${row.label} ${row.remark}`, label: row.label, level: 0, node: row, owns: row.owns }));
    return [...this.choose(this.sorted(items)), ...this.choose(others, account)];
  }

  sorted(items) {
    const by = this.sortedBy;
    const { down } = this.table.sort;
    const weigh = {
      owns: (item) => this.weigh(item.owns || []),
      bytes: (item) => this.weigh(item.variable.held_bytes.by_device),
      frees: (item) => this.weigh(item.variable.frees_bytes.by_device),
    }[by];
    const compare = by === "name"
      ? (a, b) => NATURAL.compare(a.label, b.label)
      : (a, b) => weigh(a)[0] - weigh(b)[0] || weigh(a)[1] - weigh(b)[1];
    return items.sort((a, b) => (down ? compare(b, a) : compare(a, b)));
  }

  /** Return the bytes that decide the order: those on the device in view, or on all GPUs; then all. */
  weigh(pairs) {
    let first = 0;
    let all = 0;
    for (const [device, bytes] of pairs) {
      all += bytes;
      if (this.choices.weighs(device)) first += bytes;
    }
    return [first, all];
  }

  /** Return the rows that the filter lets through, with the opened parts below each. */
  choose(items, others = null) {
    const text = this.filter;
    const found = text && this.account && this.account.found && this.account.found.text === text ? this.account.found : null;
    const list = [];
    for (const item of items) {
      const paths = found && item.node ? found.found.filter((path) => path.row === item.node.node) : [];
      const named = item.label.toLocaleLowerCase().includes(text.toLocaleLowerCase());
      if (text && !named && !paths.length) continue;
      const inside = paths.some((path) => path.label);
      list.push(inside ? { ...item, isFound: true } : item);
      if (inside) {
        for (const path of paths) {
          list.push({ key: `${item.key} ${path.label}`, label: path.label, level: 1, node: { ...path, node: null, has_parts: false }, owns: path.owns });
        }
      } else if (item.node) {
        this.addParts(list, item, 1);
      }
    }
    if (others && found && found.n_more) list.push(this.rest("found", found, 0, null));
    else if (others && others.n_more && !text) list.push(this.rest("rows", others, 0, null));
    if (others && list.length) list.unshift({ key: "others", group: "Held by no variable" });
    return list;
  }

  addParts(list, item, level) {
    const number = item.node.node;
    if (!this.opened.has(item.key) || !item.node.has_parts) return;
    const known = this.account.parts.get(number);
    if (!known) {
      this.askOnce(number);
      list.push({ key: `${item.key} wait`, level, words: "Opening…" });
      return;
    }
    for (const part of known.parts) {
      const own = { key: `${item.key}\n${part.label}`, label: part.label, level, node: part, owns: part.owns };
      list.push(own);
      this.addParts(list, own, level + 1);
    }
    if (known.n_more) list.push(this.rest(`${item.key} more`, known, level, () => this.ask(number, known.parts.length)));
  }

  rest(key, { n_more: count, more }, level, act) {
    return { key, level, owns: more, words: `… ${count} more`, act };
  }

  // -- Opening ---------------------------------------------------------------------------------------

  ask(number, start) {
    this.connection.send({ kind: "parts", key: this.account.key, node: number, start });
  }

  askOnce(number) {
    if (this.account.asked.has(number)) return;
    this.account.asked.add(number);
    this.ask(number, 0);
  }

  /** Without an account the row is opened as soon as there is one. */
  toggle(item, on = !this.opened.has(item.key)) {
    if (on) this.opened.add(item.key);
    else this.opened.delete(item.key);
    if (!item.node) this.onOpen();
    this.onChange();
  }

  canOpen(item) {
    // A found row shows its paths with the filter's text, and no parts.
    if (item.isFound) return false;
    if (item.node) return item.node.has_parts && !this.isEmpty(item.node);
    return Boolean(item.variable) && !this.account && !PLAIN_KINDS.has(item.variable.kind);
  }

  isEmpty(node) {
    const known = this.account.parts.get(node.node);
    return Boolean(known) && !known.parts.length;
  }

  // -- Drawing ---------------------------------------------------------------------------------------

  draw(anew) {
    const account = this.account;
    if (anew) {
      const items = this.list();
      // Names that have to go together are said once, in the first of their rows.
      const said = new Set();
      for (const item of items) {
        const names = item.variable?.joint?.names.toSorted().join();
        item.joint = names && !said.has(names) ? item.variable.joint : null;
        said.add(names);
      }
      this.listed = items.filter((item) => item.variable).map((item) => item.variable.name);
      this.harmless = items.filter((item) => item.variable && !item.variable.holds_training_state).map((item) => item.variable.name);
      const devices = new Set(this.store.rows.flatMap((row) => row.held_bytes.by_device.map(([device]) => device)));
      for (const each of account ? account.devices : []) devices.add(each.device);
      this.hasTags = devices.size > 1;
      this.table.fill(items.map((item) => this.row(item)), this.sortedBy);
      this.drawFoot();
      this.element.toggleAttribute("data-account", Boolean(account));
      this.element.toggleAttribute("data-old", Boolean(account && account.old));
      this.foot.classList.toggle("gmd-sticky", Boolean(account) && account.devices.length < 3);
      this.n = items.length;
    }
    const over = Boolean(this.connection.over);
    const { ticks } = this;
    for (const input of this.table.body.querySelectorAll("input")) {
      input.checked = ticks.has(input.value);
      input.closest("tr").toggleAttribute("data-ticked", input.checked);
      input.disabled = over;
    }
    const n = this.listed.filter((name) => ticks.has(name)).length;
    this.all.checked = n > 0 && this.harmless.every((name) => ticks.has(name));
    this.all.indeterminate = n > 0 && !this.all.checked;
    this.all.disabled = over || !(n || this.harmless.length);
    this.element.hidden = !this.n;
  }

  /** The lines that say that nothing is missing. */
  drawFoot() {
    const account = this.account;
    const show = account && !account.old && !this.filter;
    this.foot.replaceChildren(...(show ? account.devices : []).map(({ device, allocated, sum }) => {
      const known = allocated !== null;
      const words = !known ? `Sum on ${device}` : sum === allocated ? `Sum: all that is allocated on ${device}` : `Sum on ${device}, of ${formatBytes(allocated)} allocated`;
      return h("tr", {}, h("td", { class: "gmd-tick" }), h("th", { scope: "row", class: "gmd-wide" }, words),
        h("td", { class: "gmd-detail" }), h("td", { class: "gmd-number gmd-owns" }, formatBytes(sum)),
        h("td", { class: "gmd-holds" }), h("td", { class: "gmd-frees" }));
    }));
  }

  row(item) {
    if (item.group) return h("tr", { class: "gmd-group" }, h("td", { class: "gmd-tick" }), h("th", { scope: "rowgroup", colspan: 5 }, item.group));
    const { variable, node, level, key } = item;
    const canOpen = this.canOpen(item);
    const isOpen = canOpen && this.opened.has(key);
    const kind = variable ? `${variable.kind} ${shapeText(variable)}`.trim() : node ? kindText(node) : "";
    const owns = item.owns ? this.figures(item.owns, markOf({ is_at_least: this.isLowerBound(item) })) : item.words ? "" : UNKNOWN;
    return h("tr", {
      "data-key": key, "aria-level": level + 1, "aria-expanded": canOpen ? String(isOpen) : null,
      class: item.words ? "gmd-rest" : level ? "gmd-part" : null,
    },
    h("td", { class: "gmd-tick" }, variable ? h("input", {
      type: "checkbox", id: this.idOf(variable), value: variable.name, "data-focus": `tick ${key}`,
      onchange: (event) => this.onTick([variable.name], event.target.checked),
    }) : null),
    h("th", { scope: "row", class: "gmd-wide", style: level ? `padding-left: ${10 + Math.min(level, 8) * 16}px` : null },
      h("div", { class: "gmd-branch" },
        variable || node ? this.opener(item, canOpen, isOpen) : null,
        h("div", { class: "gmd-owner" }, this.name(item),
          node && node.n_alike ? h("span", { class: "gmd-tag" }, alikeText(node)) : null,
          kind ? h("div", { class: "gmd-inline-detail" }, kind) : null,
          ...this.notes(item)))),
    h("td", { class: "gmd-detail", title: variable ? variable.type_name : kind }, kind),
    h("td", { class: "gmd-number gmd-owns" }, owns),
    h("td", { class: "gmd-number gmd-holds" }, variable ? this.figures(variable.held_bytes.by_device, markOf(variable.held_bytes)) : ""),
    h("td", { class: "gmd-number gmd-frees" }, variable ? this.figures(variable.frees_bytes.by_device, markOf(variable.frees_bytes)) : ""));
  }

  idOf(variable) {
    return `${this.id}-${variable.name}`;
  }

  name({ variable, node, level, key, label, words, act }) {
    if (variable) {
      const kind = variable.root === "name" ? "" : " gmd-hold";
      const name = h("label", { for: this.idOf(variable), class: `gmd-name${kind}`, title: label }, label);
      if (kind || this.connection.over) return name;
      return [name, h("button", {
        class: "gmd-link gmd-why", type: "button", "data-focus": `why ${key}`, "aria-label": `Why is ${label} held?`,
        title: "What holds this memory", onclick: () => this.onWhy(variable.name),
      }, "Why?")];
    }
    if (act) return h("button", { class: "gmd-link", type: "button", "data-focus": key, onclick: act }, words);
    return h("span", { class: words || (node && !level) ? "gmd-words" : "gmd-path", title: label }, words ?? label);
  }

  /** Return remarks on a row, a line each. */
  notes({ variable, node, joint: together }) {
    const line = (text, isPath = false) => text
      ? h("div", { class: isPath ? "gmd-shared gmd-path" : "gmd-shared", title: text }, text) : null;
    const joint = variable && !this.connection.over ? jointText(together, this.ticks, (names) => this.onTick(names, true), variable.name) : [];
    const lines = [line(variable ? sharedText(variable) : node ? sharedText({ ...node, n: node.n_sharing }) : "")];
    if (node) {
      lines.unshift(line(node.remark), line(node.hint), line(node.path, Boolean(variable)));
      if (node.allocated_at.length) lines.push(line(`allocated at ${node.allocated_at.join("; ")}`));
    }
    if (joint.length) lines.push(h("div", { class: "gmd-shared" }, joint));
    return lines;
  }

  opener(item, canOpen, isOpen) {
    if (!canOpen) return h("span", { class: "gmd-opener" });
    return h("button", {
      class: "gmd-opener", type: "button", "data-focus": `open ${item.key}`, "aria-expanded": String(isOpen),
      "aria-label": `Parts of ${item.label}`, title: isOpen ? "Close" : "Open",
      onclick: () => this.toggle(item),
      onkeydown: (event) => {
        if (event.key === "ArrowRight" || event.key === "ArrowLeft") this.toggle(item, event.key === "ArrowRight");
      },
    }, isOpen ? "▾" : "▸");
  }

  /** A line for each device. */
  figures(pairs, mark = "") {
    if (!pairs.length) return mark + formatBytes(0);
    return pairs.map(([device, bytes]) => h("div", {}, this.hasTags ? h("span", { class: "gmd-tag" }, device) : null, mark + formatBytes(bytes)));
  }

  /** A search that ran out of time may not have met all that a name leads to. */
  isLowerBound(item) {
    return Boolean(this.account && !this.account.is_complete && item.key[0] === "h");
  }
}

function shapeText({ shape, dtype }) {
  return `${dtype ?? ""}${shape ? `[${shape.join(", ")}]` : ""}`;
}

/** Parts that are alike stand in one row. */
function alikeText({ n_alike: count, each }) {
  return ` × ${count}${each === null ? "" : `, ${formatBytes(each)} each`}`;
}

/** The row of a kind of memory has it as its name. */
function kindText({ kinds, label }) {
  return kinds.filter((kind) => kind !== label).join(", ");
}

function sharedText({ shared_with: all, n = all.length, held_elsewhere: elsewhere }) {
  const most = 3;
  const names = all.slice(0, most).join(", ");
  const more = n - Math.min(most, all.length);
  const parts = [];
  if (names) parts.push(`shared with ${names}${more > 0 ? ` and ${more} more` : ""}`);
  if (elsewhere) parts.push(names ? "and held elsewhere" : "also held elsewhere");
  return parts.join(", ");
}

/** Return a button that ticks the other names of a joint release, with the bytes that it frees.
 *
 * Nothing where all of them are ticked. ``row`` is the name in whose row it stands. */
export function jointText(joint, ticks, onTick, row = null) {
  if (!joint) return [];
  const others = joint.names.filter((name) => (row ? name !== row : !ticks.has(name)));
  if (!others.length) return [];
  const words = others.length > 3 ? `${others.length} others` : others.join(", ");
  return [h("button", {
    class: "gmd-link gmd-joint", type: "button", title: others.join(", "), onclick: () => onTick(joint.names),
  }, row ? `Tick with ${words}` : `Tick ${words} too`), ` to free ${formatAmounts(joint.frees_bytes)}`];
}
