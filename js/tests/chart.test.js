import assert from "node:assert/strict";
import test from "node:test";

import { deviceParts } from "../deviceparts.js";
import { ChartRow } from "../row.js";
import { Store } from "../store.js";
import { MIB, makeSnapshot, pack } from "./helpers.js";

const GIB = 1024 ** 3;

function drawRow({ gaps = [], rows = [[1, 10 * MIB, 20 * MIB, 15 * MIB, 20 * MIB]], info = {}, width = 900, spans = [[0, 9]], row = null, store = new Store(), more = {} } = {}) {
  const snapshot = makeSnapshot(rows, { gaps, devices: [{ device: "cuda:0", name: "GPU", ...info }] });
  store.takeSnapshot(snapshot, snapshot.data);
  const context = {
    colors: {}, width, said: null, range: [0, 10], toX: (time) => time, spans, hiddenLines: new Set(), isHovered: false,
    isOneOfSeveral: false, heightPx: 200, name: "", top: 1, ...more,
  };
  return (row ?? new ChartRow("cuda:0", store)).draw(context);
}

test("a peak belongs to one cell: its line is broken between two", () => {
  const rows = [1, 2, 3, 4].map((time) => [time, MIB, MIB, MIB * time, MIB]);

  const { traces } = drawRow({ rows, spans: [[1, 2], [3, 4]] });

  assert.deepEqual(traces[2].x, [1, 2, 3, 3, 4]);
  assert.equal(traces[2].y[2], null);
});

test("limit, budget and total are named as far as they are in view, the nearest of those above too", () => {
  const rows = [[1, 8 * GIB, 9 * GIB, 8 * GIB, 9 * GIB]];
  const info = { total_bytes: 80 * GIB, limit_bytes: 12 * GIB, budget_bytes: 10 * GIB };

  const { annotations, shapes } = drawRow({ rows, info });

  assert.deepEqual(annotations.map(({ text }) => text), ["↑ total 80.00 GiB", "limit 12.00 GiB", "budget 10.00 GiB"]);
  assert.equal(shapes.length, 2);
});

test("where there is no room for all names the total's goes", () => {
  const rows = [[1, 8 * GIB, 9 * GIB, 8 * GIB, 9 * GIB]];
  const info = { total_bytes: 12.2 * GIB, limit_bytes: 12.1 * GIB, budget_bytes: 12 * GIB };

  const { annotations } = drawRow({ rows, info, width: 360 });

  assert.deepEqual(annotations.map(({ text }) => text), ["limit 12.10 GiB", "budget 12.00 GiB"]);
});

test("in a narrow row of many both bounds are named", () => {
  const rows = [[1, 26 * GIB, 27 * GIB, 26 * GIB, 27 * GIB]];
  const info = { total_bytes: 79.53 * GIB, limit_bytes: 48 * GIB, budget_bytes: 30 * GIB };

  const { annotations } = drawRow({ rows, info, width: 282, more: { isOneOfSeveral: true, heightPx: 55.7 } });

  assert.deepEqual(annotations.map(({ text }) => text), ["limit 48.00 GiB", "budget 30.00 GiB", "<b>cuda:0</b>"]);
});

test("the scale grows at once and shrinks late", () => {
  const store = new Store();
  const row = new ChartRow("cuda:0", store);
  const draw = (mib) => drawRow({ rows: [[1, mib * MIB, mib * MIB, mib * MIB, mib * MIB]], row, store }).axis.range[1];

  const grown = draw(100);
  assert.equal(draw(70), grown);
  assert.ok(draw(20) < grown);
});

test("what is outside PyTorch has a line where it is more than a context", () => {
  const draw = (...outside) => {
    const store = new Store();
    outside.forEach((bytes, i) => store.addMoment(i, { "cuda:0": [20 * GIB, 50, bytes] }));
    return drawRow({ store }).traces[4].y;
  };

  const [unknown, context] = [draw(null, null), draw(GIB / 2, GIB / 2)];
  const library = draw(GIB / 2, 3 * GIB, null);

  assert.deepEqual([unknown, context], [[], []]);
  assert.deepEqual(library, [GIB / 2, 3 * GIB, null].map((bytes) => bytes && bytes / GIB));
});

test("a whole device has never less than what this process reserved since its driver was asked", () => {
  const store = new Store();
  for (const [time, used] of [[0, 2], [1, 9], [3, 14]]) store.addMoment(time, { "cuda:0": [used * GIB, 50, null] });
  const rows = [[0.5, 1], [0.6, 5], [0.7, 8], [1.2, 9], [2.5, 12]].map(([time, gib]) => [time, 0, gib * GIB, 0, 0]);

  const { x, y, line } = drawRow({ rows, store }).traces[3];

  assert.deepEqual([x, y, line.shape], [[0, 0.5, 0.6, 1, 1.2, 3], [2, 5, 8, 9, 12, 14], "hv"]);
});

