// The notebook's theme: its colours as plotly needs them, and when they change.

/** Custom properties of the page's own colours, and of the reports' colours for memory. */
const PAGE_COLORS = ["text", "muted", "grid", "line", "panel", "total", "limit", "budget", "outside", "band", "failed-band"];
const MEMORY_COLORS = ["allocated", "reserved", "peak"];
const THEME_ATTRIBUTES = ["data-jp-theme-light", "data-jp-theme-name", "data-vscode-theme-kind", "class"];

export class Theme {
  constructor(root, onChange) {
    this.root = root;
    this.known = null;
    this.change = () => {
      this.known = null;
      onChange();
    };
    this.observer = new MutationObserver(this.change);
    this.observer.observe(document.body, { attributes: true, attributeFilter: THEME_ATTRIBUTES });
    this.scheme = window.matchMedia("(prefers-color-scheme: dark)");
    this.scheme.addEventListener("change", this.change);
  }

  dispose() {
    this.observer.disconnect();
    this.scheme.removeEventListener("change", this.change);
  }

  /** Read when they are first needed: only in the page an element knows its style. */
  get colors() {
    if (this.known) return this.known;
    this.root.dataset.theme = isDark() ? "dark" : "light";
    const style = getComputedStyle(this.root);
    const read = (prefix, name) => [name, style.getPropertyValue(`--${prefix}-${name}`).trim() || "#888888"];
    this.known = Object.fromEntries([
      ...PAGE_COLORS.map((name) => read("gmd", name)), ...MEMORY_COLORS.map((name) => read("gmw", name)),
    ]);
    this.known.fill = `${this.known.allocated}40`;
    // Behind words that stand on lines.
    this.known.veil = style.backgroundColor.replace(/^rgb\((.*)\)$/, "rgba($1, 0.7)");
    this.known.font = style.fontFamily || "sans-serif";
    return this.known;
  }
}

function isDark() {
  const { dataset, classList } = document.body;
  if (dataset.jpThemeLight) return dataset.jpThemeLight === "false";
  if (dataset.vscodeThemeKind) return !dataset.vscodeThemeKind.includes("light");
  if (classList.contains("theme-dark")) return true;
  return window.matchMedia("(prefers-color-scheme: dark)").matches;
}
