// Charts of all runs with one cursor. A page of several runs draws the first metric of a chart, and held-out accuracies.
const HELD_OUT = "held out "; // prefix of the name of a held-out set; no metric has a blank
const GROUPS = ["Learning", "Stability", "Speed", "Resources"];
// Identifier, title (at most 28 letters), unit, group ("+" for expert charts), metrics with labels.
const CHARTS = [
  ["solve", "Accuracy (train, held-out)", "%", "Learning", ["solve_rate|train", HELD_OUT]],
  ["reward", "Reward", "", "Learning", ["reward_mean|reward"]],
  ["length", "Response length", "tokens", "Learning", ["response_tokens_mean|mean", "response_tokens_max|longest"]],
  ["truncated", "Truncated / ungraded responses", "%", "Learning", ["truncated_share|truncated", "invalid_share|ungraded"]],
  ["flat", "Groups with equal rewards", "groups", "Learning", ["extra.flat_groups|equal rewards", "extra.dropped_groups|dropped"]],
  ["loss", "Loss", "", "Learning", ["loss|loss"]],
  ["parts", "Reward by part", "", "Learning", ["extra.reward.*"]],
  ["source-reward", "Reward by source", "", "Learning", ["extra.source_reward.*"]],
  ["source-right", "Right responses by source", "%", "Learning", ["extra.source_right.*"]],
  ["source-tokens", "Response length by source", "tokens", "+Learning", ["extra.source_tokens.*"]],
  ["source-share", "Groups by source", "%", "+Learning", ["extra.source_share.*"]],
  ["source-flat", "Equal rewards by source", "%", "+Learning", ["extra.source_flat.*"]],
  ["source-faults", "Truncated, ungraded by source", "%", "+Learning", ["extra.source_truncated.*", "extra.source_invalid.*"]],
  ["kl", "KL to the sampling policy", "nats", "Stability", ["kl_to_behavior|all tokens", "extra.kl_staleness|older versions", "extra.kl_same_version|same version"]],
  ["entropy", "Entropy", "nats per token", "Stability", ["extra.entropy_mean|entropy"]],
  ["grad", "Gradient norm", "", "Stability", ["grad_norm|norm"]],
  ["staleness", "Staleness", "steps", "Stability", ["staleness_mean|mean", "staleness_max|max", "staleness_limit|limit"]],
  ["ratio", "Importance ratio", "", "Stability", ["importance_ratio_mean|all tokens", "extra.importance_ratio_staleness|older versions", "extra.importance_ratio_same_version|same version"]],
  ["ratio-max", "Largest importance ratio", "", "Stability", ["importance_ratio_max|max"]],
  ["capped", "Tokens with a capped ratio", "%", "+Stability", ["capped_share|capped"]],
  ["kl-causes", "KL by cause", "nats", "+Stability", ["staleness", "rounding", "quantization", "kernels", "chunked_vs_recurrent", "truncation", "kept", "cache", "precision", "routing"].map((cause) => `extra.kl_from_${cause}|${cause}`)],
  ["mismatch", "Log-prob mismatch by cause", "nats", "+Stability", [...["rounding", "quantization", "kernels", "chunked_vs_recurrent", "truncation", "kept", "cache", "precision"].map((cause) => `extra.mismatch_from_${cause}|${cause}`), "extra.difference_same_version|all tokens"]],
  ["unserved", "Masters ahead of bfloat16", "nats", "+Stability", ["extra.unserved|difference"]],
  ["probe", "KL with equal weights", "nats", "+Stability", ["extra.probe_kl|probe"]],
  ["routing", "KL by expert routing", "nats", "+Stability", ["extra.kl_live_routes|own choice", "extra.kl_replayed_routes|recorded experts"]],
  ["agreement", "Router agreement", "%", "+Stability", ["extra.routes_agreement|agreement"]],
  ["rate", "Learning rate", "", "+Stability", ["learning_rate|rate"]],
  ["throughput", "Tokens per second", "tokens/s", "Speed", ["generated_tokens_per_s|generated", "extra.train_tokens_per_s|trained", "train_tokens_per_s|trained"]],
  ["speed", "Rollouts per second", "rollouts/s", "Speed", ["samples_per_s|rollouts"]],
  ["duration", "Step time", "s", "Speed", ["step_s|whole step", "extra.train_s|training", "train_s|training"]],
  ["sync", "Weight sync", "s", "+Speed", ["sync_s|whole sync", "extra.publish_s|publish", "extra.fetch_s|fetch", "extra.stall_s|stall"]],
  ["queue", "Rollout queues", "", "+Speed", ["waiting_rollouts|waiting", "running_rollouts|running", "ready_groups|ready groups"]],
  ["busy", "Busy time by executor", "%", "Resources", ["busy_share.*"]],
  ["memory", "Memory", "bytes", "Resources", ["extra.rss_bytes.*", "extra.peak_memory_bytes|trainer's peak"]],
  ["load", "Busiest expert by layer", "x mean", "+Resources", ["extra.expert_load.*"]],
  ["idle", "Idle experts by layer", "experts", "+Resources", ["extra.idle_experts.*"]],
];
const DASHES = [[], [6, 4], [2, 3], [9, 3, 2, 3]], plots = new Map(), HEIGHT = 200;
const MOST_LAYERS = 8; // more curves cannot be told apart
const FORESEEN = /^(response_tokens|staleness|samples_per_s|generated_tokens|step_s|busy_share|sync_s|waiting_rollouts)/; // a simulation makes up rewards and log-probabilities
const EXACT = /_(max|limit|rollouts|groups|segments)$|calls$/;
const metricOf = (pattern) => pattern.split("|")[0];

