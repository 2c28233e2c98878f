// Curves of all runs, with one cursor. The first metric of a chart is drawn for every run, the others where there is one.
const HELD_OUT = "held out "; // before the name of a set; no metric has a blank
const CHARTS = [
  ["reward", "Reward", ["reward_mean"]],
  ["solve", "Solve rate, held-out accuracy and its interval of 95 %", ["solve_rate", HELD_OUT]],
  ["length", "Response length, tokens", ["response_tokens_mean", "response_tokens_max"]],
  ["source-reward", "Reward by source", ["extra.source_reward.*"]],
  ["source-right", "Share of right responses by source", ["extra.source_right.*"]],
  ["source-tokens", "Response length by source, tokens", ["extra.source_tokens.*"]],
  ["source-share", "Share of the groups by source", ["extra.source_share.*"]],
  ["source-flat", "Share of a source's groups with equal rewards", ["extra.source_flat.*"]],
  ["source-faults", "Cut by length, invalid rewards, by source", ["extra.source_truncated.*", "extra.source_invalid.*"]],
  ["truncated", "Shares: cut by length, invalid rewards", ["truncated_share", "invalid_share"]],
  ["staleness", "Staleness and its bound, steps", ["staleness_mean", "staleness_max", "staleness_limit"]],
  ["ratio", "Importance ratio", ["importance_ratio_mean", "extra.importance_ratio_staleness", "extra.importance_ratio_same_version"]],
  ["ratio-max", "Largest importance ratio", ["importance_ratio_max"]],
  ["kl", "KL to the behavior policy by age of tokens, nats", ["kl_to_behavior", "extra.kl_staleness", "extra.kl_same_version"]],
  ["kl-causes", "KL by cause, of some sequences, nats", ["extra.kl_from_staleness", "extra.kl_from_rounding", "extra.kl_from_quantization", "extra.kl_from_kernels", "extra.kl_from_truncation", "extra.kl_from_kept", "extra.kl_from_cache", "extra.kl_from_precision", "extra.kl_from_routing"]],
  ["mismatch", "Mean difference of log-probabilities without staleness by cause, of some sequences, nats", ["extra.mismatch_from_rounding", "extra.mismatch_from_quantization", "extra.mismatch_from_kernels", "extra.mismatch_from_truncation", "extra.mismatch_from_kept", "extra.mismatch_from_cache", "extra.mismatch_from_precision", "extra.difference_same_version"]],
  ["routing", "KL with the routers' own choice, and with recorded experts, of some sequences, nats", ["extra.kl_live_routes", "extra.kl_replayed_routes"]],
  ["agreement", "Share of recorded choices of experts that the trainer's routers would make", ["extra.routes_agreement"]],
  ["load", "Rows of the busiest expert over the mean, by layer", ["extra.expert_load.*"]],
  ["idle", "Experts without any row, by layer", ["extra.idle_experts.*"]],
  ["probe", "KL of generators to the trainer by the same weights, of some sequences, nats", ["extra.probe_kl"]],
  ["entropy", "Entropy, nats per token", ["extra.entropy_mean"]],
  ["grad", "Gradient norm", ["grad_norm"]],
  ["loss", "Loss", ["loss"]],
  ["capped", "Share of tokens whose ratio is capped", ["capped_share"]],
  ["flat", "Groups with equal rewards, and dropped ones", ["extra.flat_groups", "extra.dropped_groups"]],
  ["speed", "Rollouts per second", ["samples_per_s"]],
  ["tokens", "Tokens per second", ["generated_tokens_per_s", "extra.train_tokens_per_s"]],
  ["duration", "Seconds per step", ["step_s", "extra.train_s"]],
  ["busy", "Share of time that executors work", ["busy_share.*"]],
  ["sync", "Weight sync, seconds", ["sync_s", "extra.publish_s", "extra.fetch_s", "extra.stall_s"]],
  ["queue", "Rollouts that wait, run, groups ready", ["waiting_rollouts", "running_rollouts", "ready_groups"]],
  ["memory", "Memory, bytes", ["extra.rss_bytes.*", "extra.peak_memory_bytes"]],
];
const DASHES = [[], [6, 4], [2, 3], [9, 3, 2, 3]], plots = new Map();
const MOST_LAYERS = 8; // more curves cannot be told apart
const FORESEEN = /^(response_tokens|staleness|samples_per_s|generated_tokens|step_s|busy_share|sync_s|waiting_rollouts)/; // rewards and log-probabilities of a simulation are made up
const EXACT = /_(max|limit|rollouts|groups|segments)$|calls$/;

