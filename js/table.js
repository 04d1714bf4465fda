// Tables, with heads that may sort the rows.

import { h } from "./html.js";

export class Table {
  /** ``columns`` are ``{ label, by, ...attributes }``: a click on one with ``by`` sets ``sort`` and calls ``onSort``. */
  constructor(look, caption, columns, sort = null, onSort = null) {
    this.sort = sort;
    this.onSort = onSort;
    this.body = h("tbody");
    this.heads = columns.map(({ label, by, ...attributes }) => h("th", { scope: "col", "data-sort": by, ...attributes }, by
      ? h("button", { class: "gmd-sort", type: "button", "data-focus": `sort ${by}`, onclick: () => this.sortBy(by) }, label) : label));
    this.element = h("table", { class: `gmd-table ${look}` },
      h("caption", { class: "gmd-hidden" }, caption), h("thead", {}, h("tr", {}, this.heads)), this.body);
  }

  /** The other way round, or the largest first. */
  sortBy(by) {
    this.sort = { by, down: this.sort.by === by ? !this.sort.down : by !== "name" };
    this.onSort();
  }

  /** Replace the rows, and mark the head by which they are sorted. */
  fill(rows, by = this.sort?.by) {
    keepFocus(this.element, () => this.body.replaceChildren(...rows));
    for (const head of this.heads) {
      if (head.dataset.sort) head.setAttribute("aria-sort", head.dataset.sort !== by ? "none" : this.sort.down ? "descending" : "ascending");
    }
  }
}

/** Build a part of an element anew; what had the focus has it again, found by its ``data-focus``. */
export function keepFocus(element, build) {
  const focused = element.contains(document.activeElement) && document.activeElement.dataset.focus;
  build();
  if (focused) [...element.querySelectorAll("[data-focus]")].find((each) => each.dataset.focus === focused)?.focus({ preventScroll: true });
}
