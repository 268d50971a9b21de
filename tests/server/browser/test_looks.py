"""The looks of the playground: contrast, names, widths, axe-core, and pictures.

Pictures of three widths in two colour schemes are written to the folders "playground" and "playground-states" of pytest's base
folder. With
FA_SERVE_SCREENSHOTS=docs/images the tests also take the screenshots of the documentation.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from browser_pages import answering, expecting, model_card, open_page

WIDTHS = (360, 768, 1440)


CONTRAST = """
() => {
  const light = css => {
    const [r, g, b] = css.match(/[\\d.]+/g).map(x => x / 255).map(x => x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ground = node => {
    const css = getComputedStyle(node).backgroundColor;
    return css === "rgba(0, 0, 0, 0)" ? ground(node.parentElement) : css;
  };
  const shown = node => node.checkVisibility() && node.innerText?.trim() && !node.disabled;
  return Math.min(...[...document.querySelectorAll("body *")].filter(shown).map(node => {
    const [a, b] = [light(getComputedStyle(node).color), light(ground(node))].sort((x, y) => y - x);
    return (a + 0.05) / (b + 0.05);
  }));
}
"""


@pytest.mark.slow
def test_light_and_dark_with_the_server_at_work(page, served):
    """A chat and charts under load, as in the screenshots. The text has enough contrast in both colour schemes."""
    expect = expecting()
    message = page.get_by_label("Message", exact=True)
    notes = page.locator(".note")
    seconds = 20 if os.environ.get("FA_SERVE_SCREENSHOTS") else 1
    load = [
        sys.executable,
        "-m",
        "fa_serve",
        "bench",
        "--url",
        served.url,
        "--requests",
        "100000",  # more than the test waits for, because the charts are drawn every few seconds
        "--concurrency",
        "12",
    ]
    busy = subprocess.Popen([*load, "--prompt-tokens", "20", "--output-tokens", "60"], stderr=subprocess.DEVNULL)
    try:
        page.get_by_label("Temperature").fill("0")
        for number, question in enumerate(("What is 17 + 25?", "Now 3 plus 4.")):
            message.fill(question)
            page.keyboard.press("Enter")
            expect(notes).to_have_count(number + 1, timeout=30_000)
        expect(page.locator("figcaption output").nth(3)).not_to_have_text("0", timeout=60_000)
        page.wait_for_timeout(1000 * seconds)
        page.get_by_label("Temperature").fill("0.7")
        message.fill("Write a Python function that reads a file.")
        page.keyboard.press("Enter")
        expect(page.locator(".assistant").last).to_have_text(re.compile(r"\w{4}"), timeout=30_000)
        if os.environ.get("FA_SERVE_SCREENSHOTS"):
            expect(notes).to_have_count(3, timeout=60_000)
        grounds = set()
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)
            if folder := os.environ.get("FA_SERVE_SCREENSHOTS"):
                page.screenshot(path=Path(folder) / f"page-{scheme}.png")
            grounds.add(page.evaluate("() => getComputedStyle(document.body).backgroundColor"))
            assert page.evaluate(CONTRAST) >= 4.5, scheme
        assert len(grounds) == 2
    finally:
        busy.kill()
        busy.wait()
        page.keyboard.press("Escape")
    expect(notes).to_have_count(3)


LAYOUT = """() => {
  const controls = "button, input, select, textarea, a, [role=region], [role=log]";
  const names = [...document.querySelectorAll(controls)].filter(node => node.checkVisibility());
  const named = node => node.ariaLabel || node.labels?.length || node.textContent.trim() || node.title;
  const cut = node => node.getBoundingClientRect().right > innerWidth + 1 && !node.closest("pre, .table, #result");
  return {
    wide: document.documentElement.scrollWidth - innerWidth,
    unnamed: names.filter(node => !named(node)).map(node => node.outerHTML),
    cut: names.filter(cut).map(node => node.outerHTML),
    landmarks: ["header", "nav", "main", "aside"].map(tag => document.querySelectorAll(tag).length),
  };
}"""
LONG = (
    "# A title\n\n1. one\n2. two with `code`\n\n```python\n"
    + "very_long_line = " * 12
    + "\n```\n\n"
    + "| a | b | c |\n|-|-|-|\n"
    + f"| {'x' * 60} | 2 | 3 |"
)


@pytest.mark.slow
def test_three_widths_in_two_schemes(browser, served, tmp_path_factory):
    """Nothing is cut off, everything has a name, text has contrast, and axe-core finds nothing serious."""
    expect = expecting()
    folder = tmp_path_factory.mktemp("playground", numbered=False)
    page = open_page(browser, served.url, **{"v1/chat/completions": answering(LONG)})
    page.get_by_label("Message", exact=True).fill("Show me everything, " + "and-a-word-without-a-break" * 4)
    page.keyboard.press("Enter")
    expect(page.locator(".note")).to_have_count(1)
    for width in WIDTHS:
        page.set_viewport_size({"width": width, "height": 800})
        settings = page.get_by_role("button", name="Settings")
        for scheme in ("light", "dark"):
            if settings.is_visible():
                settings.click()
                page.get_by_label("Theme").select_option(scheme)
                check_looks(page, scheme)
                page.screenshot(path=folder / f"settings-{width}-{scheme}.png")
                page.keyboard.press("Escape")
                expect(settings).to_have_attribute("aria-expanded", "false")
            else:
                page.get_by_label("Theme").select_option(scheme)
            for view in ("Chat", "Model"):
                page.get_by_role("link", name=view).click()
                check_looks(page, scheme)
                page.screenshot(path=folder / f"{view.lower()}-{width}-{scheme}.png")
            page.get_by_role("link", name="Chat").click()
    assert len(list(folder.glob("*.png"))) == 16
    page.reload()
    assert page.evaluate("getComputedStyle(document.documentElement).colorScheme") == "dark", "the theme is kept"
    page.close()


def check_looks(page, scheme: str) -> None:
    found = page.evaluate(LAYOUT)
    assert found == {"wide": 0, "unnamed": [], "cut": [], "landmarks": [1, 1, 1, 1]}
    assert page.evaluate(CONTRAST) >= 4.5, scheme


ANSWER = (
    """The picture shows **three bands** of colour, from dark to light.

## What each band is

1. The first band is `#204060`.
2. The second band is `#508090`; it takes *half* of the width.
    - It has a soft edge.
3. The third band is nearly white.

> A band without an edge is hard to measure.

```python
def bands(image):
    \"\"\"The mean colour of each third of an image.\"\"\"
    thirds = numpy.array_split(numpy.asarray(image), 3, axis=1)
    return [third.reshape(-1, 3).mean(axis=0) for third in thirds]
```

| band | from | to | share of all pixels |
|---|---|---|---|
| first | 0 | 79 | 25 % |
| second | 80 | 239 | 50 % |
| third | 240 | 319 | 25 % |

"""
    + "A long answer has paragraphs that fill several lines, so that the reader has to scroll to its end. " * 12
)
DRAWING = """() => {
  const canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [320, 180];
  const paint = canvas.getContext("2d");
  for (const [at, colour] of [[0, "#204060"], [80, "#508090"], [240, "#e8f0f0"]]) {
    paint.fillStyle = colour;
    paint.fillRect(at, 0, 320, 180);
  }
  pictures.push(canvas.toDataURL());
  drawPictures();
}"""


@pytest.mark.slow
def test_states_at_three_widths_in_two_schemes(browser, served, tmp_path_factory):
    """An empty page, an image before it is sent, a long answer about it, an error, and a server that has gone."""
    expect = expecting()
    folder = tmp_path_factory.mktemp("playground-states", numbered=False)
    page = open_page(browser, served.url, **{"v1/models": model_card(input_modalities=["text", "image"])})
    message = page.get_by_label("Message", exact=True)

    def picture(state: str, scrolled: str = "scrollHeight") -> None:
        for width in WIDTHS:
            page.set_viewport_size({"width": width, "height": 800})
            for scheme in ("light", "dark"):
                page.evaluate("scheme => { document.documentElement.style.colorScheme = scheme; }", scheme)
                page.evaluate(f"{{ const log = document.getElementById('log'); log.scrollTop = log.{scrolled}; }}")
                check_looks(page, f"{state} {scheme}")
                page.screenshot(path=folder / f"{state}-{width}-{scheme}.png")

    expect(page.get_by_role("button", name="Add image")).to_be_visible()
    picture("empty")
    page.evaluate(DRAWING)
    message.fill("What is in this picture?")
    picture("image")
    page.route("**/v1/chat/completions", answering(ANSWER))
    page.keyboard.press("Enter")
    expect(page.locator(".note")).to_have_count(1)
    picture("answer-end")
    picture("answer", scrolled="clientTop")
    page.unroute("**/v1/chat/completions")
    page.route("**/v1/chat/completions", lambda route: route.abort())
    page.route("**/v1/models", lambda route: route.abort())
    message.fill("And which band is the widest?")
    page.keyboard.press("Enter")
    expect(page.locator(".problem")).to_have_count(1)
    expect(page.locator("#model")).to_have_class("lost")
    picture("error")
    assert len(list(folder.glob("*.png"))) == 5 * len(WIDTHS) * 2
    page.close()


@pytest.mark.slow
@pytest.mark.parametrize("width", [360, 1440])
@pytest.mark.parametrize("state", ["empty", "answered"])
def test_axe_finds_nothing(browser, served, width, state):
    """axe-core's rules for WCAG 2.1 A and AA. Source: https://github.com/dequelabs/axe-core"""
    axe = pytest.importorskip("axe_playwright_python", reason="axe-playwright-python is not installed")
    cards = model_card(input_modalities=["text", "image"])
    page = open_page(browser, served.url, **{"v1/models": cards, "v1/chat/completions": answering(ANSWER)})
    page.set_viewport_size({"width": width, "height": 800})
    if state == "answered":
        expecting()(page.get_by_role("button", name="Add image")).to_be_visible()
        page.evaluate(DRAWING)
        page.get_by_label("Message", exact=True).fill("What is in this picture?")
        page.keyboard.press("Enter")
        expecting()(page.locator(".note")).to_have_count(1)
        page.evaluate(DRAWING)
    page.evaluate((Path(axe.__file__).parent / "axe.min.js").read_text())
    found = page.evaluate("axe.run({runOnly: ['wcag2a', 'wcag2aa', 'wcag21a', 'wcag21aa', 'best-practice']})")
    assert [(each["id"], each["nodes"][0]["html"]) for each in found["violations"]] == []
    page.close()
