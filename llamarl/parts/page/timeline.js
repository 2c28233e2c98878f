// Work of each executor over time, what idle ones waited for, and the groups of a step. Times are milliseconds of running.
const WORK_COLORS = { generate: "#4c78a8", score: "#54a24b", train: "#f58518", weight_sync: "#8e63ce", checkpoint: "#b279a2", evaluate: "#72b7b2", start: "#9d9d9d", away: "#d9d9d9", other: "#9d9d9d" };
const ROW = 26, view = { run: +chosen.values.get("run") || 0, from: 0, to: 1, step: null };
const left = () => innerWidth < 640 ? 84 : 118;

const timed = () => runs[view.run];

// The finest picture that holds the whole view.
function bestWork() {
  const all = timed().work || [], wide = all[0];
  const fits = all.filter((one) => one.from <= view.from + 1 && one.to >= view.to - 1);
  return fits.sort((one, other) => (one.to - one.from) - (other.to - other.from))[0] || wide;
}

function drawTimeline() {
  const work = bestWork(), canvas = byId("work");
  const isEmpty = !work || !Object.keys(work.rows).length;
  byId("under").textContent = isEmpty ? (timed().state === "running" ? "The run has recorded no work yet." : "The run recorded no work of its executors.") : "";
  canvas.hidden = isEmpty;
  if (isEmpty) { byId("waits").replaceChildren(); return; }
  const names = Object.keys(work.rows).sort((one, other) => one.localeCompare(other, "en", { numeric: true })), [context, width] = sharp(canvas, Math.max(names.length, 1) * ROW + 32);
  const scale = (width - left() - 8) / Math.max(view.to - view.from, 1e-6), x = (at) => left() + (at - view.from) * scale;
  context.fillStyle = theme("text");
  names.forEach((name, index) => context.fillText(name.slice(0, 16), 10, index * ROW + 18));
  context.save();
  context.beginPath();
  context.rect(left(), 0, width - left() - 8, names.length * ROW + 26);
  context.clip();
  names.forEach((name, index) => work.rows[name].forEach(([kind, start, length, busy]) => {
    if (start > view.to || start + length < view.from) return;
    context.globalAlpha = busy == null ? 1 : 0.15 + 0.85 * busy / length;
    context.fillStyle = WORK_COLORS[page.kinds[kind]] || WORK_COLORS.other;
    context.fillRect(x(start), index * ROW + 4, Math.max(length * scale, 0.6), ROW - 8);
  }));
  context.globalAlpha = 1;
  drawTicks(context, x, names.length * ROW, width - 8);
  drawPauses(context, x, names.length * ROW);
  context.restore();
  const about = `${seconds(view.from / 1000)} to ${seconds(view.to / 1000)} after the start`, isWhole = work === timed().work[0], pauses = timed().pauses || [];
  byId("under").textContent = about + ". Blank: the executor waits." +
    (isWhole ? " Pale: work with gaps too short to draw." + (page.live ? "" : " Some steps are in this file in full detail.") : "") +
    (pauses.length ? ` Dashed: a resume; ${seconds(pauses.reduce((sum, [, pause]) => sum + pause, 0))} between sessions are left out.` : "");
  const all = work.to - work.from, share = (time) => `${(100 * time / all).toFixed(0)}%`;
  const lines = names.map((name) => {
    const causes = Object.entries(work.waits[name] || {}).sort((one, other) => other[1] - one[1]), idle = causes.reduce((sum, [, time]) => sum + time, 0);
    const bar = make("div", { class: "share", role: "presentation" }, make("span", { background: "#4c78a8" }));
    bar.firstChild.style.width = share(all - idle);
    return row([name, share(all - idle), bar, causes.map(([cause, time]) => `${cause} ${share(time)} (${seconds(time / 1000)})`).join(", ") || "nothing"]);
  });
  byId("waits").replaceChildren(table(["Executor", "Busy", "", `Waited for, ${seconds(work.from / 1000)} to ${seconds(work.to / 1000)}`], lines));
}

function drawPauses(context, x, bottom) {
  context.setLineDash([4, 3]);
  context.strokeStyle = theme("quiet");
  (timed().pauses || []).forEach(([at]) => { context.beginPath(); context.moveTo(x(1000 * at), 0); context.lineTo(x(1000 * at), bottom); context.stroke(); });
  context.setLineDash([]);
}

function drawTicks(context, x, top, right) {
  const target = (view.to - view.from) / Math.max(2, Math.min(6, (right - left()) / 90)), power = 10 ** Math.floor(Math.log10(Math.max(target, 1e-3)));
  const gap = [1, 2, 5, 10].map((factor) => factor * power).find((one) => one >= target);
  context.fillStyle = theme("quiet");
  for (let at = Math.ceil(view.from / gap) * gap; at <= view.to; at += gap) {
    context.fillRect(x(at), 0, 0.5, top);
    const text = seconds(at / 1000);
    if (x(at) + 2 + context.measureText(text).width <= right) context.fillText(text, x(at) + 2, top + 14);
  }
  let last = -1e9;
  for (const [step, flow] of Object.entries(timed().flows || {})) {
    const at = flow.trained_s * 1000;
    const mark = `▲${step}`, size = context.measureText(mark).width, place = Math.min(x(at), right - size);
    if (at < view.from || at > view.to || place < last) continue;
    last = place + size + 6;
    context.fillText(mark, place, top + 25);
  }
}

