// Find rollouts, and see each token of one: which policy wrote it, how likely it was, what it earned.
const looked = { rows: [], at: -1, color: "version", token: -1 };

function inBounds(text, value) {
  if (!text.trim()) return true;
  const [low, high] = text.split(".."), isRange = text.includes("..");
  const from = low.trim() ? +low : -Infinity, to = isRange ? (high.trim() ? +high : Infinity) : from;
  return Number.isNaN(from) || Number.isNaN(to) || (from <= value && value <= to);
}

// A table of rows to choose from is one stop of the Tab key; arrows go on from there.
function chosenRow(cells, isChosen, choose, attributes) {
  return row(cells, { ...attributes, tabindex: isChosen ? 0 : -1, onclick: choose, onkeydown: (event) => {
    const next = { ArrowDown: "nextElementSibling", ArrowUp: "previousElementSibling" }[event.key];
    if (event.key === "Enter") choose();
    else if (next) { event.preventDefault(); event.currentTarget[next]?.focus(); }
  } });
}

const isUnfiltered = () => [...new FormData(byId("find")).values()].every((value) => !value);

let finding = 0;
async function find(event) {
  event?.preventDefault();
  const wanted = Object.fromEntries(new FormData(byId("find"))), run = timed(), mine = ++finding;
  let found = run.rollouts;
  while (page.live) {
    found = run.rollouts = await ask("rollouts", { run: view.run, ...wanted });
    if (mine !== finding) return;
    if (!found.more) break;
    byId("said").textContent = `still reading: ${found.said}`;
  }
  const text = wanted.prompt.toLowerCase();
  looked.rows = (found?.rows || []).filter((one) => inBounds(wanted.step, one.step) && inBounds(wanted.reward, one.reward)
    && inBounds(wanted.tokens, one.token_ids.length) && inBounds(wanted.staleness, one.staleness)
    && (!wanted.outcome || one.outcome === wanted.outcome) && `${one.source || ""} ${one.prompt}`.toLowerCase().includes(text));
  if (page.live) looked.rows.sort((one, other) => other.step - one.step || other.group_id - one.group_id || one.index - other.index);
  byId("said").textContent = `${looked.rows.length} fit${looked.rows.length > 400 ? ", the first 400 are listed" : ""}; in this page: ${found?.said || "none"}.`;
  const rows = looked.rows.slice(0, 400).map((one, index) => chosenRow(
    [one.step, one.group_id, one.reward, one.advantage, one.token_ids.length, one.staleness, one.outcome, short(one.source ? `${one.source}: ${one.prompt}` : one.prompt, 60)],
    !index, () => show(index), { "aria-selected": "false" }));
  byId("list").replaceChildren(table(["step", "group", "reward", "advantage", "tokens", "staleness", "outcome", "prompt"], rows));
  if (looked.rows.length) show(0);
  else byId("one").replaceChildren();
}

function versionsOf(one) {
  return one.policy_versions.flatMap(([version, count]) => Array(count).fill(version));
}

const mix = (color, share) => `color-mix(in srgb, ${color} ${Math.round(100 * Math.min(Math.max(share, 0), 1))}%, transparent)`;
const signed = (value, full) => value == null || !value ? "" : mix(value > 0 ? "#d64550" : "#3b7dd8", 0.08 + 0.5 * Math.min(Math.abs(value) / full, 1));

const advantageOf = (one, at) => one.advantages?.[at] ?? one.advantage;

// What colors a token, and what that means.
const COLORINGS = {
  version: [(one, at, versions) => mix(RUN_COLORS[((versions[at] % 6) + 6) % 6], 0.4), () => "each policy version has a color of its own"],
  "importance ratio": [(one, at) => one.trainer_logprobs?.[at] == null ? "" : signed(one.trainer_logprobs[at] - one.behavior_logprobs[at], 0.3),
    (one) => one.trainer_logprobs ? "red: likelier under the trainer than where it was sampled; blue: less likely; full color from a factor of e^0.3" : "the trainer did not compute this rollout, as it teaches nothing, or its log-probs were not recorded"],
  "log-prob": [(one, at) => mix("#b459c4", 0.55 * Math.min(-one.behavior_logprobs[at] / 4, 1)), () => "the darker, the less likely when it was sampled; full color from -4 nats"],
  advantage: [(one, at) => signed(-advantageOf(one, at), 1.5), (one) => "blue: better than expected; red: worse; " + (one.advantages ? "each token has its own" : "all tokens have that of the rollout")],
};

