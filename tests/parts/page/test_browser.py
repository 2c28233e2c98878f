"""The page as somebody sees it, in headless Chromium: what is drawn, found, colored, zoomed; that nothing is run that a
model wrote, and that no request leaves the page."""

from __future__ import annotations

import os
import re
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest

from llamarl.observability.metrics import wilson
from llamarl.parts.page.cli import report
from tests.parts.page.browser import in_a_browser
from tests.parts.page.runs import BEGAN_S, CONFIG, make_run, rollout_row, write_rows

FAINT = """() => {
  const context = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const over = (color, under) => {
    for (const one of [`rgb(${under})`, color]) { context.fillStyle = one; context.fillRect(0, 0, 1, 1); }
    return [...context.getImageData(0, 0, 1, 1).data].slice(0, 3);
  };
  const light = (color) => color.map((value) => value / 255)
    .map((value) => value <= 0.03928 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4)
    .reduce((sum, value, index) => sum + value * [0.2126, 0.7152, 0.0722][index], 0);
  const back = (element) => element ? over(getComputedStyle(element).backgroundColor, back(element.parentElement))
    : [255, 255, 255];
  const hasText = (one) => [...one.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
  return [...document.querySelectorAll("body *")]
    .filter((one) => one.checkVisibility() && !one.closest("select, script") && hasText(one))
    .map((one) => {
      const under = back(one), own = light(over(getComputedStyle(one).color, under));
      const [low, high] = [light(under), own].sort((first, second) => first - second);
      return [(high + 0.05) / (low + 0.05), one.outerHTML.slice(0, 120)];
    }).filter(([contrast]) => contrast < 4.5).slice(0, 5);
}"""
"""Elements with text of their own whose contrast is below WCAG's 4.5."""
BLUE = """canvas => {
  const data = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
  const far = (at) => Math.abs(data[at] - 59) + Math.abs(data[at + 1] - 125) + Math.abs(data[at + 2] - 216);
  let num = 0;
  for (let at = 0; at < data.length; at += 4) num += data[at + 3] > 200 && far(at) < 60;
  return num;
}"""
"""Pixels of the first curve."""
BACKGROUNDS = "all => all.map(one => getComputedStyle(one).backgroundColor)"
WIDTHS = (1440, 390)

pytestmark = in_a_browser


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Reports of one run, of two, of a failed one, of an empty folder."""
    folder = tmp_path_factory.mktemp("runs")
    runs = {
        "one": [make_run(folder / "one", 60)],
        "two": [make_run(folder / "first", 60), make_run(folder / "second", 40, rate=1e-3)],
        "failed": [make_run(folder / "failed", 8, end="failed")],
    }
    by_token = rollout_row(60, 999, 0, prompt="a critic's", advantages=[1.0, -1.0, 0.0, 0.5])
    write_rows(folder / "one" / "rollouts.jsonl", [by_token])
    for name, of_one in runs.items():
        report.main([*map(str, of_one), "--output", str(folder / f"{name}.html")])
    return {name: (folder / f"{name}.html").as_uri() for name in runs}


def unfold(one: Any) -> None:
    """Opens the expert charts of all groups."""
    one.page.eval_on_selector_all("details.more:not([open]) > summary", "all => all.forEach((one) => one.click())")
    folded = "[...document.querySelectorAll('details.more:not([hidden])')].map((one) => one.querySelector('.chart').id)"
    one.until(f"{folded}.every((id) => plots.has(id))")


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_everything_is_drawn_and_fits(visit: Any, files: dict[str, str], width: int, scheme: str) -> None:
    one = visit(files["one"], width=width, scheme=scheme)
    assert one.page.evaluate("document.documentElement.scrollWidth") <= width
    assert one.page.evaluate("document.documentElement.classList.contains('dark')") == (scheme == "dark")
    for chart in ("reward", "solve", "staleness", "kl", "entropy", "grad", "busy"):
        assert one.ink(f"#{chart} canvas") > 300, chart
    assert one.ink("#work") > 1000
    assert one.ink("#flow") > 1000
    assert [url for url in one.asked if not url.startswith(("file:", "data:"))] == []


def test_a_mixture_of_experts(visit: Any, files: dict[str, str], tmp_path: Path) -> None:
    """Load by layer, of many layers the fullest, and what routing does to the KL; nothing of it for a dense model."""
    charts = {"load", "idle", "agreement", "routing", "kl-causes"}
    names = {"kl_live_routes": 3e-4, "kl_replayed_routes": 1e-4, "kl_from_routing": 2e-4, "routes_agreement": 0.97}
    names |= {f"expert_load.{layer}": 1.0 + layer / 10 for layer in range(12)}
    names |= {f"idle_experts.{layer}": layer // 11 for layer in range(12)}
    folder = make_run(tmp_path / "mixture", 60, **{f"extra.{name}": value for name, value in names.items()})
    report.main([str(folder), "--output", str(tmp_path / "mixture.html")])
    one = visit((tmp_path / "mixture.html").as_uri())
    unfold(one)
    for chart in charts:
        assert one.ink(f"#{chart} canvas") > 300, chart
    told = {chart: one.page.locator(f"#{chart} .key .label").all_inner_texts() for chart in charts}
    assert told["load"] == [f"layer {layer}" for layer in range(4, 12)]
    assert len(told["idle"]) == 8 and told["idle"][-1] == "layer 11"
    assert told["kl-causes"] == ["routing"]
    dense = visit(files["one"])
    assert not charts & {*dense.page.eval_on_selector_all(".chart", "all => all.map(one => one.id)")}


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_texts_can_be_read(visit: Any, files: dict[str, str], scheme: str) -> None:
    """WCAG's contrast of at least 4.5 for every element with text of its own, tokens of all colorings included."""
    one = visit(files["one"], scheme=scheme)
    for coloring in ("version", "importance ratio", "log-prob", "advantage"):
        one.page.select_option("#coloring", coloring)
        assert one.page.evaluate(FAINT) == [], coloring


