// A whole device in parts, as of now, and the bar that shows them.

import { formatBytes, isKnown } from "./format.js";
import { h } from "./html.js";

/** A whole device in parts: this process's by its counters, the others' by the driver's figure.
 *
 * ``here`` is what this process has, as the driver shows it.
 *
 * The counters come ten times a second, the driver's figures once. What others have is the driver's
 * figure less what this process had reserved then; what this process has reserved since, or given
 * back, moves ``used`` and what is free until the driver is asked again. */
export function deviceParts(info, now, use) {
  const list = [];
  const add = (look, label, bytes) => bytes > 0 && list.push({ look, label, bytes });
  const reserved = isKnown(now?.reserved) ? now.reserved : 0;
  const then = isKnown(use?.reserved) ? use.reserved : reserved;
  const moved = reserved - then;
  const inUse = use?.used ?? null;
  const used = inUse === null ? null : Math.max(0, inUse + moved);
  if (info.device === "host") {
    // The figures of htop: the process's resident size, and the machine's memory in use.
    const handedOut = isKnown(now?.allocated) ? Math.min(now.allocated, reserved) : reserved;
    add("allocated", isKnown(now?.allocated) ? "allocated" : "this process", handedOut);
    add("cached", "other resident memory", reserved - handedOut);
    if (used !== null) add("others", "other processes and the system", inUse - then);
    if (isKnown(use?.free)) add("free", "available", use.free - moved);
    return { here: isKnown(now?.reserved) ? now.reserved : null, used, list };
  }
  const allocated = isKnown(now?.allocated) ? now.allocated : 0;
  const own = use?.own ?? null;
  const isOwnKnown = own !== null;
  const isAsleep = isOwnKnown && own < then;
  if (isAsleep) add("allocated", "this process (what sleeps has no memory)", own + moved);
  else {
    add("allocated", "allocated", allocated);
    add("cached", "cached", reserved - allocated);
  }
  if (isOwnKnown) add("outside", "this process outside PyTorch", own - then);
  if (used !== null) {
    const others = inUse - (isOwnKnown ? own : then);
    add("others", isOwnKnown || info.is_touched === false ? "other processes" : "this process outside PyTorch and other processes", others);
  }
  list.push(...unusedParts(use ?? {}, moved));
  const here = isOwnKnown ? own + moved : isKnown(now?.reserved) ? reserved : null;
  return { here, used, list };
}

/** Return what no process has of a GPU: what the driver keeps for itself, and what is free.
 *
 * ``more`` bytes are in use beyond those that the driver said, and free no longer. */
export function unusedParts({ used, free, total }, more) {
  if (!isKnown(used) || !isKnown(free)) return [];
  return [
    { look: "driver", label: "reserved by the driver", bytes: (total ?? 0) - used - free },
    { look: "free", label: "free", bytes: free - more },
  ].filter(({ bytes }) => bytes > 0);
}

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
