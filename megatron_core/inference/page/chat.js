// The page of the server: a chat with turns, or the continuation of a text, through OpenAI's interface.
"use strict";
import { element, markdown } from "./markdown.js";

const ALTERNATIVES = 5;
const THEMES = { auto: "Auto", light: "Light", dark: "Dark" };
const at = id => document.getElementById(id);
const turns = []; // {role, content} of the chat
let abort = null;

start();

async function start() {
  setTheme(localStorage.getItem("theme") ?? "auto");
  at("theme").onclick = () => {
    const names = Object.keys(THEMES);
    setTheme(names[(names.indexOf(localStorage.getItem("theme") ?? "auto") + 1) % names.length]);
  };
  at("new").onclick = clear;
  at("stop").onclick = () => abort?.abort();
  at("mode").onchange = () => { clear(); showMode(); };
  at("prompt").onkeydown = event => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      at("form").requestSubmit();
    }
  };
  at("form").addEventListener("invalid", () => { at("settings").open = true; }, true);
  at("form").onsubmit = event => {
    event.preventDefault();
    if (abort) return;
    const text = at("prompt").value;
    at("prompt").value = "";
    if (matchMedia("(max-width: 40rem)").matches) at("settings").open = false; // on a phone it hides the answer
    if (at("mode").value === "chat") ask(text);
    else answer("/v1/completions", { prompt: text }, text);
  };
  try {
    const [model] = (await (await fetch("/v1/models")).json()).data;
    at("model").textContent = document.title = model.id;
    if (!model.has_chat_template) {
      at("mode").value = "text";
      at("mode").disabled = true;
      say("This model has no chat template: it continues texts.");
    }
  } catch (error) {
    say(error.message, true);
  }
  showMode();
}

function setTheme(name) {
  localStorage.setItem("theme", name);
  document.documentElement.dataset.theme = name;
  at("theme").textContent = THEMES[name];
  at("theme").setAttribute("aria-label", "Colours: " + THEMES[name]);
}

function showMode() {
  const chat = at("mode").value === "chat";
  at("prompt").placeholder = (chat ? "Message" : "Text to continue") + " (Enter sends, Shift+Enter starts a new line)";
  at("system_label").hidden = !chat;
}

function clear() {
  abort?.abort();
  turns.length = 0;
  at("log").replaceChildren();
  say("");
}

function say(text, isError = false) {
  at("status").textContent = text;
  at("status").className = isError ? "error" : "";
}

function ask(text) {
  turns.push({ role: "user", content: text });
  at("log").append(element("section", element("div", text, { className: "content" }), { className: "turn user" }));
  answerTurns();
}

function answerTurns() {
  const system = at("system").value.trim();
  const messages = [...(system ? [{ role: "system", content: system }] : []), ...turns];
  return answer("/v1/chat/completions", { messages }, "");
}

/** Send a request and show its answer in a new turn; `given` is the text before it. */
async function answer(path, body, given) {
  const chat = path === "/v1/chat/completions", asked = [...turns];
  const content = element("div", [], { className: "content" });
  const turn = element("section", content, { className: "turn assistant running" });
  at("log").append(turn);
  for (const old of document.querySelectorAll(".regenerate")) old.remove();
  const received = { text: "", tokens: [], reason: null, usage: null };
  const controller = abort = new AbortController();
  setRunning(true);
  try {
    await stream(path, { ...body, ...sampling(chat) }, controller.signal, choice => {
      read(choice, received);
      draw(content, received.text, given, chat);
    });
    say(`${received.usage?.completion_tokens ?? 0} tokens, ended: ${received.reason}`);
  } catch (error) {
    const stopped = error.name === "AbortError";
    if (turn.isConnected) say(stopped ? "Stopped" : error.message, !stopped);
  }
  turn.classList.remove("running");
  if (abort === controller) {
    abort = null;
    setRunning(false);
  }
  if (!turn.isConnected) return; // a new chat began
  if (chat && received.text) turns.push({ role: "assistant", content: received.text });
  else if (chat) turns.pop(); // a message without an answer: the next request does not repeat it
  turn.append(actions(turn, received, () => {
    turn.remove();
    turns.splice(0, turns.length, ...asked);
    if (chat) answerTurns();
    else answer(path, body, given);
  }));
  at("prompt").focus();

  function read(event, into) {
    if (event.usage) into.usage = event.usage;
    for (const choice of event.choices) {
      into.text += choice.delta ? choice.delta.content ?? "" : choice.text;
      into.tokens.push(...scores(choice.logprobs));
      into.reason = choice.finish_reason ?? into.reason;
    }
  }
}

