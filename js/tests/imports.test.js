import assert from "node:assert/strict";
import { fileURLToPath } from "node:url";
import test from "node:test";

import { build } from "esbuild";

test("no module imports itself by way of others", async () => {
  const { metafile } = await build({
    absWorkingDir: fileURLToPath(new URL("../..", import.meta.url)),
    entryPoints: ["js/dashboard.js"],
    bundle: true,
    metafile: true,
    write: false,
  });
  const imports = new Map(
    Object.entries(metafile.inputs).map(([path, input]) => [path, input.imports.map((imported) => imported.path)]),
  );
  const done = new Set();
  const follow = (path, way) => {
    assert.ok(!way.includes(path), `a circle of imports: ${[...way, path].join(" -> ")}`);
    if (!done.has(path)) for (const next of imports.get(path)) follow(next, [...way, path]);
    done.add(path);
  };

  follow("js/dashboard.js", []);

  assert.ok(done.size > 10);
});
