// What the kernel sends, whichever form it has: a message with binary buffers, or in Colab a batch of
// messages in plain JSON, for which the page asks. ``Outgoing`` in ``widgets/page.py`` is the kernel's side.

const ASK_EVERY_MS = 1000;
/** A busy kernel answers when its cell has ended: until then a question more seldom, for the case that
 * one was lost. */
export const ASK_AGAIN_MS = 30000;

/** Binary data as a DataView: it comes as one, as another view in Colab's manager, or as base64. */
export function toView(data) {
  if (!data || data instanceof DataView) return data;
  const bytes = typeof data === "string" ? Uint8Array.from(atob(data), (char) => char.charCodeAt(0)) : data;
  return bytes instanceof ArrayBuffer ? new DataView(bytes) : new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
}

/** Call ``receive`` with each message and its buffers, and ``ask`` with the question for more where
 * the kernel wants to be asked. Returns a function that ends this. */
export function hear(model, receive, ask) {
  let askedAt = null;
  const take = (message, buffers) => receive(message, (buffers ?? []).map(toView));
  const takeAny = (message, buffers) => {
    if (message.kind !== "batch") {
      take(message, buffers);
      return;
    }
    askedAt = null;
    for (const each of message.messages) take(each, each.buffers);
  };
  const question = () => {
    const waits = askedAt !== null && performance.now() - askedAt < ASK_AGAIN_MS;
    if (waits || document.visibilityState === "hidden") return;
    askedAt = performance.now();
    ask({ kind: "poll" });
  };
  model.on("msg:custom", takeAny);
  const timer = model.get("polls") ? setInterval(question, ASK_EVERY_MS) : null;
  return () => {
    model.off("msg:custom", takeAny);
    clearInterval(timer);
  };
}