// Maxima, limits and counts have no mean that anybody has measured.
const isExact = (name, ys) => EXACT.test(name) || ys.every((y) => y == null || Number.isInteger(y));

function along(run, mode) {
  const series = run.series;
  if (mode !== "samples") return series[mode] || series.step;
  let sum = 0;
  return series.step.map((_, index) => sum += (series.samples_per_s?.[index] || 0) * (series.step_s?.[index] || 0) * (run.every || 1));
}

function smoothed(values, weight) {
  let mean = 0, norm = 0;
  return values.map((value) => {
    if (value == null) return null;
    mean = weight * mean + (1 - weight) * value;
    norm = weight * norm + (1 - weight);
    return mean / norm;
  });
}

// Of many layers, the ones with the highest values.
function ofLayers(run, names) {
  const top = (name) => Math.max(...run.series[name].filter((value) => value != null));
  if (names.length <= MOST_LAYERS || !names.every((name) => /\.\d+$/.test(name))) return names;
  const kept = new Set(names.map((name) => [top(name), name]).sort(([a], [b]) => b - a).slice(0, MOST_LAYERS).map(([, name]) => name));
  return names.filter((name) => kept.has(name));
}

// Metrics of a run that fit a chart's patterns, each with its label.
function namesOf(run, patterns) {
  return patterns.flatMap((pattern) => {
    const [name, label] = pattern.split("|");
    if (name === HELD_OUT) return [...new Set(run.evals.map((one) => one.name))].map((set) => [HELD_OUT + set, set ? `held-out ${set}` : "held-out"]);
    if (!name.endsWith("*")) return [[name, label || name.replace("extra.", "")]];
    const prefix = name.slice(0, -1), shared = patterns.length > 1 && !name.includes("bytes") ? prefix.replace(/^extra\.source_|\.$/g, "") + " " : "";
    return ofLayers(run, Object.keys(run.series).filter((one) => one.startsWith(prefix))).map((one) => [one, /expert/.test(prefix) ? `layer ${one.slice(prefix.length)}` : shared + one.slice(prefix.length)]);
  }).filter(([name]) => name.startsWith(HELD_OUT) || run.series[name]?.some((value) => value != null));
}

