/** The page: what is asked, the answers that come back, and what goes wrong. */

import { complete, models, Problem } from "./api.js";
import { Depth } from "./depth.js";
import { EXAMPLES } from "./examples.js";
import { Pane } from "./pane.js";

const $ = (id) => document.getElementById(id);

let served = [];
let model = null;
let running = null; // AbortController of the answers under way
let timer = 0;

const depth = new Depth(
  { slider: $("tolerance"), stops: $("stops"), says: $("tolerance-says"), choice: $("consistency") },
  () => {
    $("beside").disabled = depth.tolerance === null;
  },
);

async function load() {
  clearTimeout(timer);
  $("about").textContent = "Asking the server for its model";
  try {
    served = await models();
  } catch (error) {
    $("about").textContent = "";
    refuse(error, load);
    return;
  }
  clear();
  $("model").replaceChildren(...served.map(({ id }) => new Option(id, id)));
  $("model-choice").hidden = served.length < 2;
  choose();
}

function choose() {
  model = served[$("model").selectedIndex];
  const { num_layers: layers, exit_layers: exits, measure } = model.early_exit;
  const facts = [model.id, `${layers} decoder layers`, `exits after ${ranges(exits)}`];
  if (measure) facts.push(`confidence: ${measure}`);
  $("about").textContent = facts.join(" · ");
  document.title = `calm: ${model.id}`;
  depth.show(model.early_exit);
}

/** "1–3, 5": runs of layers that follow each other. */
function ranges(layers) {
  const runs = [];
  for (const layer of layers) {
    const run = runs.at(-1);
    if (run && layer === run[1] + 1) run[1] = layer;
    else runs.push([layer, layer]);
  }
  return runs.map(([first, last]) => (first === last ? `${first}` : `${first}–${last}`)).join(", ") || "no layer";
}

async function send() {
  const prompt = $("prompt").value;
  if (running) return;
  if (!prompt.trim()) {
    tell("there is nothing to send; type a text or pick an example");
    $("prompt").focus();
    return;
  }
  if (!model) {
    await load();
    if (!model || running) return;
  }
  clear();
  const asked = [[depth.title, depth.asked]];
  const beside = $("beside").checked && depth.tolerance !== null;
  if (beside) asked.unshift(["Full depth", { policy: "full", layers: true }]);
  const panes = asked.map(([title]) => new Pane($("pane"), title, model.early_exit));
  $("answers").replaceChildren(...panes.map((pane) => pane.element));
  $("answers").classList.toggle("two", beside);
  $("together").hidden = !beside;
  busy(new AbortController());
  say(`Sent; waiting for ${beside ? "two answers" : "the answer"}.`);
  const stream = { stream: true, stream_options: { include_usage: true } };
  const requests = asked.map(([, earlyExit]) => ({ model: model.id, prompt, ...stream, early_exit: earlyExit }));
  const problems = await Promise.all(panes.map((pane, i) => follow(pane, requests[i], running.signal)));
  busy(null);
  const problem = problems.find((each) => each !== null);
  if (problem) refuse(problem, send);
}

/** One answer until its end; what went wrong, or null. */
async function follow(pane, request, signal) {
  let problem = null;
  pane.start();
  try {
    for await (const chunk of complete(request, signal)) pane.take(chunk);
    pane.end("finished");
  } catch (error) {
    if (!signal.aborted && !(error instanceof Problem)) throw error;
    problem = signal.aborted ? null : error;
    pane.end(signal.aborted ? "cancelled" : "failed");
    if (problem) tell(problem.message);
  }
  say(pane.summary);
  return problem;
}

function busy(controller) {
  const focused = document.activeElement;
  running = controller;
  $("stop").disabled = controller === null;
  $("send").disabled = controller !== null;
  // A button that is switched off would drop the focus of those who work by keyboard.
  if (focused === $("send") && controller) $("stop").focus();
  if (focused === $("stop") && !controller) $("send").focus();
}

/** Show what went wrong, and how to go on. */
function refuse(error, again) {
  if (!(error instanceof Problem)) throw error;
  tell(error.message);
  if (again === load) {
    $("retry").hidden = false;
    if (error.retryAfter !== null) timer = setTimeout(load, 1000 * Math.max(1, error.retryAfter));
  }
}

function tell(line) {
  $("problem").textContent = line;
}

function say(line) {
  const said = document.createElement("p");
  said.textContent = line;
  $("said").append(said);
}

function clear() {
  tell("");
  $("said").replaceChildren();
  $("retry").hidden = true;
}

$("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
$("stop").addEventListener("click", () => running?.abort());
$("again").addEventListener("click", load);
$("model").addEventListener("change", choose);
$("numbers").addEventListener("change", () => document.body.classList.toggle("numbers", $("numbers").checked));
document.addEventListener("keydown", (event) => {
  if (event.isComposing) return;
  if (event.key === "Escape") running?.abort();
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey) && !event.repeat) {
    event.preventDefault();
    send();
  }
});
for (const { name, text } of EXAMPLES) {
  const button = document.createElement("button");
  button.type = "button";
  button.className = "quiet";
  button.textContent = name;
  button.addEventListener("click", () => {
    $("prompt").value = text;
    $("prompt").focus();
    $("prompt").setSelectionRange(0, 0);
    $("prompt").scrollTop = 0;
  });
  $("examples").append(button);
}
load();