def test_what_a_model_wrote_is_shown_and_never_run(visit: Any, files: dict[str, str]) -> None:
    one = visit(files["one"])
    one.page.fill("[name=prompt]", "<script>")
    one.page.keyboard.press("Enter")
    assert one.page.locator("#list tbody tr").count() == 1
    shown = one.page.inner_text("#prompt")
    assert "<script>window.hacked = 1</script>" in shown
    assert "⟨U+202E⟩␇" in shown, "letters that turn the text around, or that are no letters, are named"
    turning = "".join(map(chr, (0x200F, 0x202A, 0x2066, 0x2069, 0xFEFF, 0x85)))
    assert one.page.evaluate("text => shown(text)", turning) == "⟨U+200F⟩⟨U+202A⟩⟨U+2066⟩⟨U+2069⟩⟨U+FEFF⟩⟨U+0085⟩"
    assert one.page.evaluate("window.hacked") is None
    assert one.page.locator("main img, main script").count() == 0


def test_claims_lead_to_their_pictures(visit: Any, files: dict[str, str]) -> None:
    one = visit(files["one"])
    links = one.page.locator("#summary a")
    assert links.count() >= 3
    for number in range(links.count()):
        target = links.nth(number).get_attribute("href")
        assert one.page.locator(target).count() == 1, target
    links.first.click()
    assert one.page.evaluate("location.hash") == "#solve"
    assert one.page.locator("#solve.target").count() == 1


