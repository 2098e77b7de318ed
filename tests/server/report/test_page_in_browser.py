"""A page of many runs in a real browser: what is filtered is gone, and the pointer reads a curve's value."""

from pathlib import Path
from xml.etree import ElementTree

import pytest
from browser_page import in_a_browser
from chromium import Page, browser

from perennial.server.local import LocalRuntime
from perennial.server.report.load import load
from perennial.server.report.page import write_page
from perennial.server.run.folder import RunFolder
from perennial.testing.tiny_federation import toy_config

ROUNDS = 4
SECTIONS = "[...document.querySelectorAll('section[data-scenario]')].filter(own => own.offsetParent)"
METHODS = "[...document.querySelectorAll('tbody tr[data-method]')].filter(own => own.offsetParent)"
POINT = """(() => {{
  const figure = [...document.querySelectorAll('figure')].find(own => own.innerText.startsWith('{caption}'));
  const svg = figure.querySelector('svg'), facts = JSON.parse(svg.dataset.figure), line = facts.lines[0];
  svg.scrollIntoView({{block: 'center'}});
  const frame = svg.getBoundingClientRect(), scale = frame.width / svg.viewBox.baseVal.width;
  const [left, top, right, bottom] = facts.box, at = (value, [low, high]) => (value - low) / (high - low);
  return [frame.left + scale * (left + at(line.x[{place}], facts.x) * (right - left)),
          frame.top + scale * (bottom - at(line.y[{place}], facts.y) * (bottom - top))];
}})()"""


def settings(number: int) -> tuple[str, dict[str, object]]:
    """Of a hundred runs the method, and what tells their scenarios apart."""
    return ("fedavg", "ditto")[number % 2], {"samples": 40 + number // 2 % 10}


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A hundred runs: two that were trained, and the others with the numbers of these."""
    folder = tmp_path_factory.mktemp("study")
    made: dict[str, RunFolder] = {}
    for number in range(100):
        method, scenario = settings(number)
        changed = [f"scenario.{key}={value}" for key, value in scenario.items()]
        config = toy_config(method, "evaluate_every=1", *changed, rounds=ROUNDS, seed=number // 20)
        run = RunFolder.create(folder / f"{method}-{number}-{'a-long-name-' * 6}", config)
        if method not in made:
            LocalRuntime(config).run(run)
            made[method] = run
            continue
        for name in ("metrics.jsonl", "summary.json"):
            text = (made[method].path / name).read_text()
            (run.path / name).write_text(text.replace('"seed": 0', f'"seed": {config.seed}'))
    return folder


def typed(page: Page, name: str, text: str) -> None:
    page.run(
        f"(() => {{ const own = document.querySelector('[data-filter={name}]'); own.value = {text!r};"
        "own.dispatchEvent(new Event('input')); })()"
    )


@pytest.mark.slow
@in_a_browser
def test_a_hundred_runs_are_filtered_and_a_curve_is_read_by_pointer(study: Path, tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    write_page([study], file)
    with browser(tmp_path, file.as_uri()) as page:
        page.until("document.readyState === 'complete' && document.querySelector('form.filters')")
        assert page.run("document.body.innerText").count("100 runs, 10 scenarios") == 1
        assert page.run(f"{SECTIONS}.length") == 10
        scenario = page.run(f"{SECTIONS}[3].dataset.scenario")
        typed(page, "scenario", scenario)
        assert page.run(f"{SECTIONS}.map(own => own.dataset.scenario)") == [scenario]
        assert page.run("[...document.querySelectorAll('nav a')].filter(own => own.offsetParent).length") == 2
        assert page.run(f"{METHODS}.filter(own => own.closest('#runs')).length") == 10
        typed(page, "method", "ditto")
        assert set(page.run(f"{METHODS}.map(own => own.dataset.method)")) == {"Ditto"}
        assert set(
            page.run(
                "[...document.querySelectorAll('.legend li')].filter(o => o.offsetParent).map(o => o.innerText)"
            )
        )
        page.call("Page.reload")  # as `report --serve` has it renewed
        page.until("document.readyState === 'complete' && document.querySelector('[data-filter=method]').value")
        assert set(page.run(f"{METHODS}.map(own => own.dataset.method)")) == {"Ditto"}
        typed(page, "scenario", "nowhere")
        assert page.run(f"{SECTIONS}.length") == 0

        typed(page, "scenario", "")
        typed(page, "method", "")
        assert page.run(f"{SECTIONS}.length") == 10
        x, y = page.run(POINT.format(caption="Test accuracy against rounds", place=1))
        page.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        told = page.until("document.querySelector('.told')?.textContent")
        first = sorted(study.iterdir())[0]
        run = load(first)
        value = 100 * run.curves[next(iter(run.models))].value[1]
        name = "Ditto, global"
        assert told.startswith(f"{name}: 2, {float(f'{value:.4g}'):g}")
        page.call("Input.dispatchMouseEvent", type="mouseMoved", x=2, y=2)
        assert page.run("document.querySelector('.told')") is None
        figure = f"{SECTIONS}[0].querySelector('figure')"
        before = page.run(f"{figure}.clientWidth")
        page.run(f"{figure}.querySelectorAll('button')[0].click()")
        assert page.run(f"{figure}.clientWidth") > 1.5 * before
        saved = ElementTree.fromstring(page.run(f"standalone({figure}.querySelector('svg'))"))
        assert "Ditto, global" in "".join(saved.itertext())
        assert "--s0:#" in saved.attrib["style"].replace(" ", "")
        for width in (1280, 390):
            page.call(
                "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False
            )
            assert page.run("document.documentElement.scrollWidth") <= width
            overlap = """[...document.querySelectorAll('#runs tbody tr')].some(row =>
              row.firstChild.scrollWidth > row.firstChild.clientWidth + 1)"""
            assert not page.run(overlap)
        errors = [own for own in page.events if own["method"] in ("Runtime.exceptionThrown", "Log.entryAdded")]
        assert errors == []
