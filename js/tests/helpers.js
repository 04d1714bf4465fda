// A kernel and a page for tests: a model that keeps what is sent, and messages as the kernel packs them.

export const MIB = 1024 ** 2;

export class FakeModel {
  constructor(traits = {}) {
    this.traits = traits;
    this.sent = [];
    this.listeners = new Map();
  }

  get(name) {
    return this.traits[name];
  }

  on(name, listener) {
    this.listeners.set(name, listener);
  }

  off(name, listener) {
    if (this.listeners.get(name) === listener) this.listeners.delete(name);
  }

  send(content) {
    if (this.isGone) throw new Error("the comm is closed");
    this.sent.push(content);
  }

  /** What the kernel sends. */
  receive(message, ...buffers) {
    this.listeners.get("msg:custom")?.(message, buffers);
  }
}

/** Float64s as a message's binary part. */
export function pack(...figures) {
  const view = new DataView(new ArrayBuffer(8 * figures.length));
  figures.forEach((figure, i) => view.setFloat64(8 * i, figure, true));
  return view;
}

/** A snapshot with rows of one device: [time, allocated, reserved, allocated peak, reserved peak]. */
export function makeSnapshot(rows = [], more = {}) {
  return {
    seq: 1, since_s: null, wall_offset_s: 1000, running: null, cells: [],
    devices: [{ device: "cuda:0", is_touched: true, name: "GPU" }],
    columns: ["cuda:0"], data: pack(...rows.flat()), ...more,
  };
}