def test_filters_and_colors(visit: Any, files: dict[str, str]) -> None:
    one = visit(files["one"])
    one.page.fill("[name=step]", "3..4")
    one.page.fill("[name=reward]", "1")
    one.page.keyboard.press("Enter")
    assert one.page.locator("#list tbody tr").count() == 4
    assert one.page.locator("#list .square").count() == 4, "one rollout of each group fits"

    def backgrounds() -> list[str]:
        return one.page.eval_on_selector_all(
            "#tokens .token", "all => all.map(one => getComputedStyle(one).backgroundColor)"
        )

    seen = dict[str, tuple[str, ...]]()
    for coloring in ("version", "importance ratio", "log-prob", "advantage"):
        one.page.select_option("#coloring", coloring)
        seen[coloring] = tuple(backgrounds())
    assert len(set(seen.values())) == 4
    assert seen["version"][0] == seen["version"][1] != seen["version"][3], "two versions wrote it"
    assert one.page.locator("#tokens .seen").count() == 1
    assert one.page.locator("#tokens .turn").count() == 1
    one.page.hover("#tokens .token >> nth=1")
    assert "log-prob -2, trainer's -1, importance ratio 2.718" in one.page.inner_text("#token")
    assert "advantage 0.5 (of the rollout)" in one.page.inner_text("#token")
    assert len(set(seen["advantage"][:2])) == 1, "all have that of the rollout"

    def is_blue(color: str) -> bool:
        red, _, blue, *_ = map(float, re.findall(r"[\d.]+", color))
        return blue > red

    assert is_blue(seen["advantage"][0]), "better than expected"
    assert not is_blue(seen["importance ratio"][1]), "likelier by now"
    one.page.fill("[name=step]", "60")
    one.page.fill("[name=reward]", "")
    one.page.fill("[name=prompt]", "critic")
    one.page.keyboard.press("Enter")
    assert [is_blue(color) for color in backgrounds()[:2]] == [True, False], "each token has its own"
    one.page.hover("#tokens .token >> nth=1")
    assert one.page.inner_text("#token").endswith("advantage -1")
    assert "Each token has its own" in one.page.inner_text("#one .controls")


def test_smoothing_axes_and_a_shared_cursor(visit: Any, files: dict[str, str]) -> None:
    one = visit(files["two"])
    drawn = one.page.eval_on_selector("#reward canvas", "canvas => canvas.toDataURL()")
    one.page.eval_on_selector("#smoothing", "input => { input.value = 0; input.dispatchEvent(new Event('input')); }")
    one.page.wait_for_timeout(100)
    assert one.page.eval_on_selector("#reward canvas", "canvas => canvas.toDataURL()") != drawn
    for along in ("samples", "wall_s"):
        one.page.select_option("#along", along)
        assert one.ink("#reward canvas") > 300
    one.page.hover("#reward .u-over")
    shown = one.page.evaluate("[...plots.values()].filter((plot) => plot.cursor.idx != null).length")
    assert shown > 10, "other charts show their values at the cursor, too"
    assert one.page.locator(".tip").count() == 1, "the chart under the pointer has the details"


def test_what_a_curve_tells_was_measured(visit: Any, files: dict[str, str]) -> None:
    """The slider changes what is in brackets alone; maxima, limits and counts have no mean."""
    one = visit(files["one"])
    one.page.evaluate("""() => {
        const { series } = runs[0];
        series.staleness_max = series.step.map((step) => step % 2 ? 3 : 1);
        series.staleness_mean = series.step.map((step) => step % 2 ? 0.5 : 0.9);
        series.importance_ratio_max = series.step.map((step) => step % 2 ? 7.5 : 1.5);
        drawCurves();
    }""")
    one.page.focus("#charts")
    one.page.keyboard.press("End")
    one.page.keyboard.press("ArrowLeft")
    assert one.page.inner_text("#cursor") == "Step 59"

    def values(chart: str) -> list[str]:
        return [value.strip() for value in one.page.locator(f"#{chart} .value").all_inner_texts()]

    assert values("staleness") == ["0.5", "3", "2"]
    assert values("ratio-max") == ["7.5"]
    one.page.hover("#staleness .u-over")
    assert re.search(r"mean 0\.\d+ \(smoothed 0\.\d+\)", one.page.inner_text("#staleness .tip"))
    assert not re.search(r"(max|limit) \d+ \(", one.page.inner_text("#staleness .tip"))
    one.page.mouse.move(5, 5)
    one.page.focus("#charts")
    one.page.eval_on_selector("#smoothing", "input => { input.value = 0; input.dispatchEvent(new Event('input')); }")
    one.page.keyboard.press("Home")
    assert values("staleness") == ["0.5", "3", "2"]
    assert one.page.inner_text("#cursor") == "Step 1"
    one.page.evaluate("runs[0].every = 9")
    one.page.keyboard.press("ArrowRight")
    assert one.page.inner_text("#cursor").startswith("Step 2, means of 9 steps")