test("a device's parts add up to what its driver says", () => {
  const info = { device: "cuda:0", is_touched: true };
  const use = { used: 30 * GIB, own: 12 * GIB, reserved: 10 * GIB, free: 49 * GIB, total: 80 * GIB };

  const { here, used, list } = deviceParts(info, { allocated: 8 * GIB, reserved: 11 * GIB }, use);

  const parts = Object.fromEntries(list.map(({ look, bytes }) => [look, bytes / GIB]));
  assert.equal(here, 13 * GIB);
  // What this process has reserved since the driver was asked moves with it.
  assert.equal(used, 31 * GIB);
  assert.deepEqual(parts, { allocated: 8, cached: 3, outside: 2, others: 18, free: 48, driver: 1 });
});

test("what sleeps is no part of a device", () => {
  const info = { device: "cuda:0", is_touched: true };
  const use = { used: 13 * GIB, own: 2 * GIB, reserved: 10 * GIB, free: 67 * GIB, total: 80 * GIB };

  const { here, list } = deviceParts(info, { allocated: 8 * GIB, reserved: 10 * GIB }, use);

  const parts = Object.fromEntries(list.map(({ look, bytes }) => [look, bytes / GIB]));
  assert.equal(here, 2 * GIB);
  assert.deepEqual(parts, { allocated: 2, others: 11, free: 67 });
});

test("a stretch without samples is a gap in every line, and its area falls to 0", () => {
  const times = [...Array(20).keys(), 60, 61, 62].map((time) => [time, MIB, 2 * MIB, 3 * MIB, 3 * MIB]);

  const { traces } = drawRow({ rows: times, gaps: [[19, 60]], spans: [[0, 99]], more: { range: [0, 70] } });

  const [allocated, reserved, peak] = traces;
  for (const { x, y } of [allocated, reserved, peak]) {
    assert.equal(y[x.indexOf(19)], y[x.indexOf(61)]);
    assert.equal(y[x.indexOf(60)], null);
  }
  assert.ok([allocated, reserved, peak].every(({ connectgaps }) => !connectgaps));
  const area = traces.at(-1);
  assert.deepEqual(area.x.flatMap((x, i) => (area.y[i] ? [] : [x])), [19, 60]);
});

test("thinned samples and a single unknown figure are no gaps", () => {
  const rows = [0, 10, 20, 40].map((time, i) => [time, i === 1 ? NaN : MIB, MIB, MIB, MIB]);

  const { traces } = drawRow({ rows, more: { range: [0, 60] } });

  assert.deepEqual([traces[0].x, traces[0].y], [[0, 20, 40], [1, 1, 1]]);
});

test("a sample that comes late leaves a gap before it, as the kernel names those of before", () => {
  const store = new Store();
  const snapshot = makeSnapshot([[1, 1, 1, 1, 1], [8, 1, 1, 1, 1]], { gaps: [[1, 8]] });
  store.takeSnapshot(snapshot, snapshot.data);
  store.addRows(["cuda:0"], pack(9, 1, 1, 1, 1, 20, 1, 1, 1, 1));

  const found = [[0, 1], [1, 2], [2, 3], [0, 3]].map(([first, second]) => store.hasGap(first, second));

  assert.deepEqual(found, [true, false, true, true]);
});

test("a whole device has a gap where its driver was not asked", () => {
  const store = new Store();
  for (const time of [0, 1, 60]) store.addMoment(time, { "cuda:0": [2 * GIB, 50, null] });

  const { x, y } = drawRow({ store, rows: [[0, MIB, MIB, MIB, MIB], [60, MIB, MIB, MIB, MIB]], more: { range: [0, 70] } }).traces[3];

  assert.deepEqual([x, y.map(Boolean)], [[0, 1, 6, 6, 60], [true, true, true, false, true]]);
});

test("a running cell has its change and its peak so far", () => {
  const store = new Store();
  const rows = [[1, 9, 9, 9, 9], [2, 10, 10, 12, 12], [3, 40, 50, 70, 80], [4, 30, 50, 70, 80]];
  const before = { "cuda:0": [10, 12] };
  const snapshot = makeSnapshot(rows, { running: { execution_count: 5, start_s: 2, first_line: "train()", before } });
  store.takeSnapshot(snapshot, snapshot.data);

  const { execution_count: number, devices } = store.describeRunning();

  assert.equal(number, 5);
  assert.deepEqual(devices, [{ device: "cuda:0", peak: 70, rise: 60, change: 20, peak_of: "allocated", peak_is: "exact" }]);
});

test("a device that a running cell uses first had nothing before, in a cell whose start is thinned away", () => {
  const store = new Store();
  const snapshot = makeSnapshot([[30, 40, 50, 70, 80]], { running: { execution_count: 5, start_s: 2, before: {} } });
  store.takeSnapshot(snapshot, snapshot.data);

  const [{ rise, change }] = store.describeRunning().devices;

  assert.deepEqual([rise, change], [70, 40]);
});
