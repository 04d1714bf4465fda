// A device's memory as one bar of its parts, with marks for limit and budget.

import { formatBytes } from "./format.js";
import { h } from "./html.js";

export class Bar {
  constructor() {
    this.parts = h("span", { class: "gmd-bar-parts" });
    this.element = h("span", { class: "gmd-bar" }, this.parts);
  }

  /** Draw ``{ parts, total, marks }``: parts as ``{ look, label, bytes }``, and bytes by a mark's name. */
  draw({ parts, total, marks = {} }) {
    const shown = total ? parts.filter(({ bytes }) => bytes > 0) : [];
    while (this.parts.children.length > shown.length) this.parts.lastChild.remove();
    while (this.parts.children.length < shown.length) this.parts.append(h("span"));
    const percent = (bytes) => `${Math.max(0, Math.min(100, (100 * bytes) / total)).toFixed(3)}%`;
    shown.forEach(({ look, label, bytes }, i) => {
      const part = this.parts.children[i];
      part.dataset.look = look;
      part.title = `${label}: ${formatBytes(bytes)}`;
      part.style.width = percent(bytes);
    });
    const inside = Object.entries(marks).filter(([, bytes]) => bytes && total && bytes < total);
    for (const mark of this.element.querySelectorAll(".gmd-mark")) mark.remove();
    this.element.append(...inside.map(([name, bytes]) => h("span", {
      class: "gmd-mark", "data-mark": name, title: `${name} ${formatBytes(bytes)}`, style: `left: ${percent(bytes)}`,
    })));
  }
}
