// Reports to the kernel whether a view can be seen: a dashboard that nobody sees costs it nothing.

const REPORT_MS = 10000;
const ANSWER_MS = 1000;

export class Visibility {
  /** ``element`` is the view; ``describe`` gives what of the kernel's it shows; ``onChange`` is called
   * when the view comes into sight or goes out of it. */
  constructor(connection, id, element, { describe, onChange }) {
    this.connection = connection;
    this.id = id;
    this.element = element;
    this.describe = describe;
    this.onChange = onChange;
    this.onScreen = true;
    this.isHidden = false;
    this.visible = null;
    this.reportedAt = 0;
    this.askedAt = null;
    this.observer = new IntersectionObserver((entries) => this.look(entries[entries.length - 1]));
    this.observer.observe(element);
    this.onVisibility = () => this.report();
    document.addEventListener("visibilitychange", this.onVisibility);
    this.leave = () => connection.send({ kind: "gone", view: id });
    window.addEventListener("pagehide", this.leave);
  }

  dispose() {
    this.leave();
    this.observer.disconnect();
    document.removeEventListener("visibilitychange", this.onVisibility);
    window.removeEventListener("pagehide", this.leave);
  }

  look(entry) {
    const box = entry.boundingClientRect;
    // No box: its notebook's tab is hidden. Out of the page: scrolled away, or its cell was detached.
    this.onScreen = entry.isIntersecting;
    this.isHidden = !this.onScreen && this.element.isConnected && box.width === 0 && box.height === 0;
    this.report();
    this.onChange();
  }

  /** A view that is scrolled away counts: a kernel may be deaf in mid-cell, when it comes back. */
  isSeen() {
    return document.visibilityState !== "hidden" && !this.isHidden;
  }

  /** True if the kernel owes this view an answer since it came back. */
  get waits() {
    return this.askedAt !== null && performance.now() - this.askedAt > ANSWER_MS;
  }

  /** Report to the kernel whether this view is seen, when that changed, and now and then that it lives. */
  report({ anyway = false, list = false, look = false } = {}) {
    const visible = this.isSeen();
    if (visible === this.visible && !anyway) return;
    const back = visible && this.visible === false;
    const { variables, device, processes } = this.describe();
    const { connection } = this;
    const { lastTime } = connection.store;
    this.visible = visible;
    this.reportedAt = performance.now();
    if (back) this.askedAt = connection.heardAt = this.reportedAt;
    connection.send({
      kind: "view", view: this.id, visible, variables, device, processes,
      snapshot: back,
      since_s: back ? lastTime : null,
      list: visible && variables && (list || back),
      look: visible && device !== null && (look || back),
    });
  }

  everySecond() {
    if (this.visible && performance.now() - this.reportedAt > REPORT_MS) this.report({ anyway: true });
  }
}