def test_what_curves_are_made_of(visit: Any, files: dict[str, str]) -> None:
    """A mean that forgets, and is right from its first value on; where a run stands in samples; the ends of errors."""
    one = visit(files["one"])
    assert one.page.evaluate("smoothed([2, null, 2, 4], 0.5)") == pytest.approx([2, None, 2, 22 / 7])
    assert one.page.evaluate("along(runs[0], 'samples').slice(0, 3)") == [8, 16, 24], "4 per second, 2 seconds each"
    assert one.page.evaluate("along(runs[0], 'wall_s').slice(0, 2)") == [2, 4]
    for ticks in (
        ["0.9995", "1", "1.0005"],
        ["0", "0.25", "0.5"],
        ["100.00k", "100.01k"],
        ["0", "400M"],
        ["7"],
        ["5000", "15,000"],
    ):
        values = [float(tick.replace("k", "e3").replace("M", "e6").replace(",", "")) for tick in ticks]
        assert one.page.evaluate("labels", values) == ticks
    ends = one.page.evaluate("""() => {
        const plot = plots.get("solve"), found = [], context = { beginPath() {}, stroke() {},
            moveTo: (x, y) => found.push(y), lineTo: (x, y) => found.push(y) };
        drawIntervals({ ctx: context, data: plot.data, valToPos: (value) => value }, plot.about);
        return found;
    }""")
    assert ends == pytest.approx([*wilson(0.2, 100), *wilson(0.6, 100)])


def test_a_step_is_seen_in_the_finest_detail_there_is(visit: Any, files: dict[str, str]) -> None:
    one = visit(files["one"])
    one.page.fill("#step", "11")
    one.page.keyboard.press("Enter")
    one.until("document.querySelector('#flow-text').textContent.startsWith('Step 11,')")
    wide, used = one.page.evaluate("[timed().work[0], bestWork()].map((one) => one.to - one.from)")
    assert used < wide / 5
    drawn = one.page.eval_on_selector(
        "#flow", "canvas => canvas.getContext('2d').getImageData(0, 0, 9999, 9).data.join()"
    )
    assert "84,162,75,255" in drawn, "scoring is seen beside generating and waiting"
    assert "227,230,235,255" in drawn, "waiting for the step is gray"
    text = one.page.inner_text("#flow-text")
    for words in ("generated after 1 s", "scored after another 0.1 s", "waited 0.9 s for the step"):
        assert words in text


def test_a_value_alone_is_a_point(visit: Any, files: dict[str, str]) -> None:
    """Also in a metric of every 16th step, which has no line yet; a curve of all steps has no points."""
    one = visit(files["one"])
    for is_there in ("step === 30", "step % 16 === 2"):
        one.page.evaluate(f"""() => {{
            runs[0].series["extra.rare"] = runs[0].series.step.map((step) => {is_there} ? 1 : null);
            listMetrics();
        }}""")
        one.page.select_option("#any", "extra.rare")
        one.page.eval_on_selector("#any", "select => select.dispatchEvent(new Event('input'))")
        one.until(f"({BLUE})(document.querySelector('#any-chart canvas')) > 0")
    sparse = "[[1], [null, 2, 3], [1, 2, 3, null], Array(60).fill(1)].map(isSparse)"
    assert one.page.evaluate(sparse) == [True, True, False, False]


@pytest.mark.parametrize("width", WIDTHS)
def test_marks_of_times_and_steps_are_whole(visit: Any, files: dict[str, str], width: int) -> None:
    """Also the last one, at the edge; and none covers another one."""
    one = visit(files["one"], width=width)
    for view in ("look(0, 1000 * timed().flows[20].trained_s)", "lookAtAll()"):
        found, width = one.page.evaluate(f"""() => {{
            const canvas = document.querySelector("#work"), context = canvas.getContext("2d"), found = [];
            context.fillText = (text, x, y) => found.push([y, x, x + context.measureText(text).width, text]);
            {view};
            return [found, canvas.clientWidth];
        }}""")
        assert found[-1][3] in ("▲20", "▲59") or width < 500, "where there is room"
        for line in sorted({y for y, *_ in found})[-2:]:
            marks = [(left, right) for y, left, right, _ in found if y == line]
            assert len(marks) >= 2
            assert all(right + 4 <= next_left for (_, right), (next_left, _) in pairwise(marks))
            assert marks[-1][1] <= width