// Maxima, limits and counts: a mean of them would be none.
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

// Of many layers those that reach highest.
function ofLayers(run, names) {
  const top = (name) => Math.max(...run.series[name].filter((value) => value != null));
  if (names.length <= MOST_LAYERS || !names.every((name) => /\.\d+$/.test(name))) return names;
  const kept = new Set(names.map((name) => [top(name), name]).sort(([a], [b]) => b - a).slice(0, MOST_LAYERS).map(([, name]) => name));
  return names.filter((name) => kept.has(name));
}

function namesOf(run, patterns) {
  return patterns.flatMap((pattern) => pattern === HELD_OUT ? [...new Set(run.evals.map((one) => HELD_OUT + one.name))]
    : pattern.endsWith("*") ? ofLayers(run, Object.keys(run.series).filter((name) => name.startsWith(pattern.slice(0, -1)))) : [pattern])
    .filter((name) => name.startsWith(HELD_OUT) || run.series[name]?.some((value) => value != null));
}

// [[xs, ys]], and what each curve is.
function curvesOf(patterns, mode, weight, isAsked) {
  const tables = [], about = [];
  runs.forEach((run, which) => {
    if (!run.series || (run.forecast?.text && !isAsked && !patterns.some((one) => FORESEEN.test(one)))) return;
    const xs = along(run, mode), wanted = namesOf(run, runs.length > 1 ? patterns.filter((_, index) => !index || patterns[index] === HELD_OUT) : patterns);
    wanted.forEach((name, index) => {
      const own = runs.length > 1 ? which : index, color = RUN_COLORS[own % RUN_COLORS.length], dash = DASHES[(runs.length > 1 ? which + index : index) % DASHES.length];
      const label = (runs.length > 1 ? run.name + " " : "") + name.replace("extra.", "");
      if (name.startsWith(HELD_OUT)) {
        const at = (step) => mode === "step" ? step : xs[run.series.step.findLastIndex((one) => one <= step)] ?? 0;
        const own = run.evals.filter((one) => HELD_OUT + one.name === name);
        tables.push([own.map((one) => at(one.step)), own.map((one) => one.accuracy)]);
        about.push({ label: label.trim(), color, dash, intervals: own.map((one) => one.interval) });
        return;
      }
      const pairs = xs.map((x, place) => [x, run.series[name][place]]).filter(([x]) => x != null);
      const ys = pairs.map(([, y]) => y), isSmooth = weight > 0 && !isExact(name, ys);
      if (isSmooth) {
        tables.push([pairs.map(([x]) => x), ys]);
        about.push({ label: "", color: color + "50", dash: [] });
      }
      tables.push([pairs.map(([x]) => x), isSmooth ? smoothed(ys, weight) : ys]);
      about.push({ label, color, dash, isSmooth });
    });
  });
  return [tables, about];
}

// Lines would not show it.
const isSparse = (ys) => ys.filter((y) => y != null).length < Math.max(3, ys.length / 4);

// Of the point at a place of the joined table, which has places of other curves too.
const intervalAt = (one, ys, place) => one.intervals?.[ys.slice(0, place).filter((value) => value != null).length];

