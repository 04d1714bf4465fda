// Choices of a person that the browser keeps for each notebook: time span, tab, hidden lines,
// sort and filter.

const STORAGE_KEY = "gpumemwidget.notebooks";
/** Maximum number of notebooks whose choices are kept; the one that was changed longest ago goes first. */
const MAX_NOTEBOOKS = 50;

/** Return [notebook, choices] of all notebooks, the one that was changed last at the end. */
function readAll() {
  try {
    const entries = JSON.parse(window.localStorage.getItem(STORAGE_KEY));
    return entries.filter(([notebook, choices]) => typeof notebook === "string" && choices && typeof choices === "object");
  } catch {
    // The browser keeps nothing, or somebody else wrote there.
    return [];
  }
}

export class Preferences {
  /** ``notebook`` names the notebook; all whose name is unknown have the empty one in common. */
  constructor(notebook = "") {
    this.notebook = notebook;
  }

  /** Return a choice, if it was made before and is still one of those that can be made. */
  recall(name, isValid, otherwise) {
    const [, choices] = readAll().find(([notebook]) => notebook === this.notebook) ?? [];
    const value = choices && Object.hasOwn(choices, name) ? choices[name] : undefined;
    return value !== undefined && isValid(value) ? value : otherwise;
  }

  /** Keep a choice for this notebook's next dashboard. */
  remember(name, value) {
    const entries = readAll();
    const [, choices] = entries.find(([notebook]) => notebook === this.notebook) ?? [];
    const others = entries.filter(([notebook]) => notebook !== this.notebook);
    const kept = [...others, [this.notebook, { ...choices, [name]: value }]].slice(-MAX_NOTEBOOKS);
    try {
      window.localStorage.setItem(STORAGE_KEY, JSON.stringify(kept));
    } catch {
      // A browser may forbid it, or its room may be full: then nothing is remembered.
    }
  }
}