function drawFlow() {
  const flow = timed().flows?.[view.step], canvas = byId("flow");
  const groups = flow ? flow.groups.filter((group) => group.length === 5) : [];
  canvas.hidden = !groups.length;
  const steps = Object.keys(timed().flows || {});
  byId("flow-text").textContent = groups.length ? "" : steps.length ? `No times of step ${view.step ?? ""} here. Steps with times: ${steps.slice(0, 12).join(", ")}${steps.length > 12 ? ", …" : ""}.` : "No step has recorded the times of its groups.";
  if (!groups.length) return;
  const first = Math.min(...groups.map((group) => group[1])), last = flow.adopted_s || flow.trained_s;
  const height = Math.max(3, Math.min(14, 240 / groups.length)), [context, width] = sharp(canvas, groups.length * height + 34);
  const x = (at) => 8 + (at - first) / Math.max(last - first, 1e-9) * (width - 16);
  const bar = (from, to, y, size, color) => { context.fillStyle = color; context.fillRect(x(from), y, Math.max(x(to) - x(from), 0.7), size); };
  groups.forEach(([, admitted, generated, scored, taken], index) => {
    bar(admitted, generated, index * height, height - 1, WORK_COLORS.generate);
    bar(generated, scored, index * height, height - 1, WORK_COLORS.score);
    bar(scored, taken, index * height, height - 1, theme("line"));
  });
  const under = groups.length * height + 2, taken = groups[0][4];
  bar(taken, flow.trained_s, under, 12, WORK_COLORS.train);
  bar(flow.trained_s, last, under, 12, WORK_COLORS.weight_sync);
  context.fillStyle = theme("text");
  context.fillText(`0 … ${seconds(last - first)}`, 8, under + 26);
  const mean = (from, to) => seconds(groups.reduce((sum, group) => sum + group[to] - group[from], 0) / groups.length);
  byId("flow-text").textContent = `Step ${view.step}, one line for each of ${groups.length} groups. On average a group was generated after ${mean(1, 2)} (blue), ` +
    `scored after another ${mean(2, 3)} (green), and waited ${mean(3, 4)} for the step (gray). The step trained for ${seconds(flow.trained_s - taken)} (orange); ` +
    (flow.adopted_s ? `its weights were published after ${seconds(flow.published_s - flow.trained_s)} and adopted by the generators after ${seconds(flow.adopted_s - flow.trained_s)} (violet).` : "its weights were not published.");
}

let asked = 0;
async function look(from, to) {
  const all = timed().work?.[0] || { from: 0, to: 1 }, length = Math.min(Math.max(to - from, 1), Math.max(all.to - all.from, 1));
  view.from = Math.max(all.from, Math.min(from, all.to - length));
  view.to = view.from + length;
  drawTimeline();
  if (!page.live || length >= 0.98 * (all.to - all.from)) return;
  const mine = ++asked, found = await ask("work", { run: view.run, from: view.from, to: view.to });
  if (mine !== asked) return;
  timed().work = [timed().work[0], found];
  drawTimeline();
}

async function lookAtStep(step) {
  view.step = step;
  keep("step", step);
  if (page.live && !timed().flows?.[step]) timed().flows = { ...timed().flows, ...await ask("flow", { run: view.run, step }) };
  drawFlow();
  const flow = timed().flows?.[step], starts = flow ? flow.groups.filter((group) => group.length > 1).map((group) => group[1]) : [];
  if (!flow || !starts.length) return;
  const from = 1000 * Math.min(...starts), to = 1000 * (flow.adopted_s || flow.trained_s);
  await look(from - 0.02 * (to - from), to + 0.02 * (to - from));
}

const zoom = (factor, at = (view.from + view.to) / 2) => look(at - (at - view.from) * factor, at + (view.to - at) * factor);
const move = (share) => look(view.from + share * (view.to - view.from), view.to + share * (view.to - view.from));
const lookAtAll = () => { const all = timed().work?.[0]; if (all) look(all.from, all.to); };

byId("work").addEventListener("keydown", (event) => {
  const does = { ArrowLeft: () => move(-0.25), ArrowRight: () => move(0.25), "+": () => zoom(0.5), "=": () => zoom(0.5), "-": () => zoom(2), Home: lookAtAll }[event.key];
  if (does) { event.preventDefault(); does(); }
});
let pressed = null;
const timeAt = (event) => view.from + (event.offsetX - left()) / (byId("work").clientWidth - left() - 8) * (view.to - view.from);
byId("work").addEventListener("pointerdown", (event) => { pressed = timeAt(event); });
byId("work").addEventListener("pointerup", (event) => {
  const here = timeAt(event), there = pressed;
  pressed = null;
  if (there != null && Math.abs(here - there) > 0.01 * (view.to - view.from)) look(Math.min(here, there), Math.max(here, there));
});
byId("work").addEventListener("dblclick", lookAtAll);
byId("step").addEventListener("change", () => lookAtStep(+byId("step").value));
byId("step").addEventListener("keydown", (event) => { if (event.key === "Enter") lookAtStep(+byId("step").value); });
byId("run").addEventListener("change", () => { view.run = +byId("run").value; keep("run", view.run || ""); lookAtAll(); drawFlow(); find(); });
document.querySelectorAll("[data-zoom]").forEach((button) => button.addEventListener("click", () => button.dataset.zoom === "all" ? lookAtAll() : zoom(+button.dataset.zoom)));
document.querySelectorAll("[data-move]").forEach((button) => button.addEventListener("click", () => move(+button.dataset.move)));
