// plotly.js comes to the page compressed, with the model: here it becomes a module.

let plotly = null;

/** plotly.js comes compressed with the model. It is unpacked once, after the rest is on the screen. */
function loadPlotly(model) {
  plotly ??= unpackPlotly(model.get("plotly"));
  return plotly;
}

async function unpackPlotly(bytes) {
  const unpacked = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  const source = await new Response(unpacked).text();
  // It looks for a CommonJS module first. As a module of its own it needs no eval, which a page may
  // forbid, and the page's own Plotly, if it has one, stays what it was.
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
