// The map of segments: what lies where in the memory that PyTorch has reserved. Segments stand one
// behind the other, the largest first, and run on in the next line as text does.

import { formatBytes } from "./format.js";
import { h, setText } from "./html.js";

const MAP_ROW_PX = 20;
const MAP_GAP_PX = 5;
const SEGMENT_GAP_PX = 4;
const NARROWEST_SEGMENT_PX = 5;

export class SegmentMap {
  constructor() {
    this.map = null;
    this.at = -1;
    this.title = h("h3", { class: "gmd-heading" });
    this.words = h("p", { class: "gmd-figures" });
    this.legend = h("div", { class: "gmd-legend gmd-looks" });
    this.tip = h("div", { class: "gmd-tip", role: "status", hidden: true });
    this.canvas = h("div", {
      class: "gmd-map", tabindex: 0, role: "group",
      "aria-label": "Map of segments: the arrow keys go from block to block",
    });
    this.note = h("p", { class: "gmd-figures" });
    this.element = h("section", { class: "gmd-map-part" }, this.title, this.words,
      h("div", { class: "gmd-map-frame" }, this.canvas, this.tip), this.legend, this.note);
    this.sizes = new ResizeObserver(() => this.draw(this.map));
    this.sizes.observe(this.canvas);
    this.canvas.addEventListener("pointermove", (event) => this.point(event.target));
    this.canvas.addEventListener("pointerleave", () => this.leave());
    this.canvas.addEventListener("blur", () => this.leave());
    this.canvas.addEventListener("keydown", (event) => this.move(event));
  }

  dispose() {
    this.sizes.disconnect();
  }

  draw(map) {
    const width = Math.floor(this.canvas.clientWidth);
    this.element.hidden = !map || !map.segments.length;
    if (this.element.hidden) {
      this.map = map;
      return;
    }
    if (map === this.map && width === this.width) return;
    if (!width) {
      // The panel is hidden: the map is drawn when it gets its size.
      this.map = map;
      this.width = null;
      return;
    }
    this.map = map;
    this.width = width;
    this.leave();
    this.drawBlocks(width);
    this.drawWords();
  }

  drawBlocks(width) {
    const { segments } = this.map;
    const drawn = segments.reduce((sum, segment) => sum + segment.bytes, 0);
    const n = segments.reduce((sum, segment) => sum + segment.blocks.length, 0);
    // Enough lines to tell the blocks apart, up to eight.
    const lines = Math.min(8, 1 + Math.floor(Math.max(segments.length / 5, n / 40)));
    const room = Math.max(width, lines * width - segments.length * (SEGMENT_GAP_PX + 2));
    const scale = room / drawn;
    const pieces = [];
    this.blocks = [];
    let x = 0;
    let line = 0;
    const rect = (look, left, wide, index) => pieces.push(
      `<rect data-look="${look}" data-block="${index}" x="${left.toFixed(2)}" y="${line * (MAP_ROW_PX + MAP_GAP_PX) + 1}" width="${Math.max(0.4, wide).toFixed(2)}" height="${MAP_ROW_PX - 2}"/>`);
    const frame = (segment, left, wide) => pieces.push(
      `<rect class="gmd-map-segment" ${segment.is_private ? "data-private" : ""} x="${(left + 0.5).toFixed(2)}" y="${line * (MAP_ROW_PX + MAP_GAP_PX) + 0.5}" width="${Math.max(1, wide - 1).toFixed(2)}" height="${MAP_ROW_PX - 1}"/>`);
    for (const segment of segments) {
      const wide = Math.max(NARROWEST_SEGMENT_PX, segment.bytes * scale);
      const own = wide / segment.bytes;
      // A short one is not cut in two by the end of a line.
      if (x > 0 && x + Math.min(wide, 40) > width) {
        x = 0;
        line += 1;
      }
      let start = x;
      for (const block of segment.blocks) {
        const look = this.map.words[block[2]] || "mixed";
        const index = this.blocks.push({ block, segment }) - 1;
        let rest = block[0] * own;
        while (rest > 0.001) {
          const piece = Math.min(rest, width - x);
          if (piece > 0) rect(look, x, piece, index);
          rest -= piece;
          x += piece;
          if (rest > 0.001) {
            frame(segment, start, width - start);
            line += 1;
            x = start = 0;
          }
        }
      }
      frame(segment, start, x - start);
      x += SEGMENT_GAP_PX;
    }
    const height = (line + 1) * (MAP_ROW_PX + MAP_GAP_PX) - MAP_GAP_PX;
    // Safe as HTML: numbers and our own words for looks.
    this.canvas.innerHTML = `<svg width="${width}" height="${height}" aria-hidden="true">${pieces.join("")}</svg>`;
  }

