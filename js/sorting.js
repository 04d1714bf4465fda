// Heads of a table's columns that sort its rows.

import { h } from "./html.js";

/** Return the head of a column; a click sorts by it. */
export function sortHead(by, label, onSort, attributes = {}) {
  const button = h("button", { class: "gmd-sort", type: "button", "data-focus": `sort ${by}`, onclick: () => onSort(by) }, label);
  return h("th", { scope: "col", "data-sort": by, ...attributes }, button);
}

/** Return the order after a click on a head: the other way round, or the largest first. */
export function sortAgain(sort, by, isText = false) {
  return { by, down: sort.by === by ? !sort.down : !isText };
}

/** Mark the head by which the rows are sorted. */
export function markSorted(heads, by, down) {
  for (const head of heads) {
    if (!head.dataset.sort) continue;
    head.setAttribute("aria-sort", head.dataset.sort !== by ? "none" : down ? "descending" : "ascending");
  }
}
