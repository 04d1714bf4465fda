import assert from "node:assert/strict";
import test from "node:test";

import { leakText } from "../cellwords.js";
import { Store, pickExtremes } from "../store.js";
import { MIB, makeSnapshot, pack } from "./helpers.js";

/** A store with these rows of cuda:0. */
function fill(...rows) {
  const store = new Store();
  const snapshot = makeSnapshot(rows);
  store.takeSnapshot(snapshot, snapshot.data);
  return store;
}

test("a snapshot replaces what was known, and what came since a moment is added", () => {
  const store = fill([1, 10, 20, 10, 20]);
  const more = makeSnapshot([[2, 30, 40, 30, 40]], { since_s: 1 });
  store.takeSnapshot(more, more.data);
  assert.deepEqual(store.times, [1, 2]);

  const anew = makeSnapshot([[5, 1, 1, 1, 1]]);
  store.takeSnapshot(anew, anew.data);

  assert.deepEqual(store.times, [5]);
});

test("a reading that comes late stands at its time, and one that comes twice stands once", () => {
  const store = fill([1, 10, 10, 10, 10], [3, 30, 30, 30, 30]);

  store.addRows(["cuda:0"], pack(2, 20, 20, 20, 20));
  store.addRows(["cuda:0"], pack(2, 99, 99, 99, 99));

  assert.deepEqual(store.times, [1, 2, 3]);
  assert.deepEqual(store.columns.get("cuda:0").allocated, [10, 20, 30]);
});

test("a device that is touched later is unknown before", () => {
  const store = fill([1, 10, 10, 10, 10]);

  store.addRows(["cuda:0", "cuda:1"], pack(2, 11, 11, 11, 11, 5, 5, 5, 5));

  assert.deepEqual(store.columns.get("cuda:1").allocated, [NaN, 5]);
});

test("a figure that was not read stands as the one before, and is no zero", () => {
  const store = fill([1, 10, 10, NaN, 10], [2, NaN, 20, NaN, 20]);

  assert.deepEqual(store.latest("cuda:0"), { allocated: 10, reserved: 20, allocatedPeak: null, reservedPeak: 20 });
});

test("where allocated memory has no high-water mark the peak is of what is reserved", () => {
  assert.deepEqual(fill([1, 10, 20, NaN, 25]).peaks("cuda:0"), [25]);
  assert.deepEqual(fill([1, 10, 20, 12, 25]).peaks("cuda:0"), [12]);
});

test("many readings are thinned without losing a peak", () => {
  const store = new Store();
  for (let i = 0; i < 60; i++) {
    const rows = Array.from({ length: 1000 }, (_, k) => {
      const time = 1000 * i + k;
      const bytes = time === 12_345 ? 90 * MIB : time === 23_456 ? 1 : 50 * MIB;
      return [time, bytes, bytes, bytes, bytes];
    });
    store.addRows(["cuda:0"], pack(...rows.flat()));
  }

  const { allocated } = store.columns.get("cuda:0");
  assert.ok(store.times.length < 25_000);
  assert.equal(Math.max(...allocated), 90 * MIB);
  assert.equal(Math.min(...allocated), 1);
  assert.equal(store.times.at(-1), 59_999);
});

test("a cell's record replaces the one of the same start", () => {
  const store = new Store();
  store.startCell({ start_s: 5, execution_count: 1 });

  store.endCell({ start_s: 5, execution_count: 1, duration_s: 1 });
  store.addCell({ start_s: 5, execution_count: 1, duration_s: 2 });

  assert.equal(store.running, null);
  assert.deepEqual(store.cells.map((cell) => cell.duration_s), [2]);
});

test("a leak belongs to the cell that began at its time, which may still run", () => {
  const store = new Store();
  store.addCell({ start_s: 5, execution_count: 1, duration_s: 1 });
  store.startCell({ start_s: 7, execution_count: 2, leaks: [] });

  store.addLeak(7, { mark: "+1.00 MiB a step" });
  store.addLeak(5, { mark: "+2.00 MiB a run" });
  store.addLeak(6, { mark: "of a cell that is not known" });

  assert.deepEqual(store.running.leaks, [{ mark: "+1.00 MiB a step" }]);
  assert.deepEqual(store.cells.map((cell) => cell.leaks), [[{ mark: "+2.00 MiB a run" }]]);
});

test("a leak names its device where another one may be meant, and each amount stands once", () => {
  const leaks = [{ device: "cuda:0", mark: "+2 MiB a run" }, { device: "cuda:0", mark: "+2 MiB a run" }, { device: "host", mark: "+1 MiB a run" }];

  assert.equal(leakText(leaks, { device: "cuda:0" }), "+2 MiB a run, host +1 MiB a run");
  assert.equal(leakText(leaks, { device: "all" }), "cuda:0 +2 MiB a run, host +1 MiB a run");
});

test("parts of another account, or out of turn, are not taken", () => {
  const store = new Store();
  store.setAccount({ key: 7, variables: [], rows: [] });

  store.addParts({ key: 6, node: 1, start: 0, parts: ["old"] });
  store.addParts({ key: 7, node: 1, start: 0, parts: ["a", "b"] });
  store.addParts({ key: 7, node: 1, start: 5, parts: ["x"] });
  store.addParts({ key: 7, node: 1, start: 2, parts: ["c"] });

  assert.deepEqual(store.account.parts.get(1).parts, ["a", "b", "c"]);
});

test("samples are saved as a table with a row for each device, from one second to another", () => {
  const store = new Store();
  const snapshot = makeSnapshot([[1, 10, 20, 15, 20], [2.0004, 11, 21, NaN, NaN], [3, 12, 22, 15, 22]]);
  store.takeSnapshot(snapshot, snapshot.data);

  const lines = store.formatTable(["cuda:0", "host"], 1, 2.5).split("\n");

  assert.deepEqual(lines, [
    "time_s,time,device,allocated_bytes,reserved_bytes,allocated_peak_bytes,reserved_peak_bytes",
    "1001.000,1970-01-01T00:16:41.000Z,cuda:0,10,20,15,20",
    "1002.000,1970-01-01T00:16:42.000Z,cuda:0,11,21,,",
    "",
  ]);
});

/** Seconds 0, 1, 2, ... */
const count = (n) => Array.from({ length: n }, (_, i) => i);

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

test("values that are unknown hide no extreme", () => {
  const times = count(100);
  const values = times.map((i) => (i === 60 ? 7 : NaN));

  assert.ok(pickExtremes(times, [values], 0, 100, 2).includes(60));
});
