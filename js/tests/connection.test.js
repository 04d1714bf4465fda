import assert from "node:assert/strict";
import test from "node:test";

import { Connection } from "../connection.js";
import { FakeModel, makeSnapshot, pack } from "./helpers.js";

/** A connection whose page has drawn one reading; what its listener hears is kept. */
function connect(more = {}) {
  const model = new FakeModel({ snapshot: makeSnapshot([[1, 10, 10, 10, 10]], more) });
  const connection = new Connection(model);
  const heard = [];
  connection.listen((kind) => heard.push(kind));
  const sendRow = (seq, time, runningSince = null, offset = 1000) => model.receive(
    { kind: "rows", seq, devices: ["cuda:0"], running_s: runningSince, wall_offset_s: offset }, pack(time, 20, 20, 20, 20));
  return { model, connection, store: connection.store, heard, sendRow };
}

test("what was asked is asked again when its answer is lost, but not while a cell runs", (t) => {
  const { model, connection } = connect();
  let now = 1000;
  t.mock.method(performance, "now", () => now);
  const ask = (afterMs) => {
    now += afterMs;
    connection.askOnce({ kind: "plotly" });
    return model.sent.length;
  };

  assert.equal(ask(0), 1);
  assert.equal(ask(1000), 1);
  assert.equal(ask(60000), 2);
  model.receive({ kind: "started", seq: 2, cell: { start_s: 1.5 } });
  assert.equal(ask(60000), 2);
  model.receive({ kind: "ended", seq: 3, record: { start_s: 1.5, duration_s: 60 } });
  assert.equal(ask(1000), 3);
});

test("a state that was asked for in vain is asked for after the next gap", (t) => {
  const { model, sendRow } = connect();
  let now = 1000;
  t.mock.method(performance, "now", () => now);

  sendRow(5, 2);
  now += 60000;
  sendRow(9, 3);

  assert.deepEqual(model.sent, [{ kind: "snapshot", since_s: 1 }, { kind: "snapshot", since_s: 2 }]);
});

test("an update's rows are in the store before any listener hears of it", () => {
  const { connection, store, heard, sendRow } = connect();
  let seen = null;
  connection.listen(() => (seen = store.lastTime));

  sendRow(2, 1.1);

  assert.deepEqual(heard, ["rows"]);
  assert.equal(seen, 1.1);
});

test("a message that was heard already is passed over", () => {
  const { store, heard, sendRow } = connect();

  sendRow(1, 5);

  assert.deepEqual(heard, []);
  assert.equal(store.lastTime, 1);
});

test("after a gap the state is asked for once, from the newest reading on", () => {
  const { model, sendRow } = connect();

  sendRow(5, 2);
  sendRow(9, 3);
  assert.deepEqual(model.sent, [{ kind: "snapshot", since_s: 1 }]);

  model.receive({ kind: "snapshot", ...makeSnapshot([], { seq: 9, since_s: 1 }) }, pack());
  sendRow(12, 4);
  assert.equal(model.sent.length, 2);
});

test("a cell that was given up ends without a word", () => {
  const { store, model, sendRow } = connect();
  model.receive({ kind: "started", seq: 2, cell: { start_s: 1.5 } });

  sendRow(3, 1.6, 1.5);
  assert.equal(store.running.start_s, 1.5);

  sendRow(4, 1.7, null);
  assert.equal(store.running, null);
});

test("the clock's jitter moves nothing, and a clock that was set does", () => {
  const { store, sendRow } = connect();

  sendRow(2, 1.1, null, 1000.0001);
  assert.equal(store.wallOffset, 1000);

  sendRow(3, 1.2, null, 1003600);
  assert.equal(store.wallOffset, 1003600);
});

test("a kind that nobody knows is passed over", () => {
  const { model, heard } = connect();

  model.receive({ kind: "of a later release", seq: 2 });

  assert.deepEqual(heard, []);
});

test("once the kernel is gone nothing is sent, and it is said once", () => {
  const { model, connection, heard } = connect();
  model.isGone = true;

  assert.equal(connection.send({ kind: "variables" }), false);
  connection.end("again");

  assert.match(connection.over, /The kernel is gone/);
  assert.deepEqual(heard, ["over"]);
});

test("what went wrong is shown until it is dismissed, and questions can be asked again", () => {
  const { model, connection, store } = connect();
  store.taking = { state: "running" };

  for (let i = 0; i < 7; i++) model.receive({ kind: "trouble", message: `failure ${i}` });
  model.receive({ kind: "trouble", message: "failure 6" });

  assert.deepEqual(connection.trouble, [2, 3, 4, 5, 6].map((i) => `failure ${i}`));
  assert.equal(store.taking, null);
  connection.forgetTrouble();
  assert.deepEqual(connection.trouble, []);
});
