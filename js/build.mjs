// Bundles js/widgets.js into the one file that the Python package carries. With --check nothing is
// written: the file has to be what a build gives.

import { createHash } from "node:crypto";
import { readFile, readdir, writeFile } from "node:fs/promises";
import { fileURLToPath } from "node:url";

import { build } from "esbuild";

const ROOT = fileURLToPath(new URL("..", import.meta.url));
const BUNDLE = `${ROOT}gpumemwidget/widgets/static/widgets.js`;

/** The sources' hash, by which a test without Node sees that the bundle is of other sources. */
async function hashSources() {
  const hash = createHash("sha256");
  const names = (await readdir(`${ROOT}js`)).filter((name) => name.endsWith(".js")).sort();
  for (const name of names) hash.update(await readFile(`${ROOT}js/${name}`));
  return hash.digest("hex");
}

const { outputFiles: [output] } = await build({
  absWorkingDir: ROOT,
  entryPoints: ["js/widgets.js"],
  bundle: true,
  format: "esm",
  target: "es2022",
  charset: "utf8",
  minify: true,
  legalComments: "none",
  banner: { js: `// Built from js/ by "npm run build", sha256 ${await hashSources()}` },
  write: false,
});

if (!process.argv.includes("--check")) {
  await writeFile(BUNDLE, output.text);
} else if ((await readFile(BUNDLE, "utf8")) !== output.text) {
  console.error("gpumemwidget/widgets/static/widgets.js is not what js/ gives: npm run build");
  process.exitCode = 1;
}
