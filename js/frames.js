// Drawing with the browser's frames: once for however many changes, and not all the time.

/** Draws when asked to, with the browser's next frame. As long as a drawing took, the page is left
 * in peace after it: many devices would keep a slow machine drawing all the time. */
export class Frames {
  constructor(draw) {
    this.draw = draw;
    this.frame = null;
    this.pause = null;
    this.isWanted = false;
  }

  schedule() {
    if (this.pause !== null) this.isWanted = true;
    if (this.frame !== null || this.pause !== null) return;
    this.frame = requestAnimationFrame(() => {
      this.frame = null;
      const begin = performance.now();
      this.draw();
      // A timer runs after the browser has painted.
      this.pause = setTimeout(() => {
        this.pause = setTimeout(() => this.endPause(), performance.now() - begin);
      });
    });
  }

  endPause() {
    this.pause = null;
    if (!this.isWanted) return;
    this.isWanted = false;
    this.schedule();
  }

  dispose() {
    cancelAnimationFrame(this.frame);
    clearTimeout(this.pause);
    // Nothing is scheduled any more.
    this.frame = 0;
  }
}
