// Texts and charts of plans and simulations. A page of plans has nothing else.
const foreseen = [];

function drawForecast() {
  foreseen.splice(0).forEach((plot) => plot.destroy());
  const found = runs.filter((run) => run.forecast?.text);
  byId("forecast").hidden = !found.length;
  byId("forecasts").replaceChildren(...found.flatMap((run) => [
    ...runs.length > 1 ? [make("h3", { text: run.name })] : [],
    make("pre", { class: "text", tabindex: "0", text: shown(run.forecast.text) }),
    make("div", { class: "charts" }, ...(run.forecast.charts || []).map(({ title }) => chartBox(title))),
  ]));
  const boxes = byId("forecasts").querySelectorAll(".chart");
  found.flatMap((run) => run.forecast.charts || []).forEach((chart, index) => drawForeseen(boxes[index], chart));
}

// The first name is of what goes along the chart. What differs widely is drawn in decades.
function drawForeseen(box, { names, rows }) {
  const data = names.map((_, column) => rows.map((row) => row[column])), all = data.slice(1).flat(), isWide = Math.min(...all) > 0 && Math.max(...all) > 20 * Math.min(...all);
  const about = names.slice(1).map((label, index) => ({ label, color: RUN_COLORS[index % RUN_COLORS.length], dash: DASHES[index % DASHES.length] }));
  const key = box.querySelector(".key"), values = about.map(() => make("span", {}));
  key.replaceChildren(...about.map((one, index) => entry(stroke(one.color, one.dash), one.label, values[index])));
  const tell = (plot) => values.forEach((value, index) => { value.textContent = plot.cursor.idx == null ? "" : ` ${number(data[index + 1][plot.cursor.idx])} at ${number(data[0][plot.cursor.idx])}`; });
  const decades = { y: { distr: 3 }, values: (_, ticks) => ticks.map((tick) => tick == null ? "" : number(tick)) };
  foreseen.push(plotted(box, data, about, { cursor: {}, hooks: { setCursor: [tell] }, ...isWide ? decades : {} }));
}
