"""The playground in a real browser, where there is one: a chat, the stop button, the keyboard, charts that move.

With FA_SERVE_SCREENSHOTS=docs/images the pictures in the documentation are made anew.
"""

import os
import re
import shutil
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
        page = browser.new_page(viewport={"width": 1180, "height": 720}, color_scheme="light")
        page.problems = []
        page.on("pageerror", lambda error: page.problems.append(str(error)))
        page.on("console", lambda message: page.problems.append(message.text) if message.type == "error" else None)
        page.goto(served.url)
        yield page
        browser.close()


def picture(page, name: str) -> None:
    if folder := os.environ.get("FA_SERVE_SCREENSHOTS"):
        page.screenshot(path=Path(folder) / f"{name}.png")


def test_chat_stop_and_charts(page):
    expect = pytest.importorskip("playwright.sync_api").expect
    message, answers, notes = page.get_by_label("Message", exact=True), page.locator(".assistant"), page.locator(".note")
    page.get_by_label("Temperature").fill("0")
    expect(page.locator("#model")).to_have_text("fa-serve-demo")
    for number, (question, answer) in enumerate({"What is 17 + 25?": "17 + 25 = 42.", "Now 3 plus 4.": "3 + 4 = 7."}.items()):
        message.fill(question)
        page.keyboard.press("Enter")
        expect(notes).to_have_count(number + 1)
        expect(answers.last).to_contain_text(answer)
        expect(notes.last).to_contain_text(re.compile(r"stop · \d+ tokens · first after \d+ ms"))

    page.get_by_label("Temperature").fill("3")
    message.fill("Who are you?")
    page.get_by_role("button", name="Send").click()
    expect(page.locator(".error")).to_contain_text("temperature")

    page.get_by_label("Temperature").fill("0.7")
    message.fill("Write a function that parses a file.")
    page.keyboard.press("Enter")
    expect(page.get_by_role("button", name="Stop")).to_be_enabled()
    page.keyboard.press("Escape")
    expect(page.get_by_role("button", name="Stop")).to_be_disabled()
    expect(notes).to_have_count(3)
    expect(page.locator("polyline").first).to_have_attribute("points", re.compile(r" "))
    expect(page.locator("figcaption output").nth(1)).to_have_text(re.compile(r"[1-9]"))
    picture(page, "page-light")
    page.emulate_media(color_scheme="dark")
    picture(page, "page-dark")
    page.get_by_role("button", name="New").click()
    expect(page.locator(".message")).to_have_count(0)
    assert [problem for problem in page.problems if "400" not in problem] == []
