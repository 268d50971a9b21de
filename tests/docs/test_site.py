"""The site in a real browser, if one is installed: three widths, both colour schemes, the keyboard, the filter, axe-core.

The site is built once and served from this process. With FA_SERVE_SCREENSHOTS=FOLDER pictures of tested pages are kept there,
and with FA_SERVE_CASES=all each page is tested in both schemes. axe-core comes with the package axe-playwright-python; without
it, its test is skipped.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from documentation import ROOT

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
WIDTHS = (360, 768, 1440)
SCHEMES = ("light", "dark")
PAGES = ("index", "models", "recipes", "kernels/index")
PICTURES = os.environ.get("FA_SERVE_SCREENSHOTS")
SHORT = "document.querySelectorAll('tbody').forEach(body => [...body.rows].slice(15).forEach(row => row.remove()))"
"""axe-core looks at each cell of a table of 500 rows, which are alike."""
VIOLATIONS = """
axe.run({resultTypes: ['violations']}).then(found => found.violations
  .filter(each => each.impact === 'serious' || each.impact === 'critical')
  .map(each => `${each.id}: ${each.nodes[0].html.slice(0, 120)}: ${each.nodes[0].failureSummary.slice(0, 200)}`))
"""


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        """Requests are not logged."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of the site, built as `make docs` builds it."""
    pytest.importorskip("mkdocs", reason="the extra docs is not installed")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(folder)]
    built = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True, check=False
    )
    assert built.returncode == 0, built.stdout + built.stderr
    return folder


@pytest.fixture(scope="module")
def browser(site: Path) -> Iterator[Any]:
    """A browser, and the address of the site as its attribute `site`."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if CHROMIUM is None:
        pytest.skip("no Chromium on this machine")
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with playwright.sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        started.site = f"http://127.0.0.1:{server.server_port}"
        yield started
        started.close()
    server.shutdown()
    server.server_close()


def open_page(browser: Any, name: str, scheme: str = "light", width: int = 1440) -> Any:
    page = browser.new_page(color_scheme=scheme, viewport={"width": width, "height": 900})
    page.problems = []
    page.on("pageerror", lambda error: page.problems.append(str(error)))
    page.goto(f"{browser.site}/{name}.html")
    return page


@pytest.mark.slow
@pytest.mark.parametrize("name", PAGES)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_pages_fit_their_window(browser: Any, scheme: str, name: str) -> None:
    """Tables and code scroll in their own box, at the widths of a phone, a tablet and a desk."""
    page = open_page(browser, name, scheme)
    for width in WIDTHS:
        page.set_viewport_size({"width": width, "height": 900})
        # the theme moves its search field for a moment when the window changes
        page.wait_for_function(f"document.documentElement.scrollWidth <= {width}", timeout=5000)
        if PICTURES is not None:
            page.screenshot(path=Path(PICTURES) / f"site-{name.replace('/', '-')}-{width}-{scheme}.png")
    assert page.problems == []
    page.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", PAGES)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_axe_has_no_serious_findings(browser: Any, scheme: str, name: str) -> None:
    axe = importlib.util.find_spec("axe_playwright_python")
    if axe is None or axe.origin is None:
        pytest.skip("axe-playwright-python is not installed")
    script = (Path(axe.origin).parent / "axe.min.js").read_text(encoding="utf-8")
    page = open_page(browser, name, scheme)
    page.evaluate(SHORT)
    page.evaluate(script)
    assert page.evaluate(VIOLATIONS) == []
    page.close()


@pytest.mark.slow
def test_drawings_are_dark_on_a_dark_page(browser: Any) -> None:
    for scheme, expected in (("light", "none"), ("dark", "invert")):
        page = open_page(browser, "kernels/index", scheme)
        assert expected in page.evaluate("getComputedStyle(document.querySelector('article img[src$=\".svg\"]')).filter")
        page.close()


PARTS = """
[...document.querySelectorAll('article td code')].flatMap(code => [...code.childNodes]).filter(part => part.data).map(part => {
  const range = document.createRange();
  range.selectNode(part);
  return [part.data, range.getClientRects().length];
})
"""


@pytest.mark.slow
@pytest.mark.parametrize("width", [360, 768])
@pytest.mark.parametrize("name", ["models", "kernels/index"])
def test_names_in_cells_break_between_their_parts(browser: Any, name: str, width: int) -> None:
    page = open_page(browser, name, width=width)
    parts = page.evaluate(PARTS)
    assert len(parts) > 40
    assert [text for text, lines in parts if lines > 1 and not re.search(r"[\s-]", text)] == []
    assert any(page.locator("article td code", has_text="_").first.locator("wbr").all())
    page.close()


@pytest.mark.slow
def test_a_chart_stays_readable_on_a_phone(browser: Any) -> None:
    """It keeps its width and scrolls in its box, also by keyboard."""
    page = open_page(browser, "index", width=360)
    image = page.locator("article img[src$='overview.svg']")
    assert image.evaluate("image => image.clientWidth") > 600
    assert image.evaluate("image => image.parentElement.clientWidth") < 360
    assert image.evaluate("image => image.parentElement.tabIndex") == 0
    page.close()


@pytest.mark.slow
def test_the_filter_of_types_needs_no_mouse(browser: Any) -> None:
    page = open_page(browser, "models", width=360)
    page.get_by_label("Find a type:").focus()
    page.keyboard.type("qwen3-moe")
    shown = page.locator("table").first.locator("tbody tr:visible td:first-child").all_inner_texts()
    assert "qwen3_moe" in shown
    assert all("qwen3" in name and "moe" in name for name in shown)
    assert page.locator(".filter output").inner_text().startswith(f"{len(shown)} of ")
    page.close()


@pytest.mark.slow
def test_the_keyboard_reaches_the_search_and_the_next_page(browser: Any) -> None:
    page = open_page(browser, "quickstart")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent.trim()") == "Skip to content"
    page.keyboard.press("/")
    assert page.evaluate("document.activeElement.getAttribute('aria-label')") == "Search"
    page.keyboard.type("supported gpus")
    first = page.locator(".md-search-result__item").first
    first.wait_for()
    assert "Log" not in first.inner_text()
    page.keyboard.press("Escape")
    assert page.locator(".md-footer__link--prev").get_attribute("href") == "install.html"
    assert page.locator(".md-footer__link--next").get_attribute("href") == "recipes.html"
    page.close()


def test_links_of_the_built_pages_lead_somewhere(site: Path) -> None:
    """Every link and picture within the site, with its anchor, in what the reader gets."""
    pages = {path: path.read_text(encoding="utf-8") for path in site.rglob("*.html") if path.name != "404.html"}
    known = {path: set(re.findall(r'\bid="([^"]+)"', text)) for path, text in pages.items()}
    broken = []
    for path, text in pages.items():
        body = text.partition("<article")[2].partition("</article>")[0]
        for link in re.findall(r'(?:href|src)="([^"]+)"', body):
            if re.match(r"[a-z]+:", link):
                continue
            name, _, anchor = link.replace("%20", " ").partition("#")
            target = (path.parent / name).resolve() if name else path
            if not target.exists() or (anchor and target in known and anchor not in known[target]):
                broken.append(f"{path.relative_to(site)}: {link}")
    assert len(pages) > 40
    assert broken == []


def test_the_version_is_that_of_the_project(site: Path) -> None:
    version = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert version is not None
    assert f"fa_serve {version[1]}" in (site / "index.html").read_text(encoding="utf-8")