def test_settings_that_are_shown(visit: Any, files: dict[str, str]) -> None:
    """What differs from the defaults or between runs; all of them, with a mark, when asked."""
    one = visit(files["two"])
    (row,) = one.page.locator("#table tr", has_text="trainer.learning_rate").all_inner_texts()
    assert "differs between runs" in row
    assert one.page.locator("#table tr", has_text="rollout.temperature").count() == 0
    one.page.uncheck("#differ")
    (row,) = one.page.locator("#table tr", has_text="rollout.temperature").all_inner_texts()
    assert row.endswith("default")
    one.page.evaluate("runs.forEach((run) => { run.settings[0][1] = '/a-long-folder'.repeat(14); }); drawSettings()")
    wide, room = one.page.eval_on_selector("#table", "(one) => [one.scrollWidth, one.clientWidth]")
    assert wide <= room, "all runs are seen beside each other"


def test_a_group_is_of_one_step(visit: Any, files: dict[str, str]) -> None:
    one = visit(files["one"])
    one.page.fill("[name=step]", "7")
    one.page.keyboard.press("Enter")
    assert one.page.locator("#list tbody tr").count() == 2, "a row for each group"
    assert one.page.locator("#list .square").count() == 4, "and a square for each rollout"
    assert "(2 here)" in one.page.inner_text("#one h3")
    assert one.page.evaluate("[inBounds('3', 3), inBounds('3..', 3), inBounds('..3', 3), inBounds('3..4', 5)]") == [
        True, True, True, False,
    ]  # fmt: skip


def test_a_metric_that_begins_later_stays_in_its_place(visit: Any, files: dict[str, str]) -> None:
    one = visit(files["one"])
    series = one.page.evaluate("""() => {
        const run = { series: { step: [1, 2], a: [5, 6] } };
        take(run, { series: { step: [3], b: [7] }, flows: {} });
        return run.series;
    }""")
    assert series == {"step": [1, 2, 3], "a": [5, 6, None], "b": [None, None, 7]}


def test_runs_beside_each_other(visit: Any, files: dict[str, str]) -> None:
    one = visit(files["two"])
    assert one.page.locator("#summary .run").count() == 2
    assert "differs between runs" in one.page.inner_text("#table")
    assert one.page.locator("#reward .key .swatch").count() == 2
    rows = one.page.locator(".compare tbody tr").all_inner_texts()
    assert len(rows) == 2 and "60.0%" in rows[1] and "so they may be equal" in rows[1]
    changed = "((run) => difference({ ...run, %s }, runs[0], '')[0])(runs[1])"
    better = "evals: [{ ...run.evals.at(-1), accuracy: 0.9, error: 0.03 }]"
    assert re.fullmatch(r"\+30\.0 points \(95%: \+\d.*\), so they differ", one.page.evaluate(changed % better))
    assert "data.eval" in one.page.evaluate(changed % "settings: [['data.eval.count', 9, false]]"), "other problems"
    dashes = [str(one.page.evaluate(f"plots.get('reward').about[{at}].dash")) for at in (1, 3)]
    assert dashes == ["[]", "[6, 4]"], "colors alone do not tell them apart"
    drawn = one.page.locator("#reward .key .swatch").evaluate_all("all => all.map((one) => one.style.background)")
    assert ["gradient" in background for background in drawn] == [False, True]
    one.page.select_option("#run", "1")
    one.until("document.querySelector('#under').textContent.includes('1m 20s')")


def test_a_failure_says_so(visit: Any, files: dict[str, str]) -> None:
    one = visit(files["failed"])
    assert "The run failed: trainer died" in one.page.inner_text("#summary")
    assert one.page.locator("#summary li.bad").count() == 1
    red = one.page.evaluate("getComputedStyle(document.querySelector('#summary li.bad a')).color")
    amber = one.page.evaluate("getComputedStyle(document.documentElement).getPropertyValue('--warn')")
    assert red == "rgb(179, 38, 30)" and amber != red
    assert "trainer died" in one.page.inner_text("#messages")


