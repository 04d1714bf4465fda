import assert from "node:assert/strict";
import test from "node:test";

import {
  binaryTicks, formatAmounts, formatBytes, formatChange, formatDuration, formatElapsed, formatOf, formatShort, formatTick,
} from "../format.js";

const GIB = 1024 ** 3;

test("bytes have two decimals, and the unit in which they read best", () => {
  assert.equal(formatBytes(0), "0 B");
  assert.equal(formatBytes(1023), "1023 B");
  assert.equal(formatBytes(1024), "1.00 KiB");
  assert.equal(formatBytes(1.5 * GIB), "1.50 GiB");
  assert.equal(formatBytes(-GIB), "-1.00 GiB");
  // Rounded, this would read as 1024.00 MiB.
  assert.equal(formatBytes(GIB - 1), "1.00 GiB");
});

test("what is unknown is no zero", () => {
  for (const unknown of [null, undefined, NaN]) {
    assert.equal(formatBytes(unknown), "—");
    assert.equal(formatShort(unknown), "—");
  }
  assert.equal(formatDuration(null), "—");
});

test("a change has its sign", () => {
  assert.equal(formatChange(1024), "+1.00 KiB");
  assert.equal(formatChange(-1024), "-1.00 KiB");
  assert.equal(formatChange(0), "0 B");
});

test("a lower bound is shown as one", () => {
  const amounts = (pairs, isAtLeast) => formatAmounts({ by_device: pairs, is_at_least: isAtLeast });

  assert.equal(amounts([["cuda:0", GIB], ["host", 0]], false), "1.00 GiB on cuda:0");
  assert.equal(amounts([["cuda:0", GIB]], true), "at least 1.00 GiB on cuda:0");
  assert.equal(amounts([], true), "at least 0 B");
});

test("where there is little room figures are short", () => {
  assert.equal(formatShort(35.24 * GIB), "35.2 GiB");
  assert.equal(formatShort(2 * GIB), "2 GiB");
  assert.equal(formatOf(40.7 * GIB, 80 * GIB), "40.7 of 80 GiB");
});

test("durations are shown as finely as they can be read", () => {
  assert.equal(formatDuration(12e-6), "12 µs");
  assert.equal(formatDuration(0.0125), "12.5 ms");
  assert.equal(formatDuration(1.5), "1.50 s");
  assert.equal(formatDuration(75), "1 min 15 s");
  assert.equal(formatElapsed(3725), "1 h 02 min");
});

test("an axis has a few ticks, a power of two apart", () => {
  const { step, values } = binaryTicks(3 * GIB, 4);

  assert.equal(step, GIB);
  assert.deepEqual(values.map(formatTick), ["0", "1 GiB", "2 GiB", "3 GiB"]);
});
