// Rollouts by prompt group, and each token of one: which policy version sampled it, how likely it was, what it earned.
const looked = { rows: [], groups: [], at: -1, color: "version", token: -1 };
const MOST_SHOWN = 400; // rollouts in the list
const VERDICTS = new Map([[true, "right"], [false, "wrong"], [null, "not judged"], [undefined, "not recorded"]]);
const verdictOf = (one) => VERDICTS.get(one.right);
const VERDICT_LEVELS = { right: "good", "not judged": "advice" };

function inBounds(text, value) {
  if (!text.trim()) return true;
  const [low, high] = text.split(".."), isRange = text.includes("..");
  const from = low.trim() ? +low : -Infinity, to = isRange ? (high.trim() ? +high : Infinity) : from;
  return Number.isNaN(from) || Number.isNaN(to) || (from <= value && value <= to);
}

// A table of rows to choose from is one stop of the Tab key; arrows move on from there.
function chosenRow(cells, isChosen, choose, attributes, turn) {
  return row(cells, { ...attributes, tabindex: isChosen ? 0 : -1, onclick: choose, onkeydown: (event) => {
    const next = { ArrowDown: "nextElementSibling", ArrowUp: "previousElementSibling" }[event.key], by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (event.key === "Enter") choose(event);
    else if (next) { event.preventDefault(); event.currentTarget[next]?.focus(); }
    else if (by && turn) { event.preventDefault(); turn(by); }
  } });
}

const isUnfiltered = () => [...new FormData(byId("find")).values()].every((value) => !value);

function restoreFilters() {
  for (const field of byId("find").elements) if (field.name && chosen.values.has(`find.${field.name}`)) field.value = chosen.values.get(`find.${field.name}`);
}

let finding = 0;
async function find(event) {
  event?.preventDefault();
  const wanted = Object.fromEntries(new FormData(byId("find"))), run = timed(), mine = ++finding;
  if (event) Object.entries(wanted).forEach(([name, value]) => keep(`find.${name}`, value));
  let found = run.rollouts;
  while (page.live) {
    found = run.rollouts = await ask("rollouts", { run: view.run, ...wanted });
    if (mine !== finding) return;
    if (!found.more) break;
    byId("said").textContent = `Still reading. ${found.said}`;
  }
  const text = wanted.prompt.toLowerCase();
  looked.rows = (found?.rows || []).filter((one) => inBounds(wanted.step, one.step) && inBounds(wanted.reward, one.reward)
    && inBounds(wanted.tokens, one.token_ids.length) && inBounds(wanted.staleness, one.staleness)
    && (!wanted.right || verdictOf(one) === wanted.right) && `${one.source || ""} ${one.prompt}`.toLowerCase().includes(text));
  if (page.live) looked.rows.sort((one, other) => other.step - one.step || other.group_id - one.group_id || one.index - other.index);
  drawList(found);
}

// One row per prompt group, with a square per rollout, as many groups as hold MOST_SHOWN rollouts.
function drawList(found) {
  const groups = new Map();
  looked.rows.forEach((one, at) => {
    const key = `${one.step}/${one.group_id}`;
    if (groups.has(key)) groups.get(key).push(at);
    else groups.set(key, [at]);
  });
  let num = 0;
  looked.groups = [...groups.values()].filter((group) => (num += group.length) <= MOST_SHOWN || num === group.length);
  const showing = looked.groups.reduce((sum, group) => sum + group.length, 0), total = looked.rows.length;
  byId("said").textContent = page.live ? `${found?.said || ""}.` : total ? `Showing ${showing.toLocaleString("en")} of ${counted(total, isUnfiltered() ? "sampled rollout" : "matching rollout")}. This file has a ${found.said}.` : "";
  if (!total) {
    byId("list").replaceChildren(empty(isUnfiltered() ? "No rollouts" : "No rollout matches", isUnfiltered() ? (timed().state === "running" && !timed().steps ? "Rollouts appear after the first step." : shown(found?.said || "None are recorded.")) : "Widen the filters, or clear them."));
    byId("one").replaceChildren();
    return;
  }
  const scored = looked.rows.filter((one) => one.right !== null).map((one) => one.reward), low = Math.min(...scored), high = Math.max(...scored);
  looked.share = (one) => high > low ? (one.reward - low) / (high - low) : 1;
  const rows = looked.groups.map((group, place) => {
    const [one] = group.map((at) => looked.rows[at]), judged = group.map((at) => looked.rows[at]).filter((other) => other.right !== null);
    const choose = (event) => show(+(event?.target?.dataset?.at ?? group[0])), turn = (by) => show(group[(group.indexOf(looked.at) + by + group.length) % group.length]);
    const cells = [String(one.step), squaresOf(group), judged.length ? number(judged.reduce((sum, other) => sum + other.reward, 0) / judged.length, 3) : "–", short(one.source ? `${one.source}: ${one.question ?? one.prompt}` : one.question ?? one.prompt, 90)];
    const line = chosenRow(cells, !place, choose, { "aria-selected": "false" }, turn);
    line.lastElementChild.className = "prompt";
    return line;
  });
  byId("list").replaceChildren(table(["Step", "Rollouts", "Mean reward", "Prompt"], rows));
  show(looked.groups[0][0]);
}

