// The rest of the page, and, where it is live, what is new.
function drawSummary() {
  byId("title").textContent = document.title = "llamarl: " + runs.map((run) => run.name).join(", ");
  byId("summary").replaceChildren(...runs.map((run, index) => make("div", { class: "run" },
    make("p", {}, make("span", { class: "swatch", background: stroke(RUN_COLORS[index % 6], runs.length > 1 ? DASHES[index % DASHES.length] : []) }), make("b", { text: run.name }), make("span", { class: "state", text: run.state === "planned" ? run.state : `${run.state}, ${run.steps} steps${run.forecast?.text ? " of a simulation" : ""}` }), ". ",
      ...run.claims.flatMap((claim, place) => [make("span", { class: claim.level }, make("a", { href: "#" + claim.chart, text: short(claim.text, 400) })), place + 1 < run.claims.length ? "; " : "."])),
    make("div", { class: "quiet", text: [run.model, run.folder].filter(Boolean).join(", ") }))));
  byId("legend").replaceChildren(...Object.entries(WORK_COLORS).filter(([kind]) => kind !== "other").map(([kind, color]) => entry(color, kind.replace("_", " "))));
  byId("of-run").hidden = runs.length < 2;
  if (!byId("run").options.length) byId("run").replaceChildren(...runs.map((run, index) => make("option", { value: index, text: run.name })));
}

function drawSettings() {
  const names = [...new Set(runs.flatMap((run) => run.settings.map(([name]) => name)))];
  const plain = (value) => value === undefined ? "" : typeof value === "string" ? value : JSON.stringify(value);
  const rows = names.flatMap((name) => {
    const found = runs.map((run) => run.settings.find(([own]) => own === name));
    const values = found.map((one) => plain(one?.[1])), differs = new Set(values.filter((_, index) => runs[index].settings.length)).size > 1, isOwn = found.some((one) => one && !one[2]);
    if (byId("differ").checked && !differs && !isOwn) return [];
    return [row([name, ...values.map((value) => short(value, 200)), differs ? "differs between runs" : isOwn ? "" : "default"], { class: differs ? "differs" : null })];
  });
  byId("table").replaceChildren(table(["setting", ...runs.map((run) => run.name), ""], rows));
  const fact = (value) => Array.isArray(value) ? short(value.join(", ") || "none", 200) : value > 1e6 ? number(value) : short(plain(value), 200);
  const facts = [...new Set(runs.flatMap((run) => Object.keys(run.machine)))].filter((name) => name !== "versions");
  const versions = [...new Set(runs.flatMap((run) => Object.keys(run.machine.versions || {})))];
  const lines = [...facts.map((name) => row([name.replace("_", " "), ...runs.map((run) => fact(run.machine[name]))])),
    ...versions.map((name) => row([name, ...runs.map((run) => run.machine.versions?.[name] || "")]))];
  byId("machine").replaceChildren(make("h3", { text: "Machine and versions" }), lines.length ? table(["", ...runs.map((run) => run.name)], lines) : make("p", { class: "quiet", text: "Not recorded." }));
}

function drawMessages() {
  const lines = runs.flatMap((run) => run.texts.map(([kind, at, text]) => row([run.name, seconds(at), make("span", { class: kind === "warning" || (kind === "end" && !text.startsWith("finished")) ? "bad" : "", text: kind }), short(text, 600)])));
  const damaged = runs.filter((run) => run.damaged).map((run) => make("p", { class: "bad", text: `${run.name}: ${run.damaged} rows are torn or damaged, and left out` }));
  const said = runs.filter((run) => run.reason).map((run) => make("p", { class: "bad", text: `${run.name}: ${run.state}: ${shown(run.reason)}` }));
  byId("log").replaceChildren(...said, ...damaged, lines.length ? table(["run", "after", "", ""], lines) : make("p", { class: "quiet", text: "Nothing was said." }));
}

function drawAll() {
  drawSummary();
  drawForecast();
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

// Whoever does not look asks nothing. A step that is new is drawn within two seconds.
async function follow() {
  let isMore = false;
  try {
    for (const [index, run] of document.hidden ? [] : runs.entries()) {
      const wasAll = view.run === index && (!run.work || (view.to >= run.work[0].to - 1 && view.from <= run.work[0].from + 1));
      const news = await ask("news", { run: index, change: run.change ?? -1, after: run.series?.step.at(-1) ?? 0 });
      if (!news.change || news.change === run.change) continue;
      isMore ||= news.more;
      take(run, news);
      drawSummary();
      drawForecast();
      listMetrics();
      drawCurves();
      drawMessages();
      if (news.whole) drawSettings();
      if (news.whole || (news.steps && !run.rollouts?.rows.length && isUnfiltered())) find();
      if (wasAll) lookAtAll();
      if (view.step == null && view.run === index && Object.keys(run.flows).length) { view.step = +Object.keys(run.flows).at(-1); byId("step").value = view.step; drawFlow(); }
    }
    byId("title").classList.remove("bad");
  } catch (error) {
    byId("title").textContent = `${document.title} (not live: ${error.message})`;
    byId("title").classList.add("bad");
  }
  setTimeout(follow, isMore ? 50 : 1200);
}

byId("theme").addEventListener("click", () => setTheme(!document.documentElement.classList.contains("dark")));
byId("differ").addEventListener("change", drawSettings);
new ResizeObserver(() => { drawTimeline(); drawFlow(); }).observe(byId("timeline"));
document.documentElement.classList.toggle("dark", matchMedia("(prefers-color-scheme: dark)").matches);
if (page.live) {
  runs.forEach((run) => Object.assign(run, { claims: [], settings: [], machine: {}, texts: [], evals: [], steps: 0, state: "loading", flows: {}, ...run }));
  follow();
} else {
  drawAll();
  lookAtAll();
  const flows = Object.keys(timed().flows || {});
  view.step = flows.length ? +flows[Math.floor(flows.length / 2)] : null;
  byId("step").value = view.step ?? "";
  drawFlow();
  find();
}
