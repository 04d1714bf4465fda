// Choices of a person that the browser keeps for each notebook: time span, tab, hidden lines, sort, filter.

export class Preferences {
  /** ``notebook`` names the notebook; all whose name is unknown have the empty one in common. */
  constructor(notebook = "") {
    this.key = `gpumemwidget.notebook ${notebook}`;
  }

  read() {
    try {
      return Object(JSON.parse(window.localStorage.getItem(this.key)));
    } catch {
      // The browser keeps nothing, or somebody else wrote there.
      return {};
    }
  }

  /** Return a choice, if it was made before and is still one of those that can be made. */
  recall(name, isValid, otherwise) {
    const choices = this.read();
    return Object.hasOwn(choices, name) && isValid(choices[name]) ? choices[name] : otherwise;
  }

  /** Keep a choice for this notebook's next dashboard. */
  remember(name, value) {
    try {
      window.localStorage.setItem(this.key, JSON.stringify({ ...this.read(), [name]: value }));
    } catch {
      // A browser may forbid it, or its room may be full: then nothing is remembered.
    }
  }
}
