// Settings, log, theme, links, and updates of a live page.
function drawSettings() {
  const names = [...new Set(runs.flatMap((run) => run.settings.map(([name]) => name)))];
  const plain = (value) => value === undefined ? "" : typeof value === "string" ? value : JSON.stringify(value);
  const rows = names.flatMap((name) => {
    const found = runs.map((run) => run.settings.find(([own]) => own === name));
    const values = found.map((one) => plain(one?.[1])), differs = new Set(values.filter((_, index) => runs[index].settings.length)).size > 1, isOwn = found.some((one) => one && !one[2]);
    if (byId("differ").checked && !differs && !isOwn) return [];
    return [row([name, ...values.map((value) => short(value, 200)), differs ? "differs between runs" : isOwn ? "" : "default"], { class: differs ? "differs" : null })];
  });
  byId("table").replaceChildren(rows.length ? table(["Setting", ...runs.map((run) => runs.length > 1 ? run.name : "Value"), ""], rows) : make("p", { class: "quiet", text: "All settings have their defaults." }));
  const fact = (value) => Array.isArray(value) ? short(value.join(", ") || "none", 200) : value > 1e6 ? bytes(value) : short(plain(value), 200);
  const facts = [...new Set(runs.flatMap((run) => Object.keys(run.machine)))].filter((name) => name !== "versions");
  const versions = [...new Set(runs.flatMap((run) => Object.keys(run.machine.versions || {})))];
  const lines = [...facts.map((name) => row([name.replace("_bytes", "").replace("_", " "), ...runs.map((run) => fact(run.machine[name]))])),
    ...versions.map((name) => row([name, ...runs.map((run) => run.machine.versions?.[name] || "")]))];
  byId("machine").replaceChildren(make("h3", { text: "Machine and versions" }), lines.length ? table(["", ...runs.map((run) => runs.length > 1 ? run.name : "")], lines) : make("p", { class: "quiet", text: "The run recorded no machine." }));
}

function drawMessages() {
  const level = (kind, text) => kind === "warning" ? "advice" : kind !== "end" ? "" : text.startsWith("failed") ? "bad" : text.startsWith("finished") ? "good" : "advice";
  const lines = runs.flatMap((run) => run.texts.map(([kind, at, text]) => row([...runs.length > 1 ? [run.name] : [], seconds(at), make("span", { class: `pill ${level(kind, text)}`, text: kind }), short(text, 600)])));
  const damaged = runs.filter((run) => run.damaged).map((run) => make("p", { class: "advice", text: `${run.name}: ${run.damaged} rows are damaged and left out` }));
  const said = runs.filter((run) => run.reason).map((run) => make("p", { class: STATES[run.state] || "advice", text: `${run.name}: ${run.state}: ${shown(run.reason)}` }));
  byId("log").replaceChildren(...said, ...damaged, lines.length ? table([...runs.length > 1 ? ["Run"] : [], "After", "Kind", "Message"], lines) : make("p", { class: "quiet", text: "The run recorded no messages." }));
}

function drawAll() {
  drawForecast();
  drawSummary();
  listMetrics();
  drawCurves();
  drawSettings();
  drawMessages();
}

function setTheme(isDark) {
  document.documentElement.classList.toggle("dark", isDark);
  restyleCurves();
  drawForecast();
  drawTimeline();
  drawFlow();
}

function take(run, news) {
  const { series, ...rest } = news, before = run.series?.step.length || 0;
  if (!run.series || news.whole) run.series = series;
  else for (const name of new Set([...Object.keys(run.series), ...Object.keys(series)])) {
    run.series[name] = (run.series[name] || Array(before).fill(null)).concat(series[name] || Array(series.step.length).fill(null));
  }
  if (rest.work) rest.work = [rest.work, ...(run.work || []).slice(1, 2)];
  Object.assign(run, rest, { flows: { ...run.flows, ...rest.flows } });
}

// A page in the background asks for nothing. A new step is drawn within two seconds.
async function follow() {
  let isMore = false;
  try {
    for (const [index, run] of document.hidden ? [] : runs.entries()) {
      const wasAll = view.run === index && (!run.work || (view.to >= run.work[0].to - 1 && view.from <= run.work[0].from + 1));
      const news = await ask("news", { run: index, change: run.change ?? -1, after: run.series?.step.at(-1) ?? 0 });
      if (!news.change || news.change === run.change) continue;
      isMore ||= news.more;
      take(run, news);
      drawForecast();
      drawSummary();
      listMetrics();
      drawCurves();
      drawMessages();
      if (news.whole) drawSettings();
      if (news.whole || (news.steps && !run.rollouts?.rows.length && isUnfiltered())) find();
      if (wasAll) lookAtAll();
      if (view.step == null && view.run === index && Object.keys(run.flows).length) {
        const linked = +chosen.values.get("step");
        view.step = byId("step").value = linked || +Object.keys(run.flows).at(-1);
        if (linked) lookAtStep(linked); else drawFlow();
      }
      if (!run.isLinked && run.steps) { run.isLinked = true; goTo(chosen.target); }
    }
    if (byId("state").querySelector(".lost")) drawSummary();
  } catch (error) {
    byId("state").replaceChildren(make("span", { class: "pill bad lost", text: `Not live: ${error.message}` }));
  }
  setTimeout(follow, isMore ? 50 : 1200);
}

// Shows what a link leads to, also where it is folded away.
function goTo(id) {
  document.querySelectorAll(".chart.target").forEach((one) => one.classList.remove("target"));
  const target = id && byId(id);
  if (!target) return;
  const folded = target.closest("details.more");
  if (folded && !folded.open) { folded.open = true; drawCurves(); }
  if (target.classList.contains("chart")) target.classList.add("target");
  target.scrollIntoView({ block: target.classList.contains("chart") ? "center" : "start" });
}

async function copyLink() {
  try {
    await navigator.clipboard.writeText(location.href);
    byId("copy").textContent = "Copied";
  } catch {
    byId("copy").textContent = "See the address bar"; // a file may not write to the clipboard
  }
  setTimeout(() => { byId("copy").textContent = "Copy link"; }, 2000);
}

document.addEventListener("click", (event) => {
  const link = event.target.closest?.('a[href^="#"]');
  if (!link || link.classList.contains("skip")) return;
  event.preventDefault();
  chosen.target = link.getAttribute("href").slice(1);
  keep("", "");
  goTo(chosen.target);
});
window.addEventListener("hashchange", () => { readAddress(); goTo(chosen.target); });
byId("copy").addEventListener("click", copyLink);
byId("theme").addEventListener("click", () => {
  const isDark = !document.documentElement.classList.contains("dark");
  keep("theme", isDark ? "dark" : "light");
  setTheme(isDark);
});
byId("differ").addEventListener("change", drawSettings);
new ResizeObserver(() => { drawTimeline(); drawFlow(); }).observe(byId("timeline"));
document.documentElement.classList.toggle("dark", chosen.values.has("theme") ? chosen.values.get("theme") === "dark" : matchMedia("(prefers-color-scheme: dark)").matches);
restoreFilters();
if (page.live) {
  runs.forEach((run) => Object.assign(run, { claims: [], keys: [], settings: [], machine: {}, texts: [], evals: [], pauses: [], steps: 0, state: "loading", flows: {}, ...run }));
  follow();
} else {
  drawAll();
  lookAtAll();
  const flows = Object.keys(timed().flows || {});
  view.step = +chosen.values.get("step") || (flows.length ? +flows[Math.floor(flows.length / 2)] : null);
  byId("step").value = view.step ?? "";
  drawFlow();
  find();
  if (chosen.target) goTo(chosen.target);
}