  drawWords() {
    const { map } = this;
    const n = map.segments.length + map.n_more;
    setText(this.title, "Map of segments");
    const words = [
      `${n} ${n === 1 ? "segment" : "segments"}, ${formatBytes(map.reserved)} reserved, ${formatBytes(map.allocated)} allocated`,
    ];
    if (map.fragmented !== null) words.push(`${formatBytes(map.fragmented)} fragmented`);
    words.push(`largest free block ${formatBytes(map.largest_free)}`);
    setText(this.words, words.join(" · "));
    this.legend.replaceChildren(...map.looks.map(([look, name, bytes]) => h("span", { class: "gmd-look", title: formatBytes(bytes) },
      h("span", { class: "gmd-swatch", "data-look": look }), name)));
    setText(this.note, map.n_more ? `${map.n_more} smaller segments with ${formatBytes(map.more)} are not drawn.` : "");
    this.note.hidden = !this.note.textContent;
  }

  // -- What a block is -------------------------------------------------------------------------------

  point(target) {
    const index = target.dataset ? target.dataset.block : undefined;
    if (index === undefined) return;
    this.show(Number(index));
  }

  move(event) {
    if (!this.blocks) return;
    const last = this.blocks.length - 1;
    const next = { ArrowRight: Math.min(last, this.at + 1), ArrowLeft: Math.max(0, this.at - 1), Home: 0, End: last }[event.key];
    if (next === undefined && (event.key !== "Escape" || this.at < 0)) return;
    event.preventDefault();
    event.stopPropagation();
    if (next === undefined) this.leave();
    else this.show(next);
  }

  show(index) {
    if (index === this.at) return;
    this.leave();
    this.at = index;
    const pieces = [...this.canvas.querySelectorAll(`[data-block="${index}"]`)];
    for (const piece of pieces) {
      piece.setAttribute("data-on", "");
      // On top of its neighbours and of the frame of its segment.
      piece.parentNode.append(piece);
    }
    const { block, segment } = this.blocks[index];
    this.tip.replaceChildren(...this.describe(block, segment));
    this.tip.hidden = false;
    const box = pieces[0].getBoundingClientRect();
    const own = this.canvas.getBoundingClientRect();
    const left = box.left - own.left + Math.min(box.width, 80) / 2 - this.tip.offsetWidth / 2;
    this.tip.style.left = `${Math.max(0, Math.min(left, own.width - this.tip.offsetWidth))}px`;
    this.tip.style.top = `${pieces[pieces.length - 1].getBoundingClientRect().bottom - own.top + 6}px`;
  }

  leave() {
    if (this.at < 0) return;
    for (const piece of this.canvas.querySelectorAll("[data-on]")) piece.removeAttribute("data-on");
    this.tip.hidden = true;
    this.at = -1;
  }

  describe([bytes, requested, lookAt, ownerAt, placeAt, count], segment) {
    const { words } = this.map;
    const look = this.map.looks.find(([own]) => own === words[lookAt]);
    const name = look ? look[1] : "small blocks of several kinds";
    const head = words[ownerAt] ? h("code", {}, words[ownerAt]) : h("strong", {}, name);
    const size = [formatBytes(bytes)];
    if (requested !== null && requested !== bytes) size.push(`${formatBytes(requested)} requested`);
    if (words[ownerAt]) size.push(name);
    if (count > 1) size.push(`${count} blocks, side by side`);
    const kind = [
      segment.is_private ? "of a pool of its own" : null,
      segment.is_expandable ? "expandable" : null,
      segment.is_small ? "for requests up to 1 MiB" : null,
    ].filter(Boolean);
    return [
      head,
      h("div", {}, size.join(" · ")),
      words[placeAt] ? h("div", {}, `allocated at ${words[placeAt]}`) : null,
      h("div", {}, `in a segment of ${formatBytes(segment.bytes)} at ${segment.address}${kind.length ? `, ${kind.join(", ")}` : ""}`),
    ].filter(Boolean);
  }
}