// [[xs, ys]], and what each curve is.
function curvesOf(id, patterns, mode, weight) {
  const tables = [], about = [], hidden = setOf("hide"), isLog = setOf("log").has(id), isAsked = id === "any-chart";
  const fit = (ys) => isLog ? ys.map((y) => y > 0 ? y : null) : ys; // a logarithmic axis has no 0
  runs.forEach((run, which) => {
    if (!run.series || (run.forecast?.text && !isAsked && !patterns.some((one) => FORESEEN.test(one)))) return;
    const xs = along(run, mode), wanted = namesOf(run, runs.length > 1 ? patterns.filter((_, index) => !index || patterns[index] === HELD_OUT) : patterns);
    wanted.forEach(([name, own], index) => {
      const place = runs.length > 1 ? which : index, color = RUN_COLORS[place % RUN_COLORS.length], dash = DASHES[(runs.length > 1 ? which + index : index) % DASHES.length];
      const label = runs.length > 1 ? run.name + (wanted.length > 1 ? ` ${own}` : "") : own, isHidden = hidden.has(`${id}/${label}`);
      if (name.startsWith(HELD_OUT)) {
        const at = (step) => mode === "step" ? step : xs[run.series.step.findLastIndex((one) => one <= step)] ?? 0;
        const evals = run.evals.filter((one) => HELD_OUT + one.name === name);
        tables.push([evals.map((one) => at(one.step)), fit(evals.map((one) => one.accuracy))]);
        about.push({ label, color, dash, isHidden, intervals: evals.map((one) => one.interval) });
        return;
      }
      const pairs = xs.map((x, at) => [x, run.series[name][at]]).filter(([x]) => x != null);
      const ys = fit(pairs.map(([, y]) => y)), isSmooth = weight > 0 && !isExact(name, ys);
      if (isSmooth) {
        tables.push([pairs.map(([x]) => x), ys]);
        about.push({ label: "", color: color + "40", dash: [], isHidden });
      }
      tables.push([pairs.map(([x]) => x), isSmooth ? smoothed(ys, weight) : ys]);
      about.push({ label, color, dash, isSmooth, isHidden });
    });
  });
  return [tables, about];
}

// A curve whose lines would not show it gets points.
const isSparse = (ys) => ys.filter((y) => y != null).length < Math.max(3, ys.length / 4);

// The interval at a place of the joined table, which has places of other curves too.
const intervalAt = (one, ys, place) => one.intervals?.[ys.slice(0, place).filter((value) => value != null).length];

function drawIntervals(plot, about) {
  const context = plot.ctx;
  about.forEach((one, index) => one.intervals && !one.isHidden && plot.data[0].forEach((x, place) => {
    const ys = plot.data[index + 1], [low, high] = (ys[place] != null && intervalAt(one, ys, place)) || [];
    if (low == null) return;
    context.strokeStyle = one.color;
    context.beginPath();
    context.moveTo(plot.valToPos(x, "x", true), plot.valToPos(low, "y", true));
    context.lineTo(plot.valToPos(x, "x", true), plot.valToPos(high, "y", true));
    context.stroke();
  }));
}

const ordinary = (_, low, high) => low == null ? [0, 1] : low === high ? [Math.min(low, 0), Math.max(high, 0) || 1] : uPlot.rangeNum(low, high, 0.08, true);
const shares = (_, low, high) => { const [from, to] = ordinary(_, low, high); return [Math.max(from, Math.min(low, 0)), Math.min(to, Math.max(high, 1))]; };
// Room for whole intervals, too.
function rangeOf(plot, low, high, unit) {
  const ends = low == null ? [] : (plot.about || []).flatMap((one) => one.isHidden ? [] : (one.intervals || []).flat());
  return (unit === "%" ? shares : ordinary)(plot, low == null ? low : Math.min(low, ...ends), high == null ? high : Math.max(high, ...ends));
}
const DECADES = { distr: 3 };