// The stronger the color, the higher the reward; dashed where the reward could not judge.
const squaresOf = (group) => make("span", { class: "squares" }, ...group.map((at) => {
  const one = looked.rows[at];
  return make("span", { class: `square${one.right === null ? " unjudged" : ""}`, "data-at": at, title: `rollout ${one.index}: ${verdictOf(one)}, reward ${number(one.reward, 3)}`,
    background: one.right === null ? "transparent" : mix("#1f8f5f", 0.04 + 0.96 * looked.share(one)) });
}));

function versionsOf(one) {
  return one.policy_versions.flatMap(([version, count]) => Array(count).fill(version));
}

const mix = (color, share) => `color-mix(in srgb, ${color} ${Math.round(100 * Math.min(Math.max(share, 0), 1))}%, transparent)`;
const signed = (value, full) => value == null || !value ? "" : mix(value > 0 ? "#e07b28" : "#3b7dd8", 0.08 + 0.5 * Math.min(Math.abs(value) / full, 1));

const advantageOf = (one, at) => one.advantages?.[at] ?? one.advantage;

// What colors a token, and what that means.
const COLORINGS = {
  version: [(one, at, versions) => mix(RUN_COLORS[((versions[at] % 6) + 6) % 6], 0.35), () => "One color per policy version."],
  "importance ratio": [(one, at) => one.trainer_logprobs?.[at] == null ? "" : signed(one.trainer_logprobs[at] - one.behavior_logprobs[at], 0.3),
    (one) => one.trainer_logprobs ? "Orange: more likely under the trainer than when it was sampled. Blue: less likely." : "The trainer recorded no log-probs of this rollout: it gave no gradient, or the run did not record them."],
  "log-prob": [(one, at) => mix("#b459c4", 0.55 * Math.min(-one.behavior_logprobs[at] / 4, 1)), () => "Darker: less likely when it was sampled. Full color from -4 nats."],
  advantage: [(one, at) => signed(-advantageOf(one, at), 1.5), (one) => "Blue: better than the group's mean. Orange: worse. " + (one.advantages ? "Each token has its own." : "All tokens have that of the rollout.")],
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
    const isChosen = looked.groups[place].includes(index);
    line.setAttribute("aria-selected", isChosen);
    line.tabIndex = isChosen ? 0 : -1;
  });
  document.querySelectorAll("#list .square").forEach((one) => one.classList.toggle("at", +one.dataset.at === index));
  drawRollout();
}

function partsOf(one) {
  const parts = Object.entries(one.reward_parts || {});
  return parts.map(([name, value]) => fact(`Reward: ${short(name, 40)}`, number(value)));
}

const fact = (name, value) => make("div", {}, make("span", { text: name }), value);

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
  const verdict = verdictOf(one), hasWords = Object.keys(timed().rollouts.words).length, versions = one.policy_versions.some(([version]) => version < 0);
  byId("one").replaceChildren(
    make("div", { class: "head" }, `Step ${one.step}, group ${one.group_id}, rollout ${one.index}`, make("span", { class: `pill ${VERDICT_LEVELS[verdict] || ""}`, id: "verdict", text: verdict })),
    make("div", { class: "facts" }, fact("Reward", number(one.reward)), ...partsOf(one), fact("Advantage", number(one.advantage)), fact("Expected answer", short(one.answer ?? "not recorded", 80)),
      fact("Tokens", String(one.token_ids.length)), fact("Turns", String(one.turns)), fact("Staleness", String(one.staleness)), fact("Ended by", one.finish_reason)),
    one.reason ? make("p", { class: "quiet", text: `Reason: ${short(one.reason, 200)}` }) : "",
    make("div", { class: "caption", text: "Prompt" }), make("div", { class: "text", id: "prompt", text: shown(one.prompt) }),
    make("div", { class: "controls" }, make("label", {}, "Response, colored by ", choice), make("span", { text: COLORINGS[looked.color][1](one) })), body, detail,
    make("p", { class: "quiet", text: [versions ? "Dotted: written by the environment. A bar on the left: a turn begins." : "", hasWords ? "" : "Tokens are shown by number, as the run's tokenizer (model.path) was not found where this page was made."].filter(Boolean).join(" ") }),
    make("h3", { text: `Rollouts of this group (${group.length} here)` }),
    table(["Rollout", "Verdict", "Reward", "Advantage", "Tokens", "Response"], group.map(([other, place]) => chosenRow(
      [String(other.index), verdictOf(other), other.reward, other.advantage, other.token_ids.length, short(other.response, 90)],
      place === looked.at, () => show(place), { class: place === looked.at ? "differs" : null }))));
}

function point(at) {
  if (at == null) return;
  looked.token = +at;
  const one = looked.rows[looked.at], version = versionsOf(one)[at], own = one.behavior_logprobs[at], trainer = one.trainer_logprobs?.[at];
  document.querySelectorAll(".token.at").forEach((token) => token.classList.remove("at"));
  document.querySelector(`[data-at="${+at}"].token`)?.classList.add("at");
  byId("token").textContent = `token ${+at + 1} of ${one.token_ids.length}, id ${one.token_ids[at]}: ` + (version < 0 ? "written by the environment" :
    `version ${version}, log-prob ${number(own)}` + (trainer == null ? "" : `, trainer's ${number(trainer)}, importance ratio ${number(Math.exp(trainer - own))}`) + `, advantage ${number(advantageOf(one, at))}${one.advantages ? "" : " (of the rollout)"}`);
}

byId("find").addEventListener("submit", find);
byId("find").addEventListener("change", find);
