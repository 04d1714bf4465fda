// A device's memory in parts: as a bar, and as a table that says what each part is.

/** The parts of a bridge that are made of no others, in the order in which they stand. */
function leavesOf(parts) {
  return parts.flatMap((part) => {
    const own = part.parts.length ? leavesOf(part.parts) : [part];
    return part.n_more ? [...own, { look: part.look, label: `${part.n_more} more`, bytes: part.more, parts: [] }] : own;
  });
}

/** The bar: a part's width is its share of the device; limit and budget are marks on it. */
function bridgeBar(bridge) {
  const share = (bytes) => `${((100 * bytes) / bridge.total).toFixed(4)}%`;
  const parts = leavesOf(bridge.parts).filter((part) => part.bytes > 0);
  const marks = [["limit", bridge.limit], ["budget", bridge.budget]]
    .filter(([, bytes]) => bytes && bytes < bridge.total);
  const label = `${bridge.device}: ${parts.map((part) => `${part.label} ${formatBytes(part.bytes)}`).join(", ")}`;
  return h("span", { class: "gmd-bridge", role: "img", "aria-label": label },
    h("span", { class: "gmd-bridge-parts" }, parts.map((part) => h("span", {
      "data-look": part.look, title: `${part.label}: ${formatBytes(part.bytes)}`,
      style: `flex: ${part.bytes} 0 0`,
    }))),
    marks.map(([name, bytes]) => h("span", {
      class: "gmd-mark", "data-mark": name, title: `${name} ${formatBytes(bytes)}`, style: `left: ${share(bytes)}`,
    })));
}

class BridgeTable {
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

  draw(bridge) {
    this.total = bridge.total;
    this.body.replaceChildren(...this.rows(bridge.parts, 0));
    this.foot.replaceChildren(h("tr", {},
      h("th", { scope: "row" }, bridge.device === "host" ? "All of the machine's memory" : "All of the device"),
      h("td", { class: "gmd-number" }, formatBytes(bridge.total)),
      h("td", { class: "gmd-number" }, "100%"),
      h("td", { class: "gmd-wide" }, this.words(bridge))), ...this.extraRows(bridge));
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

  words(bridge) {
    const words = [];
    if (bridge.used !== null && bridge.device !== "host") words.push(`the driver shows ${formatBytes(bridge.used)} in use`);
    if (bridge.limit) words.push(`this process may reserve ${formatBytes(bridge.limit)} (%memlimit)`);
    if (bridge.budget) words.push(`a cell may have ${formatBytes(bridge.budget)} (%membudget)`);
    return words.join(" · ");
  }
}

function formatShare(bytes, total) {
  const percent = (100 * bytes) / total;
  if (bytes > 0 && percent < 0.05) return "<0.1%";
  return `${percent.toFixed(1)}%`;
}
