// Whether a view can be seen, and what the kernel is told of it: a dashboard that nobody sees costs
// the kernel nothing.

const TELL_MS = 10000;
const ANSWER_MS = 1000;

class Sight {
  /** ``onChange`` is called when the view comes into sight or goes out of it. */
  constructor(view, onChange) {
    this.view = view;
    this.store = view.store;
    this.onChange = onChange;
    this.onScreen = true;
    this.wentOffScreen = "";
    this.visible = null;
    this.toldAt = 0;
    this.askedAt = null;
    this.observer = new IntersectionObserver((entries) => this.look(entries[entries.length - 1]));
    this.observer.observe(view.root);
    this.onVisibility = () => this.tell();
    document.addEventListener("visibilitychange", this.onVisibility);
    this.onPageHide = () => this.store.send({ kind: "gone", view: view.id, page_left: true });
    window.addEventListener("pagehide", this.onPageHide);
    view.model.on("change:hears_in_mid_cell", () => this.tell());
  }

  dispose() {
    this.store.send({ kind: "gone", view: this.view.id, page_left: false });
    this.observer.disconnect();
    document.removeEventListener("visibilitychange", this.onVisibility);
    window.removeEventListener("pagehide", this.onPageHide);
  }

  look(entry) {
    const box = entry.boundingClientRect;
    // No box: its notebook's tab is hidden. Out of the page: scrolled away, or its cell was detached.
    const gone = this.view.root.isConnected && box.width === 0 && box.height === 0;
    this.onScreen = entry.isIntersecting;
    this.wentOffScreen = this.onScreen ? "" : gone ? "hidden" : "scrolled";
    this.tell();
    this.onChange();
  }

  isSeen() {
    if (document.visibilityState === "hidden") return false;
    if (this.onScreen) return true;
    if (this.wentOffScreen === "hidden") return false;
    // Scrolled away. A kernel that is deaf in mid-cell could not hear that we are back.
    return !this.view.model.get("hears_in_mid_cell");
  }

  /** Whether the kernel owes this view an answer since it came back. */
  get waits() {
    return this.askedAt !== null && performance.now() - this.askedAt > ANSWER_MS;
  }

  /** Tell the kernel whether this view is seen, when that changed, and now and then that it lives. */
  tell({ anyway = false, list = false, look = false } = {}) {
    const visible = this.isSeen();
    if (visible === this.visible && !anyway) return;
    const back = visible && this.visible === false;
    const first = this.visible === null;
    const variables = this.view.tab === "variables";
    const device = this.view.tab === "device" ? this.view.devices.device : null;
    this.visible = visible;
    this.toldAt = performance.now();
    if (back) this.askedAt = this.store.heardAt = this.toldAt;
    this.store.send({
      kind: "view", view: this.view.id, visible, variables, device,
      // What came with the page is coarse: the first view asks for more of the past.
      snapshot: back || (first && !this.store.isFull),
      since_s: back && this.store.isFull ? this.store.lastTime : null,
      list: visible && variables && (list || back),
      look: visible && device !== null && (look || back),
    });
    if (first) this.store.isFull = true;
  }

  everySecond() {
    if (this.visible && performance.now() - this.toldAt > TELL_MS) this.tell({ anyway: true });
  }
}
