// Bundles each widget's module in js/ into a file that the Python package carries. With --check nothing
// is written: the files have to be what a build gives.

import { createHash } from "node:crypto";
import { readFile, readdir, writeFile } from "node:fs/promises";
import { fileURLToPath } from "node:url";

import { build } from "esbuild";

const ROOT = fileURLToPath(new URL("..", import.meta.url));

/** The sources' hash, by which a test without Node sees that the bundles are of other sources. */
async function hashSources() {
  const hash = createHash("sha256");
  const names = (await readdir(`${ROOT}js`)).filter((name) => name.endsWith(".js")).sort();
  for (const name of names) hash.update(await readFile(`${ROOT}js/${name}`));
  return hash.digest("hex");
}

const { outputFiles } = await build({
  absWorkingDir: ROOT,
  entryPoints: ["js/cards.js", "js/dashboard.js"],
  outdir: "gpumemwidget/widgets/static",
  bundle: true,
  format: "esm",
  target: "es2022",
  charset: "utf8",
  minify: true,
  legalComments: "none",
  banner: { js: `// Built from js/ by "npm run build", sha256 ${await hashSources()}` },
  write: false,
});

for (const { path, text } of outputFiles) {
  if (!process.argv.includes("--check")) {
    await writeFile(path, text);
  } else if ((await readFile(path, "utf8")) !== text) {
    console.error(`${path} is not what js/ gives: npm run build`);
    process.exitCode = 1;
  }
}