// A value with its unit, where that stands with the number.
const valued = (value, unit, digits) => unit === "%" ? (value == null || !isFinite(value) ? "–" : number(100 * value, Math.min(digits || 3, 3)) + "%") : unit === "bytes" ? bytes(value) : number(value, digits);
const ticked = (unit) => (_, ticks) => unit === "%" ? labels(ticks.map((one) => 100 * one)).map((one) => one + "%") : unit === "bytes" ? ticks.map((one) => bytes(one)) : labels(ticks);
const decade = (unit) => (_, ticks) => ticks.map((tick) => tick == null ? "" : valued(tick, unit, 3));

function chartBox(title, unit = "", attributes = {}) {
  return make("div", { class: "chart", role: "group", "aria-label": title, ...attributes },
    make("div", { class: "top" }, make("h4", { text: title, title })),
    make("div", { class: "plot" }, make("span", { class: "unit", text: unit === "%" || unit === "bytes" ? "" : unit })), make("div", { class: "key" }));
}

function plotted(box, data, about, { cursor, hooks, y = { range: ordinary }, values = (_, ticks) => labels(ticks), x = (_, ticks) => labels(ticks) }) {
  const axis = { stroke: theme("quiet"), grid: { stroke: theme("line"), width: 1 }, ticks: { show: false }, font: `11px ${getComputedStyle(document.body).fontFamily}` };
  return new uPlot({
    width: box.clientWidth - 14, height: HEIGHT, padding: [box.querySelector(".unit").textContent ? 24 : 10, 10, 0, 0], legend: { show: false }, scales: { x: { time: false }, y }, hooks,
    cursor: { ...cursor, points: { size: 5 } }, axes: [{ ...axis, grid: { show: false }, size: 26, gap: 4, values: x }, { ...axis, size: 54, gap: 6, values }],
    series: [{}, ...about.map((one) => ({
      stroke: one.color, width: one.label ? 1.7 : 1, dash: one.dash, spanGaps: true, show: !one.isHidden,
      points: { show: (plot, at) => Boolean(one.intervals) || isSparse(plot.data[at]), size: 5 },
    }))],
  }, data, box.querySelector(".plot"));
}

// The place of a group's charts; those for experts are folded away.
function placeOf(group) {
  const name = group.replace("+", "");
  let box = byId(`group-${name}`);
  if (!box) {
    box = make("div", { class: "group", id: `group-${name}` }, make("h3", { text: name }), make("div", { class: "charts" }),
      make("details", { class: "more", open: setOf("open").has(name), ontoggle: (event) => { if (setOf("open").has(name) !== event.target.open) flip("open", name); drawCurves(); } },
        make("summary", {}), make("div", { class: "charts" })));
    const later = GROUPS.slice(GROUPS.indexOf(name) + 1).map((one) => byId(`group-${one}`)).find(Boolean);
    if (name === "Chosen") byId("charts").prepend(box);
    else byId("charts").insertBefore(box, later || null);
  }
  return box.querySelector(group.startsWith("+") ? ".more > .charts" : ":scope > .charts");
}

function dropChart(id) {
  byId(id)?.remove();
  plots.get(id)?.destroy();
  plots.delete(id);
}

