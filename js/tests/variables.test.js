import assert from "node:assert/strict";
import test from "node:test";

import { VariablesPanel } from "../variables.js";

test("an open question stays when the sum of earlier ticks comes late", () => {
  const panel = Object.assign(Object.create(VariablesPanel.prototype), {
    asked: "first", sumIsStale: true, ticks: new Set(), confirm: { hidden: false }, button: { hidden: true },
  });

  panel.takeSum({ id: "first" });
  clearTimeout(panel.sumTimer);

  assert.equal(panel.confirm.hidden, false);
  assert.equal(panel.sum, undefined);
});