def test_zoom_by_keyboard_alone(visit: Any, files: dict[str, str]) -> None:
    """From the address bar to a step in full detail, and to a token, without a mouse."""
    one = visit(files["one"])

    def focus(selector: str) -> None:
        for _ in range(300):
            one.page.keyboard.press("Tab")
            if one.page.evaluate(f"document.activeElement.matches({selector!r})"):
                return
        pytest.fail(f"{selector} cannot be reached")

    under = one.page.inner_text("#under")
    one.page.keyboard.press("Tab")
    one.page.keyboard.press("Enter")
    one.page.keyboard.press("Tab")
    assert one.page.evaluate("document.activeElement.closest('main') !== null"), "past the head of the page"
    stops = "[...document.querySelectorAll('*')].filter((one) => one.tabIndex >= 0 && one.checkVisibility()).length"
    assert one.page.evaluate(stops) < 90, "a table is one stop, however many rows it has, and a legend is one"
    focus("#step")
    one.page.keyboard.press("Control+a")
    one.page.keyboard.type("17")
    one.page.keyboard.press("Enter")
    one.until("document.querySelector('#flow-text').textContent.startsWith('Step 17')")
    zoomed = one.page.inner_text("#under")
    assert zoomed != under
    assert one.ink("#flow") > 1000
    focus("#work")
    one.page.keyboard.press("ArrowRight")
    assert one.page.inner_text("#under") != zoomed
    one.page.keyboard.press("Home")
    one.page.keyboard.press("+")
    assert one.page.inner_text("#under") not in (under, zoomed)
    focus("#list tr:nth-child(1)")
    one.page.keyboard.press("ArrowDown")
    one.page.keyboard.press("Enter")
    assert one.page.get_attribute("#list tbody tr:nth-child(2)", "aria-selected") == "true"
    focus("#tokens")
    one.page.keyboard.press("ArrowRight")
    one.page.keyboard.press("ArrowRight")
    assert one.page.inner_text("#token").startswith("token 2 of 4")


def test_heights_do_not_change_under_the_pointer(visit: Any, files: dict[str, str]) -> None:
    """A chart keeps its height and its place, and its plot is as high as every other one."""
    one = visit(files["one"])
    unfold(one)
    boxes = "() => [...document.querySelectorAll('.chart')].map((one) => [one.id, one.offsetTop, one.offsetHeight])"
    before = one.page.evaluate(boxes)
    for chart in ("solve", "staleness", "kl", "reward", "busy"):
        for left in (60, 150, 300):
            one.page.hover(f"#{chart} .u-over", position={"x": left, "y": 60})
            assert one.page.evaluate(boxes) == before, chart
    assert one.page.evaluate("new Set([...plots.values()].map((one) => one.root.offsetHeight)).size") == 1
    one.page.hover("#tokens .token >> nth=1")
    assert one.page.evaluate("document.querySelector('#one').offsetHeight > 0")


@pytest.mark.parametrize("width", WIDTHS)
def test_titles_are_one_whole_line(visit: Any, files: dict[str, str], width: int) -> None:
    """At most 28 letters, of all charts that there can be; none is cut, and no text is wider than its box."""
    one = visit(files["one"], width=width)
    titles = one.page.evaluate("CHARTS.map(([, title]) => title)")
    assert len(titles) == len(set(titles)) and {"Accuracy (train, held-out)", "Truncated / ungraded responses"} <= {
        *titles
    }
    assert max(sum(letter.isalpha() for letter in title) for title in titles) <= 28
    unfold(one)
    kinds = ".chart h4, .tile span, .pill, nav a, button, td, .key .entry .label"
    cut = f"""() => [...document.querySelectorAll("{kinds}")]
        .filter((one) => one.checkVisibility() && !one.classList.contains("prompt"))
        .filter((one) => getComputedStyle(one).display !== "inline" && one.scrollWidth > one.clientWidth + 1)
        .map((one) => one.outerHTML.slice(0, 120))"""
    assert one.page.evaluate(cut) == []
    cut_values = (
        "[...document.querySelectorAll('.key .value')].filter((one) => one.scrollWidth > one.clientWidth + 1).length"
    )
    assert one.page.evaluate(cut_values) == 0
    outside = """() => [...document.querySelectorAll("main *")].filter((one) => one.checkVisibility()
        && !one.closest(".scroll, nav, pre, svg, .u-wrap") && one.getBoundingClientRect().right > innerWidth + 1)
        .map((one) => one.outerHTML.slice(0, 120))"""
    assert one.page.evaluate(outside) == [], "nothing is beyond the edge"