function drawChart(id, title, unit, group, patterns) {
  const mode = byId("along").value, [tables, about] = curvesOf(id, patterns, mode, +byId("smoothing").value);
  if (!tables.some(([, ys]) => ys.some((y) => y != null)) && !setOf("log").has(id)) return dropChart(id);
  let box = byId(id);
  if (!box) {
    box = chartBox(title, unit, { id });
    box.querySelector(".top").append(menuOf(id, title));
    const place = placeOf(group), order = CHARTS.map(([one]) => one);
    place.insertBefore(box, [...place.children].find((one) => order.indexOf(one.id) > order.indexOf(id)) || null);
  }
  if (!box.checkVisibility()) return; // it is drawn when its group is unfolded
  const data = uPlot.join(tables), isLog = setOf("log").has(id), shape = JSON.stringify([isLog, mode, about.map((one) => [one.label, one.color, one.isHidden])]);
  const old = plots.get(id);
  if (old && old.shape === shape) {
    old.about = about;
    old.setData(data);
    showValues(old);
    return;
  }
  old?.destroy();
  drawKey(box, id, about);
  const plot = plotted(box, data, about, {
    cursor: { sync: { key: "all" } }, hooks: { draw: [(one) => drawIntervals(one, one.about || about)], setCursor: [showValues] },
    ...isLog ? { y: DECADES, values: decade(unit) } : { y: { range: (one, low, high) => rangeOf(one, low, high, unit) }, values: ticked(unit) }, x: mode === "wall_s" ? (_, ticks) => ticks.map(seconds) : undefined,
  });
  Object.assign(plot, { shape, about, box, unit });
  plots.set(id, plot);
  if (!isLog && about.some((one) => one.intervals)) plot.setData(data); // now that the intervals are known
  showValues(plot);
}

// The legend below a chart: one stop of the Tab key. A click hides a curve.
function drawKey(box, id, about) {
  const named = about.filter((one) => one.label);
  box.querySelector(".key").replaceChildren(...named.map((one, index) => make("button", {
    type: "button", class: "entry", "aria-pressed": String(!one.isHidden), tabindex: index ? -1 : 0, title: one.isHidden ? "Show this curve" : "Hide this curve",
    onclick: () => { flip("hide", `${id}/${one.label}`); drawCurves(); byId(id).querySelectorAll(".key .entry")[index].focus(); },
    onkeydown: (event) => {
      const next = { ArrowRight: "nextElementSibling", ArrowLeft: "previousElementSibling" }[event.key];
      if (next) { event.preventDefault(); event.stopPropagation(); event.currentTarget[next]?.focus(); }
    },
  }, swatch(stroke(one.color, one.dash)), make("span", { class: "label", text: one.label }), make("span", { class: "value" }))));
}

function menuOf(id, title) {
  const act = (text, does, attributes = {}) => make("button", { type: "button", text, ...attributes, onclick: (event) => { does(event.currentTarget); event.currentTarget.closest("details").open = false; } });
  return make("details", { class: "menu" }, make("summary", { "aria-label": `Menu of ${title}`, text: "⋯" }), make("div", {},
    act("Logarithmic axis", (button) => { button.setAttribute("aria-pressed", flip("log", id)); drawCurves(); }, { "data-do": "log", "aria-pressed": String(setOf("log").has(id)) }),
    act("Download PNG", () => savePicture(id, title), { "data-do": "png" }),
    act("Download CSV", () => saveTable(id), { "data-do": "csv" }),
    act("Copy link to chart", () => { chosen.target = id; keep("", ""); copyLink(); }, { "data-do": "link" })));
}

const fileName = (id, ending) => `${runs.map((run) => run.name).join("-")}-${id}.${ending}`.replace(/[^\w.-]+/g, "_");

function csvOf(id) {
  const plot = plots.get(id), told = (text) => `"${String(text).replace(/"/g, '""')}"`;
  const kept = plot.about.map((one, index) => [one, plot.data[index + 1], plot.data[index]]).filter(([one]) => one.label);
  const head = [byId("along").value, ...kept.map(([one]) => one.label)].map(told).join(",");
  return [head, ...plot.data[0].map((x, place) => [x, ...kept.map(([one, ys, measured]) => (one.isSmooth ? measured : ys)[place] ?? "")].join(","))].join("\n") + "\n";
}

const saveTable = (id) => download(fileName(id, "csv"), new Blob([csvOf(id)], { type: "text/csv" }));

