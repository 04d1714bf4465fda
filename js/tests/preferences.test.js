import assert from "node:assert/strict";
import test from "node:test";

import { Choices } from "../choices.js";
import { nameFile } from "../plot.js";
import { Preferences } from "../preferences.js";
import { Store } from "../store.js";

const KEY = "gpumemwidget.notebook a";
const isNumber = (value) => typeof value === "number";

/** A browser's storage with what it keeps for the notebook "a". */
function setStorage(text = null) {
  const items = new Map(text === null ? [] : [[KEY, text]]);
  globalThis.window = { localStorage: { getItem: (key) => items.get(key) ?? null, setItem: (key, value) => items.set(key, value) } };
}

function makeChoices(notebook) {
  return new Choices(new Store(), () => {}, new Preferences(notebook));
}

test("each notebook has its own choices, and those whose name is unknown have them in common", () => {
  setStorage();
  new Preferences("/a.ipynb").remember("window", 30);
  new Preferences("/b.ipynb").remember("window", 600);
  new Preferences().remember("window", 120);
  new Preferences("/a.ipynb").remember("tab", "device");

  const recalled = ["/a.ipynb", "/b.ipynb", "", "/c.ipynb"].map((notebook) => new Preferences(notebook).recall("window", isNumber, "default"));

  assert.deepEqual(recalled, [30, 600, 120, "default"]);
  assert.equal(new Preferences("/a.ipynb").recall("tab", () => true, "default"), "device");
});

test("broken contents are ignored, and written over", () => {
  for (const text of ["{", "null", "7", '"text"', "[null]", '{"window": "x"}']) {
    setStorage(text);
    const preferences = new Preferences("a");

    assert.equal(preferences.recall("window", isNumber, 120), 120, text);
    assert.equal(preferences.recall("constructor", () => true, "default"), "default", text);
    preferences.remember("window", 30);
    assert.equal(preferences.recall("window", isNumber, 120), 30, text);
  }
});

test("a storage that throws leaves the defaults, and the choices of this page", () => {
  const refuse = () => {
    throw new Error("the browser forbids it");
  };
  globalThis.window = { localStorage: { getItem: refuse, setItem: refuse } };
  const choices = makeChoices("a");

  choices.setWindow(30);

  assert.deepEqual([choices.windowS, choices.tab], [30, "cells"]);
  globalThis.window = { get localStorage() {
    return refuse();
  } };
  assert.equal(makeChoices("a").windowS, 120);
});

test("window, tab and lines are those of before", () => {
  setStorage();
  const before = makeChoices("a");
  before.setWindow(null);
  before.setTab("device");
  before.toggleLine("peak");
  before.toggleLine("whole");

  const after = makeChoices("a");

  assert.deepEqual([after.windowS, [...after.hiddenLines], after.tab], [null, ["peak", "whole"], "device"]);
});

test("choices that can't be made any more are not taken", () => {
  const hide = (...lines) => JSON.stringify({ hiddenLines: lines, window: 7, tab: "gone" });

  for (const lines of [["allocated", "reserved", "peak"], ["gone"], [{}]]) {
    setStorage(hide(...lines));
    const choices = makeChoices("a");
    assert.deepEqual([choices.windowS, choices.tab, choices.hiddenLines.size], [120, "cells", 0]);
  }
});

test("a saved file has the notebook's name and the local time", () => {
  const now = new Date(2026, 10, 4, 9, 5, 7);

  assert.equal(nameFile("/home/me/my run: ä.ipynb", now), "my-run-ä-gpu-memory-2026-11-04-090507.csv");
  assert.equal(nameFile("C:\\work\\a.ipynb", now), "a-gpu-memory-2026-11-04-090507.csv");
  assert.equal(nameFile("", now), "gpu-memory-2026-11-04-090507.csv");
});