function drawIntervals(plot, about) {
  const context = plot.ctx;
  about.forEach((one, index) => one.intervals && plot.data[0].forEach((x, place) => {
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

function chartBox(title, attributes) {
  return make("div", { class: "chart", role: "group", "aria-label": title, ...attributes }, make("h3", { text: title }), make("div", { class: "key" }), make("div", { class: "plot" }));
}

function plotted(box, data, about, { cursor, hooks, y = { range: ordinary }, values = (_, ticks) => labels(ticks) }) {
  const axis = { stroke: theme("quiet"), grid: { stroke: theme("line"), width: 1 }, ticks: { stroke: theme("line"), width: 1 }, font: "11px system-ui", values: (_, ticks) => labels(ticks) };
  return new uPlot({
    width: box.clientWidth - 14, height: 170, legend: { show: false }, scales: { x: { time: false }, y }, hooks,
    cursor: { ...cursor, points: { size: 5 } }, axes: [{ ...axis, size: 28 }, { ...axis, size: 58, values }],
    series: [{}, ...about.map((one) => ({
      stroke: one.color, width: one.label ? 1.6 : 1, dash: one.dash, spanGaps: true,
      points: { show: (plot, at) => Boolean(one.intervals) || isSparse(plot.data[at]), size: 5 },
    }))],
  }, data, box.querySelector(".plot"));
}

function drawChart(id, title, patterns) {
  const [tables, about] = curvesOf(patterns, byId("along").value, +byId("smoothing").value, id === "any-chart");
  let box = byId(id);
  if (!tables.length) {
    box?.remove();
    plots.get(id)?.destroy();
    plots.delete(id);
    return;
  }
  if (!box) {
    box = chartBox(title, { id });
    byId("charts").append(box);
  }
  const data = uPlot.join(tables), shape = JSON.stringify(about.map((one) => [one.label, one.color]));
  const key = box.querySelector(".key"), old = plots.get(id);
  key.replaceChildren(...about.filter((one) => one.label).map((one) => entry(stroke(one.color, one.dash), one.label, make("span", { class: "value" }))));
  if (old && old.shape === shape) {
    old.about = about;
    old.setData(data);
    return;
  }
  old?.destroy();
  const plot = plotted(box, data, about, { cursor: { sync: { key: "all" } }, hooks: { draw: [(one) => drawIntervals(one, one.about || about)], setCursor: [(one) => showValues(one, key, one.about || about)] } });
  plot.shape = shape;
  plot.about = about;
  plots.set(id, plot);
}

function showValues(plot, key, about) {
  const index = plot.cursor.idx, values = key.querySelectorAll(".value");
  // Measured is what a smooth curve has before it.
  about.map((one, place) => [one, plot.data[place + 1], plot.data[place]]).filter(([one]) => one.label).forEach(([one, ys, measured], place) => {
    const text = index == null || ys[index] == null ? "" : " " + number((one.isSmooth ? measured : ys)[index]);
    const interval = text && intervalAt(one, ys, index);
    values[place].textContent = interval ? `${text} (${number(interval[0], 3)} to ${number(interval[1], 3)})`
      : text && one.isSmooth ? `${text} (smoothed ${number(ys[index])})` : text;
  });
  const every = Math.max(...runs.map((run) => run.every || 1)), means = every > 1 ? `, means of ${every} steps, of maxima the largest` : "";
  if (index != null) byId("cursor").textContent = `${byId("along").selectedOptions[0].text}: ${number(plot.data[0][index])}${means}`;
}

byId("charts").addEventListener("keydown", (event) => {
  const [first] = plots.values(), by = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[event.key];
  if (!first || !by) return;
  event.preventDefault();
  const xs = first.data[0], at = Math.min(Math.max((first.cursor.idx ?? xs.length) + by, 0), xs.length - 1);
  plots.forEach((plot) => plot.setCursor({ left: plot.valToPos(xs[at], "x"), top: 0 }, true, false));
});

function drawCurves() {
  CHARTS.forEach((chart) => drawChart(...chart));
  const chosen = byId("any").value;
  drawChart("any-chart", chosen.replace("extra.", ""), chosen ? [chosen] : []);
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
}

["smoothing", "along", "any"].forEach((id) => byId(id).addEventListener("input", drawCurves));
new ResizeObserver(() => plots.forEach((plot) => {
  const width = plot.root.closest(".chart").clientWidth - 14;
  if (Math.abs(width - plot.width) > 1) plot.setSize({ width, height: 170 });
})).observe(byId("charts"));