// The chart with title and legend, as it is seen.
function pictureOf(id, title) {
  const plot = plots.get(id), source = plot.ctx.canvas, ratio = window.devicePixelRatio || 1, top = 30 * ratio, font = getComputedStyle(document.body).fontFamily, edge = 10 * ratio;
  const canvas = make("canvas", { width: source.width, height: 1 }), context = canvas.getContext("2d"), small = `${12 * ratio}px ${font}`;
  context.font = small;
  let left = edge, line = 0;
  const places = plot.about.filter((one) => one.label && !one.isHidden).map((one) => {
    const width = context.measureText(one.label).width + 36 * ratio;
    if (left > edge && left + width > canvas.width) [left, line] = [edge, line + 1];
    left += width;
    return [one, left - width, top + source.height + (14 + 20 * line) * ratio];
  });
  canvas.height = top + source.height + (26 + 20 * line) * ratio; // which also resets the context
  context.fillStyle = theme("card");
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.drawImage(source, 0, top);
  context.fillStyle = theme("text");
  context.font = `600 ${14 * ratio}px ${font}`;
  context.fillText(title + (plot.unit && !/^(%|bytes)$/.test(plot.unit) ? `, ${plot.unit}` : ""), edge, 20 * ratio);
  context.font = small;
  context.lineWidth = 2.5 * ratio;
  places.forEach(([one, x, y]) => {
    context.strokeStyle = one.color;
    context.setLineDash(one.dash.map((size) => size * ratio));
    context.beginPath();
    context.moveTo(x, y - 4 * ratio);
    context.lineTo(x + 16 * ratio, y - 4 * ratio);
    context.stroke();
    context.fillText(one.label, x + 21 * ratio, y);
  });
  return canvas;
}

const savePicture = (id, title) => pictureOf(id, title).toBlob((blob) => download(fileName(id, "png"), blob));

// Each name shows the value at the cursor, or the last value. The hovered chart also shows the smoothed value.
function showValues(plot) {
  if (!plot.about) return;
  const at = plot.cursor.idx, slots = plot.box.querySelectorAll(".key .value"), isUnder = plot.over.matches(":hover") && at != null;
  const curves = plot.about.map((one, place) => [one, plot.data[place + 1], plot.data[place]]).filter(([one]) => one.label);
  const lines = curves.map(([one, ys, measured], place) => {
    const values = one.isSmooth ? measured : ys, isRare = at == null || one.intervals; // between evaluations the last one counts
    const index = isRare ? values.findLastIndex((value, place) => value != null && place <= (at ?? Infinity)) : at;
    const value = values[index];
    slots[place].textContent = value == null ? "" : plot.unit === "%" || plot.unit === "bytes" ? valued(value, plot.unit, 3) : brief(value);
    if (value == null || one.isHidden) return null;
    const interval = intervalAt(one, ys, index), more = interval ? ` (${valued(interval[0], plot.unit, 3)} to ${valued(interval[1], plot.unit, 3)})` : one.isSmooth ? ` (smoothed ${valued(ys[index], plot.unit)})` : "";
    return make("div", {}, swatch(stroke(one.color, one.dash)), `${one.label} ${valued(value, plot.unit)}${more}`);
  }).filter(Boolean);
  plot.box.querySelector(".tip")?.remove();
  if (isUnder && lines.length) {
    const tip = make("div", { class: "tip" }, make("b", { text: placeText(plot.data[0][at]) }), ...lines), left = plot.over.offsetLeft + plot.cursor.left;
    plot.box.querySelector(".plot").append(tip);
    const room = plot.box.querySelector(".plot").clientWidth, isRight = left + 14 + tip.offsetWidth <= room;
    tip.style.left = Math.max(isRight ? left + 14 : left - 14 - tip.offsetWidth, 2) + "px";
  }
  const every = Math.max(...runs.map((run) => run.every || 1)), means = every > 1 ? `, means of ${every} steps, largest of maxima` : "";
  byId("cursor").textContent = at == null ? "Legends show the last step." : placeText(plot.data[0][at]) + means;
}

const placeText = (x) => ({ step: `Step ${number(x, 6)}`, samples: `${number(x)} samples`, wall_s: seconds(x) })[byId("along").value];