def test_a_click_on_the_legend_hides_a_curve_and_the_link_keeps_it(visit: Any, files: dict[str, str]) -> None:
    """So do logarithmic axes, the horizontal axis, unfolded groups and filters: the address opens the same page."""
    one = visit(files["one"])
    blue = one.page.evaluate(f"({BLUE})(document.querySelector('#solve canvas'))")
    one.page.click("#solve .key .entry >> nth=0")
    assert one.page.get_attribute("#solve .key .entry >> nth=0", "aria-pressed") == "false"
    assert blue > 50 > one.page.evaluate(f"({BLUE})(document.querySelector('#solve canvas'))")
    one.page.click("#kl .menu summary")
    one.page.click("#kl [data-do=log]")
    assert one.page.evaluate("plots.get('kl').scales.y.distr") == 3
    assert one.ink("#kl canvas") > 300
    one.page.select_option("#along", "wall_s")
    one.page.fill("[name=step]", "3..4")
    one.page.keyboard.press("Enter")
    one.page.click("#group-Stability .more > summary")
    one.page.click("#summary a[href='#reward'] >> nth=0")
    again = visit(one.page.url)
    assert again.page.get_attribute("#solve .key .entry >> nth=0", "aria-pressed") == "false"
    assert again.page.evaluate("plots.get('kl').scales.y.distr") == 3
    assert again.page.input_value("#along") == "wall_s"
    assert again.page.locator("#list tbody tr").count() == 4
    assert again.page.locator("#group-Stability .more[open]").count() == 1
    assert again.page.locator("#reward.target").count() == 1
    again.page.click("#solve .key .entry >> nth=0")
    assert again.page.get_attribute("#solve .key .entry >> nth=0", "aria-pressed") == "true"


def test_a_chart_is_saved_as_picture_and_table(visit: Any, files: dict[str, str]) -> None:
    one = visit(files["one"])
    found = dict[str, bytes]()
    for kind in ("png", "csv"):
        one.page.click("#staleness .menu summary")
        with one.page.expect_download() as download:
            one.page.click(f"#staleness [data-do={kind}]")
        assert download.value.suggested_filename == f"one-staleness.{kind}"
        found[kind] = Path(download.value.path()).read_bytes()
    assert found["png"].startswith(b"\x89PNG")
    head, *lines = found["csv"].decode().splitlines()
    assert head == '"step","mean","max","limit"'
    assert len(lines) == 60 and lines[-1] == "60,1,1,2", "as measured"


def test_a_chosen_metric_is_drawn_where_it_is_seen(visit: Any, files: dict[str, str]) -> None:
    one = visit(files["one"])
    one.page.select_option("#any", "wall_s")
    box = one.page.locator("#any-chart").bounding_box()
    assert box and box["y"] < 900, "above the other charts"
    assert one.page.evaluate("document.querySelector('#charts .group').contains(document.querySelector('#any-chart'))")


def test_what_a_rollout_earned(visit: Any, tmp_path: Path) -> None:
    """Right, wrong, or not judged; with the reward of each part; squares by reward."""
    folder = make_run(tmp_path / "made", 4)
    rows = [
        rollout_row(4, 900, index, reward=reward, right=right, reward_parts={"exact": float(right or 0), "brief": 0.4})
        for index, (reward, right) in enumerate([(1.2, True), (0.2, False), (0.0, None)])
    ]
    write_rows(folder / "rollouts.jsonl", rows)
    report.main([str(folder), "--output", str(tmp_path / "made.html")])
    one = visit((tmp_path / "made.html").as_uri())
    one.page.fill("[name=step]", "4")
    one.page.keyboard.press("Enter")
    row = one.page.locator("#list tbody tr", has=one.page.locator(".square.unjudged"))
    assert row.count() == 1
    strong, weak, unjudged = row.locator(".square").evaluate_all(BACKGROUNDS)
    assert len({strong, weak, unjudged}) == 3
    for place, verdict in enumerate(("right", "wrong", "not judged")):
        row.locator(".square").nth(place).click()
        assert one.page.inner_text("#verdict") == verdict
    assert [*one.page.locator("#one .facts div").all_inner_texts()][1:3] == ["Reward: exact\n0", "Reward: brief\n0.4"]
    one.page.select_option("[name=right]", "not judged")
    one.until("document.querySelectorAll('#list .square').length === 1")


