/** The calls of the server's API that the page makes. Paths are relative to the page, so that it may lie in a folder. */

import { events } from "./stream.js";

const LONGEST = 400; // characters of a message that are shown
const LOADS_S = 2; // seconds after which a server that loads its model is asked again

const KEY = "the API key that the browser sends no longer holds; reload the page to give another";

/** What went wrong, as one line for the reader. */
export class Problem extends Error {
  /**
   * @param {string} message
   * @param {number} status of HTTP; 0 where there was none.
   * @param {number | null} retryAfter seconds, where the server said so.
   */
  constructor(message, status = 0, retryAfter = null) {
    const line = message.replace(/\s+/g, " ").trim().slice(0, LONGEST);
    super(retryAfter === null ? line : `${line} (retry after ${retryAfter} s)`);
    this.status = status;
    this.retryAfter = retryAfter;
  }
}

const unreachable = () => new Problem("the server cannot be reached; see that it runs, then send again");
const lost = () => new Problem("the connection was lost before the answer was finished; send again for all of it");

/**
 * The models that the server names.
 *
 * @returns {Promise<object[]>} entries of GET /v1/models, at least one.
 */
export async function models() {
  const response = await call("./v1/models", {});
  const { data } = await response.json().catch(() => ({}));
  if (!Array.isArray(data) || !data.length || !data.every((each) => each.early_exit !== undefined)) {
    throw new Problem("the server names no early-exit model; is another program listening there?");
  }
  if (data.some((each) => each.early_exit === null)) throw new Problem("the server loads its model", 0, LOADS_S);
  return data;
}

/**
 * The chunks of one streamed answer.
 *
 * @param {object} request body of POST /v1/completions; it asks for a stream.
 * @param {AbortSignal} signal
 * @returns {AsyncGenerator<object>} it ends where the server said that all is told, and raises a Problem otherwise.
 */
export async function* complete(request, signal) {
  const body = JSON.stringify(request);
  const options = { method: "POST", body, headers: { "content-type": "application/json" }, signal };
  const response = await call("./v1/completions", options);
  if (!(response.headers.get("content-type") ?? "").startsWith("text/event-stream")) {
    throw new Problem("the server answered without a stream; is something between it and this page?");
  }
  try {
    for await (const data of events(response.body)) {
      if (data === "[DONE]") return;
      const chunk = parsed(data);
      if (chunk.error) throw new Problem(String(chunk.error.message ?? "the server failed on this request"));
      yield chunk;
    }
  } catch (error) {
    throw error instanceof Problem || signal.aborted ? error : lost();
  }
  throw lost();
}

async function call(path, options) {
  let response;
  try {
    response = await fetch(new URL(path, document.baseURI), { ...options, cache: "no-store" });
  } catch (error) {
    throw options.signal?.aborted ? error : unreachable();
  }
  if (!response.ok) throw await refusal(response);
  return response;
}

async function refusal(response) {
  if (response.status === 401) return new Problem(KEY, 401);
  const { error } = await response.json().catch(() => ({}));
  const message = error?.message ?? `the server answered with status ${response.status} and no message`;
  return new Problem(String(message), response.status, seconds(response.headers.get("retry-after")));
}

/** Retry-After is a number of seconds or a date. */
function seconds(value) {
  if (value === null) return null;
  const said = /^\d+$/.test(value) ? Number(value) : (Date.parse(value) - Date.now()) / 1000;
  return Number.isFinite(said) ? Math.max(0, Math.ceil(said)) : null;
}

function parsed(data) {
  try {
    const chunk = JSON.parse(data);
    if (chunk !== null && typeof chunk === "object") return chunk;
  } catch {
    // told below, like any other thing that is no chunk
  }
  throw new Problem("the server sent an event that is no part of an answer");
}