byId("charts").addEventListener("keydown", (event) => {
  const all = [...plots.values()], first = all.find((plot) => !plot.about.some((one) => one.intervals)) || all[0]; // held-out sets also have step 0
  const by = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[event.key];
  if (!first || !by || event.target !== byId("charts")) return;
  event.preventDefault();
  const xs = first.data[0], at = Math.min(Math.max((first.cursor.idx ?? xs.length) + by, 0), xs.length - 1);
  plots.forEach((plot) => plot.setCursor({ left: plot.valToPos(xs[at], "x"), top: 0 }, true, false));
});

function drawCurves() {
  CHARTS.forEach((chart) => drawChart(...chart));
  const chosenMetric = byId("any").value;
  if (chosenMetric) drawChart("any-chart", chosenMetric.replace("extra.", ""), /_bytes/.test(chosenMetric) ? "bytes" : /_s$/.test(chosenMetric) ? "s" : "", "Chosen", [chosenMetric]);
  else dropChart("any-chart");
  document.querySelectorAll("#charts .group").forEach((group) => {
    const [few, many] = [":scope > .charts", ".more > .charts"].map((place) => group.querySelector(place).children.length);
    group.hidden = !few && !many;
    group.querySelector(".more").hidden = !many;
    group.querySelector(".more > summary").textContent = `${counted(many, "expert chart")}`;
  });
  drawStarting();
}

// Before the first step: what a start has done so far, as the terminal lists it.
function drawStarting() {
  const waiting = runs.filter((run) => run.state && !run.steps && run.state !== "planned" && run.state !== "loading");
  byId("starting").replaceChildren(...waiting.map((run) => {
    const phases = run.texts.filter(([kind]) => kind === "phase"), isOver = run.state !== "running";
    const lines = phases.map(([, at, text], index) => {
      const next = phases[index + 1]?.[1], isDone = next != null || isOver;
      return make("li", { class: isDone ? "" : "now", text: `${isDone ? "✓" : "›"} ${short(text, 80)}${next != null ? `  ${seconds(next - at)}` : ""}` });
    });
    const title = isOver ? "No step was completed" : "Starting";
    return empty(runs.length > 1 ? `${run.name}: ${title.toLowerCase()}` : title, isOver ? "There is nothing to draw." : "Charts appear after the first step.", lines.length ? make("ul", { class: "phases" }, ...lines) : "");
  }));
}

function restyleCurves() {
  plots.forEach((plot) => plot.destroy());
  plots.clear();
  drawCurves();
}

function listMetrics() {
  const known = new Set([...byId("any").options].map((one) => one.value));
  const names = new Set(runs.flatMap((run) => Object.keys(run.series || {})));
  [...names].filter((name) => !known.has(name)).sort().forEach((name) => byId("any").append(make("option", { value: name, text: name.replace("extra.", "") })));
  if (chosen.values.get("metric") && !byId("any").value) byId("any").value = chosen.values.get("metric");
}

[["smoothing", "smooth", "0.6"], ["along", "x", "step"], ["any", "metric", ""]].forEach(([id, name, ordinary]) => {
  if (chosen.values.has(name)) byId(id).value = chosen.values.get(name);
  byId(id).addEventListener("input", () => {
    keep(name, byId(id).value === ordinary ? "" : byId(id).value);
    drawCurves();
    if (id === "any" && byId("any").value) byId("any-chart")?.scrollIntoView({ block: "nearest" });
  });
});
document.addEventListener("click", (event) => document.querySelectorAll(".menu[open]").forEach((menu) => { if (!menu.contains(event.target)) menu.open = false; }));
document.addEventListener("keydown", (event) => { if (event.key === "Escape") document.querySelectorAll(".menu[open]").forEach((menu) => { menu.open = false; }); });
new ResizeObserver(() => plots.forEach((plot) => {
  const width = plot.root.closest(".chart").clientWidth - 14;
  if (width > 0 && Math.abs(width - plot.width) > 1) plot.setSize({ width, height: HEIGHT });
})).observe(byId("charts"));
