// The names that are ticked in one view.

export class Ticks {
  constructor(onChange) {
    this.names = new Set();
    this.onChange = onChange;
  }

  get size() {
    return this.names.size;
  }

  has(name) {
    return this.names.has(name);
  }

  set(names, isTicked) {
    for (const name of names) {
      if (isTicked) this.names.add(name);
      else this.names.delete(name);
    }
    this.onChange();
  }

  /** Untick what is not listed any more. */
  keep(names) {
    const known = new Set(names);
    this.set([...this.names].filter((name) => !known.has(name)), false);
  }
}
