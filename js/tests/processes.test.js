import assert from "node:assert/strict";
import test from "node:test";

import { Choices } from "../choices.js";
import { formatTime } from "../format.js";
import { gpuParts, hostText, linePaths, listGroups, listNotes, shortenUuid, summaryText, troubleText } from "../processes.js";
import { Store } from "../store.js";

const GIB = 1024 ** 3;

function makeGpu(more = {}) {
  return { uuid: "GPU-1", name: "H100", total: 80 * GIB, used: 60 * GIB, free: 18 * GIB, others: 10 * GIB, unlisted: 0, rows: [], ...more };
}

function makeHost(more = {}) {
  return {
    host: "node1", n_processes: 2, n_gpus: 1, n_lost: 0, n_failed: 0, n_ooms: 0, gpu_name: "H100",
    used: 60 * GIB, total: 80 * GIB, silent_since: null, gpus: [], rows: [], ...more,
  };
}

test("there is a tab for processes while the kernel watches any, and it is remembered meanwhile", () => {
  const store = new Store();
  const choices = new Choices(store, () => {});
  choices.setTab("processes");
  assert.equal(choices.tab, "cells");

  store.watches = true;

  assert.equal(choices.tab, "processes");
  assert.deepEqual(choices.tabs, ["cells", "variables", "device", "processes"]);
});

test("each GPU is a group with its processes, and those without one are the host's last", () => {
  const rows = [{ id: "a" }, { id: "b" }];
  const host = makeHost({ gpus: [makeGpu({ rows }), makeGpu({ uuid: null, rows: [{ id: "a" }] })], rows: [{ id: "c" }] });

  const groups = listGroups([host, makeHost({ host: "node2", gpus: [makeGpu({ rows: [{ id: "d" }] })] })]);

  assert.deepEqual(groups.map((group) => group.rows.map(({ id, look }) => [id, look])),
    [[["a", "k0"], ["b", "k1"]], [["a", "k0"]], [["c", null]], [["d", "k0"]]]);
  const keys = groups.flatMap((group) => group.rows.map(({ key }) => key));
  assert.equal(new Set(keys).size, keys.length);
});

test("a GPU's bar has each process, the others, what the driver keeps and what is free", () => {
  const rows = [{ name: "rank 0", taken: 30 * GIB }, { name: "rank 1", taken: 0 }, { name: "rank 2", taken: 15 * GIB }];

  const parts = gpuParts(makeGpu({ rows, unlisted: 5 * GIB }));

  assert.deepEqual(parts.map(({ label, look, bytes }) => [label, look, bytes / GIB]), [
    ["rank 0", "k0", 30], ["rank 2", "k2", 15], ["recorded processes without a row", "unlisted", 5],
    ["others", "others", 10], ["reserved by the driver", "driver", 2], ["free", "free", 18],
  ]);
  assert.equal(parts.reduce((sum, { bytes }) => sum + bytes, 0), 80 * GIB);
});

test("what was read at different times may exceed what is in use, and never the GPU", () => {
  const parts = gpuParts(makeGpu({ rows: [{ name: "rank 0", taken: 70 * GIB }], others: 0 }));

  assert.deepEqual(parts.map(({ bytes }) => bytes / GIB), [70, 2, 8]);
});

test("what is free is not made up where nobody knows it", () => {
  const rows = [{ name: "rank 0", taken: 30 * GIB }];

  for (const unknown of [{ used: null, free: null, others: null }, { free: null, others: 0 }]) {
    assert.deepEqual(gpuParts(makeGpu({ rows, ...unknown })).map(({ look }) => look), ["k0"]);
  }
});

test("a line ends at the right, stands on the highest value, and is broken where one is unknown", () => {
  const { stroke, area } = linePaths([100, 0, null, 50], { width: 59, height: 12 });

  assert.equal(stroke, "M56.0 1.0L57.0 11.0M59.0 6.0h0.5");
  assert.equal(area, "M56.0 1.0L57.0 11.0V12H56.0ZM59.0 6.0V12H59.0Z");
  assert.deepEqual(linePaths([], { width: 59, height: 12 }), { stroke: "", area: "" });
});

test("a host says what it has, and what is wrong there", () => {
  assert.equal(hostText(makeHost()), "2 processes · 1 × H100 · 60 of 80 GiB");
  assert.equal(hostText(makeHost({ gpu_name: "", n_gpus: 3, used: null })), "2 processes · 3 GPUs");
  assert.equal(troubleText(makeHost()), "");
  const wrong = makeHost({ n_lost: 2, n_failed: 1, n_ooms: 1 });
  assert.equal(troubleText(wrong), "2 lost · 1 failed · 1 out of memory");
  const since = new Date().setHours(12, 3, 4) / 1000;
  assert.match(troubleText(makeHost({ n_lost: 2, silent_since: since })), /^no word since .*03.04/);
  assert.equal(summaryText({ n_processes: 1, n_hosts: 1, hosts: [makeHost()] }), "1 process on 1 host with 1 GPU");
});

test("a time has its date where it is not of today, and a wrong one is unknown", () => {
  const now = new Date(2026, 5, 20, 12);

  assert.doesNotMatch(formatTime(now.getTime() / 1000, now), /,/);
  assert.match(formatTime(now.getTime() / 1000 - 86400, now), /,/);
  assert.equal(formatTime(1e300, now), "—");
});

test("a UUID is shown by its beginning and its end", () => {
  assert.equal(shortenUuid("GPU-1a2b3c4d-0000-0000-0000-00000000ef12"), "GPU-1a2b…ef12");
  assert.equal(shortenUuid("GPU-short"), "GPU-short");
});

test("what stands out and what can't be read are named, and how much more of each there is", () => {
  assert.deepEqual(listNotes(undefined), []);
  assert.deepEqual(listNotes({ skews: [], n_more_skews: 0, unread: [], n_more_unread: 0 }), []);

  const lines = listNotes({
    skews: [{ words: "rank 3 is high" }], n_more_skews: 2, unread: ["a.jsonl can't be read"], n_more_unread: 3,
  });

  assert.deepEqual(lines, [
    "rank 3 is high", "2 more processes are well above the median.",
    "a.jsonl can't be read.", "3 more files can't be read.",
  ]);
});
