import assert from "node:assert/strict";
import test from "node:test";

import { hear, toView } from "../incoming.js";
import { FakeModel, pack } from "./helpers.js";

/** A model that wants to be asked, or not; a page whose clock the test sets. */
function listen(t, { polls }) {
  t.mock.timers.enable({ apis: ["setInterval"] });
  const clock = { now: 0 };
  t.mock.method(performance, "now", () => clock.now);
  const page = { visibilityState: "visible" };
  globalThis.document = page;
  t.after(() => delete globalThis.document);
  const model = new FakeModel({ polls });
  const heard = [];
  const stop = hear(model, (message, buffers) => heard.push([message.kind, buffers]), (question) => model.send(question));
  const wait = (ms) => {
    clock.now += ms;
    t.mock.timers.tick(ms);
  };
  return { model, heard, page, stop, wait };
}

const read = (view) => view.getFloat64(0, true);

test("binary data is a view, whichever form it has", () => {
  const view = pack(1.5);
  const bytes = new Uint8Array(view.buffer);
  const shifted = new Uint8Array([0, ...bytes]).subarray(1);
  const text = btoa(String.fromCharCode(...bytes));

  for (const form of [view, view.buffer, bytes, shifted, text]) assert.equal(read(toView(form)), 1.5);

  assert.equal(toView(undefined), undefined);
});

test("a message with buffers and a batch in plain JSON are heard as the same", (t) => {
  const { model, heard } = listen(t, { polls: true });
  const view = pack(2.5);

  model.receive({ kind: "rows" }, view);
  model.receive({ kind: "batch", messages: [{ kind: "rows", buffers: [btoa(String.fromCharCode(...new Uint8Array(view.buffer)))] }, { kind: "over" }] });

  assert.deepEqual(heard.map(([kind, buffers]) => [kind, buffers.map(read)]), [["rows", [2.5]], ["rows", [2.5]], ["over", []]]);
});

test("a page asks once a second, and not before it has its answer", (t) => {
  const { model, wait } = listen(t, { polls: true });

  wait(1000);
  wait(1000);
  assert.deepEqual(model.sent, [{ kind: "poll" }]);

  model.receive({ kind: "batch", messages: [] });
  wait(1000);
  assert.equal(model.sent.length, 2);
});

test("a question that got lost is asked again", (t) => {
  const { model, wait } = listen(t, { polls: true });

  wait(1000);
  wait(30000);

  assert.equal(model.sent.length, 2);
});

test("a page that is hidden or has stopped asks nothing", (t) => {
  const { model, heard, page, stop, wait } = listen(t, { polls: true });

  page.visibilityState = "hidden";
  wait(1000);
  page.visibilityState = "visible";
  stop();
  wait(1000);
  model.receive({ kind: "over" });

  assert.deepEqual([model.sent, heard], [[], []]);
});

test("where the kernel sends by itself nothing is asked", (t) => {
  const { model, wait } = listen(t, { polls: false });

  wait(5000);

  assert.deepEqual(model.sent, []);
});
