// A device's memory in parts: as a table that says what each part is, and flat for a bar.

import { formatBytes } from "./format.js";
import { h } from "./html.js";

/** Return the parts of a breakdown that have no parts of their own, in order. */
function leavesOf(parts) {
  return parts.flatMap((part) => {
    const own = part.parts.length ? leavesOf(part.parts) : [part];
    return part.n_more ? [...own, { look: part.look, label: `${part.n_more} more`, bytes: part.more, parts: [] }] : own;
  });
}

/** Return the arguments with which a ``Bar`` draws a breakdown. */
export function barOf(breakdown) {
  return {
    parts: leavesOf(breakdown.parts),
    total: breakdown.total,
    marks: { limit: breakdown.limit, budget: breakdown.budget },
  };
}

export class BreakdownTable {
  constructor() {
    this.body = h("tbody");
    this.foot = h("tfoot");
    this.element = h("table", { class: "gmd-table gmd-parts" },
      h("caption", { class: "gmd-hidden" }, "What the device's memory is made of"),
      h("thead", {}, h("tr", {},
        h("th", { scope: "col" }, "Part"),
        h("th", { scope: "col", class: "gmd-number" }, "Size"),
        h("th", { scope: "col", class: "gmd-number" }, "Share"),
        h("th", { scope: "col", class: "gmd-wide" }, "What it is, and what can be done"))),
      this.body, this.foot);
  }

  draw(breakdown) {
    this.total = breakdown.total;
    this.body.replaceChildren(...this.rows(breakdown.parts, 0));
    this.foot.replaceChildren(h("tr", {},
      h("th", { scope: "row" }, breakdown.device === "host" ? "All of the machine's memory" : "All of the device"),
      h("td", { class: "gmd-number" }, formatBytes(breakdown.total)),
      h("td", { class: "gmd-number" }, "100%"),
      h("td", { class: "gmd-wide" }, this.words(breakdown))), ...this.extraRows(breakdown));
  }

  rows(parts, level) {
    return parts.flatMap((part) => [
      this.row(part, level),
      ...this.rows(part.parts, level + 1),
      ...(part.n_more ? [this.row({ ...part, label: `${part.n_more} more`, bytes: part.more, tell: "", parts: [] }, level + 1)] : []),
    ]);
  }

  row(part, level, { share = true } = {}) {
    return h("tr", { "data-part": part.look, "data-level": level, "data-bytes": part.bytes, style: `--level: ${level}` },
      h("th", { scope: "row" },
        h("div", { class: "gmd-part-line" },
          h("span", { class: "gmd-swatch", "data-look": part.look, "data-whole": part.parts.length > 0 }),
          h("span", { class: "gmd-part-name" }, part.label))),
      h("td", { class: "gmd-number" }, formatBytes(part.bytes)),
      h("td", { class: "gmd-number gmd-percent" }, share ? formatShare(part.bytes, this.total) : ""),
      h("td", { class: "gmd-wide" }, part.tell));
  }

  /** Pinned memory is within the others: it stands below their sum. */
  extraRows({ pinned }) {
    return pinned.map((row) => this.row({ look: "pinned", parts: [], ...row }, 0));
  }

  words(breakdown) {
    const words = [];
    if (breakdown.used !== null && breakdown.device !== "host") words.push(`the driver shows ${formatBytes(breakdown.used)} in use`);
    if (breakdown.limit) words.push(`this process may reserve ${formatBytes(breakdown.limit)} (%memlimit)`);
    if (breakdown.budget) words.push(`a cell may have ${formatBytes(breakdown.budget)} (%membudget)`);
    return words.join(" · ");
  }
}

function formatShare(bytes, total) {
  const percent = (100 * bytes) / total;
  if (bytes > 0 && percent < 0.05) return "<0.1%";
  return `${percent.toFixed(1)}%`;
}
