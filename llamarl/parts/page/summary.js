// The top of the page: key numbers, the comparison of runs, and what stands out.
const NAMES = { silent: "Not responding", empty: "Never started" };
const MARKS = { good: "✓", note: "·", advice: "!", bad: "✕" };

function sparkline(run, key) {
  if (!key.series || !run.series) return "";
  const isEval = key.series.startsWith(HELD_OUT);
  const ys = isEval ? run.evals.filter((one) => HELD_OUT + one.name === key.series).map((one) => one.accuracy) : run.series[key.series] || [];
  const known = ys.map((y, index) => [index, y]).filter(([, y]) => y != null && isFinite(y));
  if (known.length < 2) return "";
  const every = Math.ceil(known.length / 120), kept = known.filter((_, index) => index % every === 0 || index === known.length - 1);
  const values = isEval || kept.length < 20 ? kept.map(([, y]) => y) : smoothed(kept.map(([, y]) => y), 0.7), low = Math.min(...values), high = Math.max(...values);
  const points = values.map((y, index) => [2 + 96 * index / (values.length - 1), 22 - 20 * (high > low ? (y - low) / (high - low) : 0.5)]);
  const space = "http://www.w3.org/2000/svg", draw = (tag, attributes) => { const one = document.createElementNS(space, tag); Object.entries(attributes).forEach(([name, value]) => one.setAttribute(name, value)); return one; };
  const picture = draw("svg", { viewBox: "0 0 100 24", preserveAspectRatio: "none", "aria-hidden": "true" });
  const color = key.level === "advice" ? "var(--warn)" : RUN_COLORS[0], path = points.map(([x, y]) => `${x.toFixed(1)},${y.toFixed(1)}`).join(" ");
  picture.append(draw("polygon", { points: `2,24 ${path} 98,24`, fill: color, opacity: "0.1" }), draw("polyline", { points: path, fill: "none", stroke: color, "stroke-width": "1.6", "vector-effect": "non-scaling-stroke", "stroke-linejoin": "round" }));
  return picture;
}

function progress(run) {
  if (!run.planned_steps) return "";
  const bar = make("span", {});
  bar.style.width = `${Math.min(100 * run.steps / run.planned_steps, 100)}%`;
  return make("span", { class: "bar-line", "aria-hidden": "true" }, bar);
}

const tile = (run, key) => make("a", { class: `tile ${key.level === "good" ? "" : key.level}`, href: "#" + key.chart, "data-key": key.id },
  make("span", { class: "label", text: shown(key.label, false) }), make("span", { class: "value", text: key.value }), make("span", { class: `detail ${key.level}`, text: shown(key.detail, false) }), key.id === "steps" ? progress(run) : sparkline(run, key));

const stateText = (run) => run.state === "planned" || run.state === "loading" ? sentenceCase(run.state) : (NAMES[run.state] || sentenceCase(run.state)) + (run.forecast?.text ? " simulation" : "");
const sentenceCase = (text) => text ? text[0].toUpperCase() + text.slice(1) : "";
const pill = (run) => make("span", { class: `pill state ${STATES[run.state] || ""}`, text: stateText(run) });

// The difference of two runs' newest accuracies on a held-out set, as `eval --against` words it; their errors count as independent.
function difference(run, base, set) {
  const last = (one) => one.evals.filter((row) => row.name === set).at(-1), [mine, theirs] = [last(run), last(base)];
  if (!mine || !theirs) return ["–", ""];
  const data = (one) => JSON.stringify(one.settings.filter(([name]) => name.startsWith("data.eval")));
  if (data(run) !== data(base)) return ["not comparable: data.eval differs", "advice"];
  const points = 100 * (mine.accuracy - theirs.accuracy), half = 196 * Math.hypot(mine.error, theirs.error), told = (value) => (value < 0 ? "-" : "+") + Math.abs(value).toFixed(1);
  return [`${told(points)} points (95%: ${told(points - half)} to ${told(points + half)}), so they ${Math.abs(points) > half ? "differ" : "may be equal"}`, Math.abs(points) > half ? (points > 0 ? "good" : "advice") : ""];
}

