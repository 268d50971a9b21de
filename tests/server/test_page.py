"""The playground in a real browser, if one is installed: a chat, the stop button, the keyboard, both colour schemes, charts.

With FA_SERVE_SCREENSHOTS=docs/images the tests also take the screenshots of the documentation.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def test_it_loads_nothing_from_elsewhere(served):
    response = httpx.get(served.url)
    assert response.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in response.headers["content-security-policy"]
    assert not re.findall(r"(?:src|href)=\"(?:https?:)?//", response.text)


@pytest.fixture(scope="module")
def page(served):
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if CHROMIUM is None:
        pytest.skip("no Chromium on this machine")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1180, "height": 860}, color_scheme="light")
        page.problems = []
        page.on("pageerror", lambda error: page.problems.append(str(error)))
        page.on("console", lambda message: page.problems.append(message.text) if message.type == "error" else None)
        page.goto(served.url)
        yield page
        browser.close()


def write_on(route) -> None:
    """Make an answer go on until it is stopped. The model itself may end it after four tokens."""
    route.continue_(post_data=json.dumps(route.request.post_data_json | {"ignore_eos": True}))


def picture(page, name: str) -> None:
    if folder := os.environ.get("FA_SERVE_SCREENSHOTS"):
        page.screenshot(path=Path(folder) / f"{name}.png")


def test_chat_stop_and_charts(page):
    expect = pytest.importorskip("playwright.sync_api").expect
    message = page.get_by_label("Message", exact=True)
    answers = page.locator(".assistant")
    notes = page.locator(".note")
    page.get_by_label("Temperature").fill("0")
    expect(page.locator("#model")).to_have_text("fa-serve-demo")
    for number, (question, answer) in enumerate({"What is 17 + 25?": "17 + 25 = 42.", "Now 3 plus 4.": "3 + 4 = 7."}.items()):
        message.fill(question)
        page.keyboard.press("Enter")
        expect(notes).to_have_count(number + 1)
        expect(answers.last).to_contain_text(answer)
        expect(notes.last).to_contain_text(re.compile(r"stop · \d+ tokens · first token after \d+ ms"))

    page.get_by_label("Temperature").fill("3")
    message.fill("Who are you?")
    page.get_by_role("button", name="Send").click()
    expect(page.locator(".error")).to_contain_text("temperature")

    page.get_by_label("Temperature").fill("0.7")
    page.route("**/v1/chat/completions", write_on)
    message.fill("Write a function that parses a file.")
    page.keyboard.press("Enter")
    expect(page.get_by_role("button", name="Stop")).to_be_enabled()
    page.keyboard.press("Escape")
    expect(page.get_by_role("button", name="Stop")).to_be_disabled()
    expect(notes).to_have_count(3)
    expect(page.locator("polyline").first).to_have_attribute("points", re.compile(r" "))
    expect(page.locator("figcaption output").nth(1)).to_have_text(re.compile(r"[1-9]"))
    page.get_by_role("button", name="New").click()
    expect(page.locator(".message")).to_have_count(0)

    message.fill("Write another function.")
    page.keyboard.press("Enter")
    expect(answers.last).to_have_text(re.compile(r"\w"))
    page.get_by_role("button", name="New").click()  # in the middle of an answer
    expect(page.get_by_role("button", name="Stop")).to_be_disabled()
    page.unroute("**/v1/chat/completions")
    assert page.evaluate("messages") == []
    assert [problem for problem in page.problems if "400" not in problem] == []


def test_it_needs_no_mouse(page):
    expect = pytest.importorskip("playwright.sync_api").expect
    message = page.get_by_label("Message", exact=True)
    notes = page.locator(".note")
    message.focus()
    page.route("**/v1/chat/completions", write_on)
    message.fill("Write a function")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("that parses a file.")
    assert message.input_value() == "Write a function\nthat parses a file."
    page.keyboard.press("Enter")
    expect(page.get_by_role("button", name="Stop")).to_be_enabled()
    expect(page.locator(".assistant").last).to_have_text(re.compile(r"\w"))
    page.keyboard.press("Tab")  # Send is disabled meanwhile
    expect(page.get_by_role("button", name="Stop")).to_be_focused()
    page.keyboard.press("Enter")
    expect(notes.last).to_contain_text("stopped")
    page.unroute("**/v1/chat/completions")
    expect(message).to_be_focused()
    for name in ("Send", "New"):
        page.keyboard.press("Tab")
        expect(page.get_by_role("button", name=name)).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator(".message")).to_have_count(0)


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


def test_light_and_dark_with_the_server_at_work(page, served):
    """A chat and charts under load, as in the screenshots. The text has enough contrast in both colour schemes."""
    expect = pytest.importorskip("playwright.sync_api").expect
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
        message.fill("Write a function that parses a file.")
        page.keyboard.press("Enter")
        expect(page.locator(".assistant").last).to_have_text(re.compile(r"\w{4}"), timeout=30_000)
        grounds = set()
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)
            picture(page, f"page-{scheme}")
            grounds.add(page.evaluate("() => getComputedStyle(document.body).backgroundColor"))
            assert page.evaluate(CONTRAST) >= 4.5, scheme
        assert len(grounds) == 2
    finally:
        busy.kill()
        busy.wait()
        page.keyboard.press("Escape")
    expect(notes).to_have_count(3)
