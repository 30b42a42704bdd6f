/** Server-sent events over fetch: an EventSource can neither POST nor carry a key. */

/**
 * The data of each event of a response's body, in order. Names, ids and comments of events are passed over, and so is
 * an event that the end of the body cuts off.
 *
 * @param {ReadableStream<Uint8Array>} body UTF-8; its chunks may end anywhere.
 * @returns {AsyncGenerator<string>} leaving it early cancels the body.
 */
export async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let data = [];
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      // A carriage return at the very end may be the first half of a line's end.
      const lines = (rest + value).split(/\r\n|\n|\r(?!$)/);
      rest = lines.pop();
      for (const line of lines) {
        if (line.startsWith("data:")) {
          data.push(line.slice(line[5] === " " ? 6 : 5));
        } else if (line === "data") {
          data.push("");
        } else if (line === "" && data.length) {
          yield data.join("\n");
          data = [];
        }
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
