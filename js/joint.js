// Names that have to be released together to free shared memory.

import { formatAmounts } from "./format.js";
import { h } from "./html.js";

/** Return a button that ticks the other names of a joint release, with the bytes that it frees.
 *
 * Nothing where all of them are ticked. ``row`` is the name in whose row it stands. */
export function jointText(joint, ticks, row = null) {
  if (!joint) return [];
  const others = joint.names.filter((name) => (row ? name !== row : !ticks.has(name)));
  if (!others.length) return [];
  const words = others.length > 3 ? `${others.length} others` : others.join(", ");
  return [h("button", {
    class: "gmd-link gmd-joint", type: "button", title: others.join(", "), onclick: () => ticks.set(joint.names, true),
  }, row ? `Tick with ${words}` : `Tick ${words} too`), ` to free ${formatAmounts(joint.frees_bytes)}`];
}