function sampling(chat) {
  const number = id => Number(at(id).value), scored = at("probabilities").checked;
  const logprobs = chat ? { logprobs: true, top_logprobs: ALTERNATIVES } : { logprobs: ALTERNATIVES };
  return {
    stream: true, stream_options: { include_usage: true }, max_tokens: number("tokens"),
    temperature: number("temperature"), top_p: number("top_p"), top_k: number("top_k"), ...(scored ? logprobs : {}),
  };
}

/** Tokens with probabilities from `logprobs` of a chat or a completion. */
function scores(logprobs) {
  if (!logprobs) return [];
  if (logprobs.content) {
    return logprobs.content.map(each => ({
      text: each.token, probability: Math.exp(each.logprob),
      others: each.top_logprobs.map(other => [other.token, Math.exp(other.logprob)]),
    }));
  }
  return logprobs.tokens.map((text, i) => ({
    text, probability: Math.exp(logprobs.token_logprobs[i]),
    others: Object.entries(logprobs.top_logprobs[i]).map(([other, value]) => [other, Math.exp(value)]),
  }));
}

/** POST `body` and call `receive` for each server-sent event; with fewer new tokens if the context has no room for them. */
async function stream(path, body, signal, receive) {
  const post = content => fetch(path, {
    method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(content), signal,
  });
  let response = await post(body), error = response.ok ? null : (await response.json()).error;
  if (error?.room) {
    response = await post({ ...body, max_tokens: error.room });
    error = response.ok ? null : (await response.json()).error;
  }
  if (error) throw new Error(error.message);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new Error("The server ended the answer early");
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      const data = event.slice("data: ".length);
      if (data === "[DONE]") return;
      const found = JSON.parse(data);
      if (found.error) throw new Error(found.error.message);
      receive(found);
    }
  }
}

function draw(content, text, given, chat) {
  const log = at("log"), follows = log.scrollHeight - log.scrollTop - log.clientHeight < 80;
  if (chat) {
    content.replaceChildren(...markdown(text));
  } else {
    content.classList.add("plain");
    content.replaceChildren(element("span", given, { className: "given" }), text);
  }
  if (follows) log.scrollTop = log.scrollHeight;
}

function setRunning(running) {
  at("send").hidden = running;
  at("stop").hidden = !running;
}

/** Buttons below an answer. */
function actions(turn, received, again) {
  const row = element("div", [], { className: "actions" });
  const button = (text, onclick) => row.append(element("button", text, { type: "button", onclick }));
  if (received.text) {
    button("Copy", async event => {
      await navigator.clipboard.writeText(received.text);
      event.target.textContent = "Copied";
    });
  }
  button(received.text ? "Regenerate" : "Retry", () => abort || again());
  row.lastChild.classList.add("regenerate");
  if (received.tokens.length) {
    button("Probabilities", () => {
      const shown = turn.querySelector(".tokens");
      if (shown) return shown.remove();
      turn.append(tokenView(received.tokens));
      turn.lastChild.scrollIntoView({ block: "nearest" });
    });
  }
  if (received.reason === "length") row.append(element("span", "cut at the maximum of new tokens", { className: "note" }));
  return row;
}

/** Tokens shaded by probability; a click lists the alternatives. */
function tokenView(tokens) {
  const details = element("table");
  const view = element("div", [element("div", tokens.map(show), { className: "list" }), details], { className: "tokens" });
  return view;

  function show(token) {
    const made = element("button", token.text.replaceAll("\n", "↵\n") || "∅", { type: "button", title: percent(token.probability) });
    made.style.setProperty("--probability", Math.sqrt(token.probability)); // shades also tell 1 % from 10 %
    made.setAttribute("aria-pressed", "false");
    made.onclick = () => {
      for (const other of view.querySelectorAll("[aria-pressed=true]")) other.setAttribute("aria-pressed", "false");
      made.setAttribute("aria-pressed", "true");
      const rows = new Map([...token.others, [token.text, token.probability]]);
      const sorted = [...rows].sort((a, b) => b[1] - a[1]);
      details.replaceChildren(...sorted.map(([text, value]) => element("tr", [
        element("td", text === token.text ? "chosen" : ""), element("td", JSON.stringify(text)), element("td", percent(value)),
        element("td", element("meter", [], { min: 0, max: 1, value })),
      ])));
      details.scrollIntoView({ block: "nearest" });
    };
    return made;
  }
}

const percent = value => (100 * value).toFixed(value < 0.001 ? 3 : 1) + " %";