function comparison() {
  const ids = [...new Map(runs.flatMap((run) => (run.keys || []).map((key) => [key.id, key.label])))];
  const base = runs.find((run) => run.evals.length), sets = [...new Set(runs.flatMap((run) => run.evals.map((one) => one.name)))].slice(0, 3);
  const rows = runs.map((run, index) => {
    const cells = ids.map(([id]) => {
      const key = (run.keys || []).find((one) => one.id === id);
      return key ? make("span", {}, key.value, make("small", { class: key.level, text: shown(key.detail, false) })) : "–";
    });
    const told = !base || !run.evals.length ? [["–", ""]] : run === base ? [["baseline of the comparison", ""]] : sets.map((set) => difference(run, base, set));
    return row([make("span", {}, swatch(stroke(RUN_COLORS[index % 6], DASHES[index % DASHES.length])), make("b", { text: run.name }), " ", pill(run)), ...cells,
      make("span", { class: "difference" }, ...told.map(([text, level], place) => make("small", { class: level, text: (sets.length > 1 && told.length > 1 && sets[place] ? `${sets[place]}: ` : "") + text })))]);
  });
  return make("div", { class: "card compare" }, table(["Run", ...ids.map(([, label]) => label), "Accuracy difference"], rows));
}

function drawSummary() {
  document.title = "llamarl: " + runs.map((run) => run.name).join(", ");
  byId("title").textContent = runs.map((run) => run.name).join(", ");
  byId("state").replaceChildren(...runs.length === 1 ? [pill(runs[0])] : []);
  const cards = runs.map((run, index) => make("div", { class: "run" },
    make("div", { class: "name" }, ...runs.length > 1 ? [swatch(stroke(RUN_COLORS[index % 6], DASHES[index % DASHES.length])), run.name] : ["What stands out"]),
    make("div", { class: "where", text: [run.model, run.folder].filter(Boolean).join(" · ") }),
    make("ul", { class: "findings" }, ...run.claims.map((claim) => make("li", { class: claim.level },
      make("span", { class: `mark ${claim.level}`, "aria-hidden": "true", text: MARKS[claim.level] }),
      make("span", {}, make("a", { href: "#" + claim.chart, text: sentence(short(claim.text, 400)) }), claim.advice ? make("span", { class: "try", text: claim.advice }) : ""))))));
  const top = runs.length > 1 ? comparison() : make("div", { class: "keys" }, ...(runs[0].keys || []).map((key) => tile(runs[0], key)));
  byId("summary").replaceChildren(runs.every((run) => run.state === "planned") ? "" : top, ...cards);
  byId("legend").replaceChildren(...Object.entries(WORK_COLORS).filter(([kind]) => kind !== "other").map(([kind, color]) => entry(color, kind.replace("_", " "))));
  byId("of-run").hidden = runs.length < 2;
  if (!byId("run").options.length) byId("run").replaceChildren(...runs.map((run, index) => make("option", { value: index, text: run.name })));
  hideSections();
}

// A supervised run has no rollouts, and its one executor needs no timeline.
function hideSections() {
  const isPlan = runs.every((run) => run.state === "planned"), isSupervised = runs.every((run) => run.work_kind === "sft");
  document.querySelectorAll("#content > section").forEach(({ id }) => {
    const isHidden = id === "forecast" ? byId(id).hidden : id !== "summary" && (isPlan || (isSupervised && ["timeline", "rollouts"].includes(id)));
    byId(id).hidden = isHidden;
    const link = document.querySelector(`nav a[href="#${id}"]`);
    if (link) link.hidden = isHidden;
  });
  document.querySelector("nav").hidden = isPlan;
}
