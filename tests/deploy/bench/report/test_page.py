"""The page of a report: as a file, and as a browser shows it."""

import re
import runpy
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest

from polybasic.chain.formats.files import write_json
from polybasic.deploy.bench.report.page import write_page
from polybasic.deploy.bench.report.rows import headline_table
from polybasic.deploy.bench.schema import Report
from tests.browser import Browser, Page
from tests.deploy.bench.report.example import HOSTILE, example, of_first_turn, with_system

HEIGHT = 900


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a report with everything in it, and texts that attack it."""
    report = with_system(
        example(complete=False, grown="cpu-100m", chain=HOSTILE, command=HOSTILE),
        "eagle2",
        description=HOSTILE,
        notes=[HOSTILE],
    )
    systems = {
        HOSTILE if name == "ngram" else name: system for name, system in report.systems.items()
    }
    path = tmp_path_factory.mktemp("page") / "report.html"
    write_page(path, report.model_copy(update={"systems": systems}))
    return path


def page_of(report: Report, folder: Path) -> str:
    write_page(folder / "report.html", report)
    return (folder / "report.html").read_text()


# As a file


def test_ids_are_unique_and_what_they_are_for_exists(written: Path) -> None:
    text = written.read_text()
    ids = re.findall(r'\bid="([^"]+)"', text)
    assert len(ids) == len(set(ids)) > 100
    used = re.findall(r'url\(#([^)]+)\)|href="#([^"]+)"', text)
    named = re.findall(r'aria-labelledby="([^"]+)"', text)
    wanted = {name for pair in used for name in pair if name} | set(" ".join(named).split())
    assert wanted <= set(ids)
    assert len(named) == 9, "every plot has a title and a description"


def test_plots_are_whole_and_take_colours_from_the_page(written: Path) -> None:
    text = written.read_text()
    plots = re.findall(r"<svg.*?</svg>", text, flags=re.DOTALL)
    assert len(plots) == 9
    style = text[text.index("<style>") : text.index("</style>")]
    light, dark = style.split("prefers-color-scheme: dark")
    for plot in plots:
        root = ElementTree.fromstring(plot)
        assert root.attrib["role"] == "img"
        colours = set(re.findall(r"(?:fill|stroke): ([^;\"]+)", plot))
        assert all(colour.startswith(("var(--", "url(#", "none")) for colour in colours)
        for name in re.findall(r"var\((--\w+)\)", plot):
            assert f"{name}:" in light
            assert f"{name}:" in dark


def test_plots_stand_alone_with_the_colours_of_the_page(tmp_path: Path) -> None:
    report = example(systems=("target", "eagle2", "polybasic_full"))
    write_json(tmp_path / "report.json", report.to_json())
    draw = runpy.run_path(str(Path(__file__).parents[4] / "docs" / "draw_performance.py"))["main"]
    draw([tmp_path / "report.json"] * 2, tmp_path)
    for name in ("speedup", "insertion"):
        text = (tmp_path / f"{name}.svg").read_text("utf-8")
        root = ElementTree.fromstring(text)
        assert root.tag == "{http://www.w3.org/2000/svg}svg"
        defined = set(re.findall(r"(--\w+):", text))
        assert set(re.findall(r"var\((--\w+)\)", text)) <= defined
    assert text.count(f"{report.chain}: ") == 2 * len(report.insertions)


def test_the_same_report_gives_the_same_page(tmp_path: Path) -> None:
    report = example(systems=("target", "polybasic"), tasks=("qa",))
    first, second = (page_of(report, tmp_path) for _ in range(2))
    assert first == second


def test_one_system_alone_has_a_page(tmp_path: Path) -> None:
    text = page_of(example(systems=("target",), tasks=("qa",), grouped=False), tmp_path)
    assert text.count("<svg") == 3
    assert "Speedup by task" not in text
    assert 'class="status"' not in text


def test_one_answer_has_a_page(tmp_path: Path) -> None:
    report = of_first_turn(example())
    headline = headline_table(report)
    assert headline is not None
    assert headline.header == ["system", "all", "mt_bench"], "only tasks that were reached"
    text = page_of(report, tmp_path)
    assert "after 1 of 48 turns" in text
    assert "Groups of prompts" not in text
    assert text.count("<svg") == 8


# In a browser


def opened(browser: Browser, path: Path, width: int = 1100, scheme: str = "light") -> Page:
    features = {"prefers-color-scheme": scheme}
    return Page(browser, path.as_uri(), width=width, height=HEIGHT, features=features)


@pytest.fixture(scope="module", params=["light", "dark"])
def page(request: pytest.FixtureRequest, browser: Browser, written: Path) -> Iterator[Page]:
    page = opened(browser, written, scheme=request.param)
    yield page
    page.close()


@pytest.mark.proof
def test_nothing_is_asked_for_and_nothing_is_wrong(page: Page) -> None:
    assert page.problems == []
    assert page.evaluate("performance.getEntriesByType('resource').length") == 0
    assert (
        page.evaluate("document.querySelectorAll('script, img, iframe, link[href^=h]').length") == 0
    )


@pytest.mark.proof
def test_texts_of_others_are_text(page: Page) -> None:
    assert HOSTILE in page.text("h1")
    assert any(HOSTILE in text for text in page.all("td", "e.textContent"))
    assert any(text.startswith(HOSTILE[:20]) for text in page.all("svg text", "e.textContent"))
    assert page.evaluate("document.title").startswith(f"Speed of {HOSTILE}")


@pytest.mark.proof
def test_a_partial_and_grown_report_says_so_before_all_else(page: Page) -> None:
    partial, grown = page.all(".status", "[e.textContent, e.getBoundingClientRect().bottom]")
    assert partial[0].startswith("Partial: the run was interrupted after 27 of 48 turns.")
    assert grown[0].startswith("Grown to the shapes of cpu-100m")
    assert grown[1] < page.evaluate("document.querySelector('h2').getBoundingClientRect().top")


@pytest.mark.proof
def test_text_can_be_read_on_its_ground(page: Page) -> None:
    """Contrast of 4.5 for text; of 3 for what is drawn (WCAG 2.2)."""
    luminance = """(colour) => {
        const [r, g, b] = colour.match(/[\\d.]+/g).map((one) => one / 255)
            .map((one) => one <= 0.04045 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4);
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    }"""
    seen = f"""(() => {{
        const luminance = {luminance};
        const section = document.querySelector('section');
        const ground = luminance(getComputedStyle(section).backgroundColor);
        const contrast = (colour) => {{
            const [low, high] = [luminance(colour), ground].sort((a, b) => a - b);
            return (high + 0.05) / (low + 0.05);
        }};
        const texts = [...document.querySelectorAll('td, .note, h2, section a')]
            .map((e) => contrast(getComputedStyle(e).color));
        const drawn = [...document.querySelectorAll('svg text')]
            .map((e) => contrast(getComputedStyle(e).fill));
        const bars = [...document.querySelectorAll('#rates-axes_1 > g > path')]
            .map((e) => getComputedStyle(e).fill).filter((one) => one !== 'none').map(contrast);
        return [Math.min(...texts), Math.min(...drawn), Math.min(...bars), bars.length];
    }})()"""
    texts, drawn, bars, num_bars = page.evaluate(seen)
    assert texts >= 4.5
    assert drawn >= 4.5
    assert bars >= 2.2
    assert num_bars >= 10


@pytest.mark.proof
def test_a_dark_page_has_dark_plots(browser: Browser, written: Path) -> None:
    seen = []
    page = opened(browser, written)
    for scheme in ("light", "dark"):
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        page.ask("Emulation.setEmulatedMedia", features=features)
        seen.append(
            page.evaluate(
                "['body', 'section', 'svg text', '#rates-axes_1 path'].map((name) => "
                "(({color, fill, backgroundColor}) => [color, fill, backgroundColor].join())"
                "(getComputedStyle(document.querySelector(name))))"
            )
        )
    page.close()
    for light, dark in zip(*seen, strict=True):
        assert light != dark


@pytest.mark.proof
def test_a_phone_shows_all_without_moving_sideways(browser: Browser, written: Path) -> None:
    page = opened(browser, written, width=360)
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    wide = page.all(".scroll", "e.scrollWidth > e.clientWidth")
    assert any(wide), "tables move in boxes of their own"
    sizes = page.all("svg text", "e.getBoundingClientRect().height")
    assert min(sizes) >= 10, "letters of plots can be read"
    overlong = page.all(
        "svg",
        "[...e.querySelectorAll('text')].some((one) => "
        "one.getBoundingClientRect().right > e.getBoundingClientRect().right + 1)",
    )
    assert not any(overlong)
    page.close()


@pytest.mark.proof
def test_print_is_light_and_cuts_no_table(browser: Browser, written: Path) -> None:
    page = opened(browser, written, width=760, scheme="dark")
    dark = page.evaluate("getComputedStyle(document.body).color")
    features = [{"name": "prefers-color-scheme", "value": "dark"}]
    page.ask("Emulation.setEmulatedMedia", media="print", features=features)
    assert page.evaluate("getComputedStyle(document.body).color") == "rgb(28, 34, 48)" != dark
    assert page.evaluate("getComputedStyle(document.querySelector('nav')).display") == "none"
    cut = page.all(".scroll", "getComputedStyle(e).overflowX !== 'visible'")
    assert not any(cut)
    page.close()
