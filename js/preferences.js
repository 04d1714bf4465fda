// Choices of a person that the browser keeps for the next dashboard: window, tab, lines,
// sort and filter.


const MEMORY_KEY = "gpumemwidget.dashboard";

/** Return all choices; none if the browser keeps nothing or somebody else wrote there. */
function recallAll() {
  try {
    const known = JSON.parse(window.localStorage.getItem(MEMORY_KEY));
    return known && typeof known === "object" ? known : {};
  } catch {
    return {};
  }
}

/** A choice, if it was made before and is still one of those that can be made. */
export function recall(name, isValid, otherwise) {
  const value = recallAll()[name];
  return value !== undefined && isValid(value) ? value : otherwise;
}

export function remember(name, value) {
  try {
    window.localStorage.setItem(MEMORY_KEY, JSON.stringify({ ...recallAll(), [name]: value }));
  } catch {
    // A browser may forbid it, or its room may be full: then nothing is remembered.
  }
}