function tokensOf(one) {
  const words = timed().rollouts.words, versions = versionsOf(one), [color] = COLORINGS[looked.color];
  return one.token_ids.map((id, at) => {
    const isSeen = versions[at] < 0, begins = at > 0 && !isSeen && versions[at - 1] < 0;
    return make("span", { class: `token${isSeen ? " seen" : ""}${begins ? " turn" : ""}`, "data-at": at, background: isSeen ? "" : color(one, at, versions),
      text: shown(words[id] ?? `⟨${id}⟩`) });
  });
}

function show(index) {
  looked.at = index;
  looked.token = -1;
  document.querySelectorAll("#list tbody tr").forEach((line, place) => {
    line.setAttribute("aria-selected", place === index);
    line.tabIndex = place === index ? 0 : -1;
  });
  drawRollout();
}

function drawRollout() {
  const one = looked.rows[looked.at];
  if (!one) return;
  const detail = make("p", { class: "quiet", id: "token", "aria-live": "polite", text: "Point at a token, or focus the text and use the arrow keys." });
  const choice = make("select", { id: "coloring", onchange: (event) => { looked.color = event.target.value; drawRollout(); byId("coloring").focus(); } },
    ...Object.keys(COLORINGS).map((name) => make("option", { value: name, text: name, selected: name === looked.color })));
  const body = make("div", { class: "text", id: "tokens", tabindex: 0, dir: "auto", onmouseover: (event) => point(event.target.dataset.at), onkeydown: (event) => {
    const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (by) { event.preventDefault(); point(Math.min(Math.max(looked.token + by, 0), one.token_ids.length - 1)); }
  } }, ...tokensOf(one));
  const group = looked.rows.map((other, index) => [other, index]).filter(([other]) => other.step === one.step && other.group_id === one.group_id);
  byId("one").replaceChildren(
    make("div", { class: "controls" }, make("label", {}, "color by ", choice), make("span", { class: "quiet", text: COLORINGS[looked.color][1](one) })),
    make("div", { class: "text", id: "prompt", text: shown(one.prompt) }), body, detail,
    make("p", { text: `reward ${number(one.reward)} (${one.outcome}${one.reason ? ": " + short(one.reason, 200) : ""}), advantage ${number(one.advantage)}, ${one.token_ids.length} tokens, ` +
      `${one.turns} turn${one.turns === 1 ? "" : "s"}, staleness ${one.staleness}, ended by ${one.finish_reason}; right is ${short(one.answer ?? "not known", 80)}` }),
    make("p", { class: "quiet", text: "Dotted and slanted: what the environment wrote. A bar on the left: a turn begins." +
      (Object.keys(timed().rollouts.words).length ? "" : " Tokens are shown by their numbers, as the run's tokenizer (model.path) was not found where this page was made.") }),
    make("h3", { text: `Its group (${group.length} here)` }),
    table(["index", "reward", "advantage", "tokens", "response"], group.map(([other, place]) => chosenRow(
      [other.index, other.reward, other.advantage, other.token_ids.length, short(other.response, 90)],
      place === looked.at, () => show(place), { class: place === looked.at ? "differs" : null }))));
}

function point(at) {
  if (at == null) return;
  looked.token = +at;
  const one = looked.rows[looked.at], version = versionsOf(one)[at], own = one.behavior_logprobs[at], trainer = one.trainer_logprobs?.[at];
  document.querySelectorAll(".token.at").forEach((token) => token.classList.remove("at"));
  document.querySelector(`[data-at="${+at}"]`)?.classList.add("at");
  byId("token").textContent = `token ${+at + 1} of ${one.token_ids.length}, id ${one.token_ids[at]}: ` + (version < 0 ? "written by the environment" :
    `version ${version}, log-prob ${number(own)}` + (trainer == null ? "" : `, trainer's ${number(trainer)}, importance ratio ${number(Math.exp(trainer - own))}`) + `, advantage ${number(advantageOf(one, at))}${one.advantages ? "" : " (of the rollout)"}`);
}

byId("find").addEventListener("submit", find);
byId("find").addEventListener("change", find);
