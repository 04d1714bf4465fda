// plotly.js, which comes to the page as a compressed message: one for all widgets of a page.

const KEY = Symbol.for("gpumemwidget.plotly");

/** Unpack plotly.js once; whether it worked is seen when the first plot is drawn. */
export function unpackPlotly(bytes) {
  globalThis[KEY] ??= unpack(bytes);
  globalThis[KEY].catch(() => {});
}

/** A promise of plotly.js, or ``null`` where no widget has brought it yet. */
export function findPlotly() {
  return globalThis[KEY] ?? null;
}

async function unpack(bytes) {
  const unpacked = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  const source = await new Response(unpacked).text();
  // plotly.js looks for a CommonJS module first. A module needs no eval, which a page may forbid,
  // and the page's own Plotly, if it has one, stays.
  const script = `const module = { exports: {} };\n${source}\nexport default module.exports;`;
  const url = URL.createObjectURL(new Blob([script], { type: "text/javascript" }));
  const before = window.Plotly;
  try {
    return (await import(url)).default;
  } finally {
    URL.revokeObjectURL(url);
    if (before) window.Plotly = before;
    else delete window.Plotly;
  }
}
