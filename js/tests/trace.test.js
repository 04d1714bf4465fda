import assert from "node:assert/strict";
import test from "node:test";

import { Store } from "../store.js";
import { describeDevices, hasMoved } from "../trace.js";
import { MIB, makeSnapshot, pack } from "./helpers.js";

/** A store of a cell that began at second 10, with one reading of cuda:0 at its start. */
function begin() {
  const store = new Store();
  const snapshot = makeSnapshot([[9, 1, 1, 1, 1], [10, 100 * MIB, 200 * MIB, 100 * MIB, 200 * MIB]]);
  store.takeSnapshot(snapshot, snapshot.data);
  return store;
}

test("each counter is told with what stood before the cell, now, and its peak", () => {
  const store = begin();
  store.addRows(["cuda:0"], pack(11, 150 * MIB, 250 * MIB, 180 * MIB, 260 * MIB), ["at least"]);

  const [device] = describeDevices(store, 10);

  assert.equal(device.peakIs, "at least");
  assert.deepEqual(device.counters, [
    { label: "allocated", before: 100 * MIB, now: 150 * MIB, peak: 180 * MIB },
    { label: "reserved", before: 200 * MIB, now: 250 * MIB, peak: 260 * MIB },
  ]);
});

test("a device that the cell touched first began at 0", () => {
  const store = begin();
  store.addRows(["cuda:0", "cuda:1"], pack(11, 1, 1, 1, 1, 50, 60, 50, 60));

  const [, device] = describeDevices(store, 10);

  assert.deepEqual(device.counters.map(({ before }) => before), [0, 0]);
});

test("what is unknown before stays unknown, and the host has a word and a peak of its own", () => {
  const store = new Store();
  const snapshot = makeSnapshot([], { columns: ["host", "cuda:0"], data: pack(10, NaN, 50, NaN, 50, 1, 1, 1, 1) });
  store.takeSnapshot(snapshot, snapshot.data);
  store.addRows(["host", "cuda:0"], pack(11, 30, 70, NaN, 90, 1, 1, 1, 1));

  const [gpu, host] = describeDevices(store, 10);

  assert.equal(gpu.device, "cuda:0");
  assert.deepEqual(host.counters, [
    { label: "allocated", before: null, now: 30, peak: null },
    { label: "resident", before: 50, now: 70, peak: 90 },
  ]);
});

test("one device is told where one was asked for", () => {
  const store = begin();
  store.addRows(["cuda:0", "host"], pack(11, 1, 1, 1, 1, 2, 2, 2, 2));

  assert.deepEqual(describeDevices(store, 10, "host").map(({ device }) => device), ["host"]);
});

test("a device that has moved is drawn, also where only its peak tells so", () => {
  const counter = (before, now, peak) => ({ counters: [{ before, now, peak }] });

  assert.equal(hasMoved(counter(5 * MIB, 5 * MIB + 100, 5 * MIB)), false);
  assert.equal(hasMoved(counter(5 * MIB, 9 * MIB, null)), true);
  assert.equal(hasMoved(counter(5 * MIB, 5 * MIB, 50 * MIB)), true);
  assert.equal(hasMoved(counter(null, 5 * MIB, 50 * MIB)), false);
});
