import assert from "node:assert/strict";
import test from "node:test";

import { pickExtremes } from "../thinning.js";

/** Seconds 0, 1, 2, ... */
const count = (n) => Array.from({ length: n }, (_, i) => i);

test("few points all stay", () => {
  assert.deepEqual(pickExtremes(count(8), [count(8)], 2, 6, 4), [2, 3, 4, 5]);
});

test("no peak and no valley of any series is lost, however few points stay", () => {
  const times = count(10_000);
  const flat = times.map(() => 5);
  const peaked = flat.map((value, i) => (i === 7_777 ? 9 : value));
  const dipped = flat.map((value, i) => (i === 3_333 ? 1 : value));

  const kept = pickExtremes(times, [peaked, dipped], 0, times.length, 10);

  assert.ok(kept.includes(7_777));
  assert.ok(kept.includes(3_333));
  assert.equal(kept[0], 0);
  assert.equal(kept.at(-1), 9_999);
  assert.ok(kept.length <= 10 * 6);
});

test("what is kept is in order, and stands once", () => {
  const times = count(5_000);
  const kept = pickExtremes(times, [times.map((i) => Math.sin(i))], 0, times.length, 50);

  assert.deepEqual(kept, [...new Set(kept)].sort((a, b) => a - b));
});

test("values that are unknown hide no extreme", () => {
  const times = count(100);
  const values = times.map((i) => (i === 60 ? 7 : NaN));

  assert.ok(pickExtremes(times, [values], 0, 100, 2).includes(60));
});