def test_a_run_that_has_no_step_yet(visit: Any, tmp_path: Path) -> None:
    """The start's phases in place of charts, and no empty pictures."""
    folder = make_run(tmp_path / "made", 0, end=None)
    phases = [
        {"kind": "phase", "at_s": BEGAN_S + 2 * n, "text": text}
        for n, text in enumerate(("starting executors", "evaluating"))
    ]
    write_rows(folder / "events.jsonl", phases)
    report.main([str(folder), "--output", str(tmp_path / "made.html")])
    one = visit((tmp_path / "made.html").as_uri(), ready="#starting .empty")
    assert "✓ starting executors" in one.page.inner_text("#starting") and "› evaluating" in one.page.inner_text(
        "#starting"
    )
    assert one.page.locator(".chart").count() == 0
    assert "after the first step" in one.page.inner_text("#list")
    assert not one.page.locator("#work").is_visible()


def test_a_supervised_run_has_no_sections_that_it_cannot_have(visit: Any, tmp_path: Path) -> None:
    folder = tmp_path / "tuned"
    folder.mkdir()
    (folder / "config.toml").write_text(CONFIG.format(steps=40, rate=1e-4))
    rows = [{"kind": "step", "step": step, "loss": 3.0 / step, "wall_s": step, "step_s": 1.0} for step in range(1, 41)]
    write_rows(folder / "metrics.jsonl", rows)
    start, end = {"kind": "start", "work": "sft"}, {"kind": "end", "end": "finished", "reason": ""}
    write_rows(folder / "events.jsonl", [{"at_s": BEGAN_S, **start}, {"at_s": BEGAN_S + 40, **end}])
    report.main([str(folder), "--output", str(tmp_path / "tuned.html")])
    one = visit((tmp_path / "tuned.html").as_uri(), ready="#loss canvas")
    assert one.page.inner_text("#state") == "Finished"
    for section, is_there in (("curves", True), ("timeline", False), ("rollouts", False), ("messages", True)):
        assert one.page.locator(f"#{section}").is_visible() == is_there
        assert one.page.locator(f"nav a[href='#{section}']").is_visible() == is_there


@pytest.mark.skipif("LLAMARL_PICTURES" not in os.environ, reason="`make pictures` asks for them")
def test_pictures(visit: Any, files: dict[str, str]) -> None:
    """Of each page and section, to be looked at."""
    folder = Path(os.environ["LLAMARL_PICTURES"])
    folder.mkdir(parents=True, exist_ok=True)
    runs = [Path(name) for name in os.environ.get("LLAMARL_PICTURES_OF", "").split(":") if name]
    for run in runs:
        report.main([str(run), "--output", str(folder / f"{run.name}.html")])
    pages = files | {run.name: (folder / f"{run.name}.html").absolute().as_uri() for run in runs}
    for (of_runs, url), width, scheme in product(pages.items(), WIDTHS, ("light", "dark")):
        name = f"{of_runs}-{scheme}"
        one = visit(url, width=width, scheme=scheme, ready="#summary .run")
        one.page.wait_for_timeout(300)
        one.page.screenshot(path=folder / f"{name}-{width}-top.png")
        one.page.screenshot(path=folder / f"{name}-{width}.jpg", type="jpeg", quality=75)  # for documents
        for section in ("forecast", "curves", "timeline", "rollouts", "settings", "messages"):
            one.page.evaluate("document.querySelector('header').style.position = 'static'")
            if one.page.locator(f"#{section}").is_visible():
                one.page.locator(f"#{section}").screenshot(path=folder / f"{name}-{width}-{section}.png")
