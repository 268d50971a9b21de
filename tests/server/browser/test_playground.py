"""The playground in a real browser: chats, failures, history, images, encoders and the keyboard."""

import json
import re

import pytest
from browser_pages import answering, expecting, model_card, open_page, stream, write_on

PIXEL = "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="


@pytest.mark.slow
def test_chat_stop_and_charts(page):
    expect = expecting()
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
        expect(notes.last).to_contain_text(re.compile(r"complete · \d+ tokens · first token after \d+ ms"))

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
    expect = expecting()
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


@pytest.mark.slow
def test_a_mistake_of_the_server_and_of_the_network_keeps_the_text(browser, served):
    expect = expecting()
    page = open_page(browser, served.url)
    page.wait_for_function("() => model")  # before the server has said which, the page asks nothing
    message = page.get_by_label("Message", exact=True)
    problem = page.locator(".error .problem")
    failures = {
        "can't be reached": lambda route: route.abort(),
        "The server answered with status 502.": lambda route: route.fulfill(status=502, body="<h1>Bad gateway</h1>"),
        "the step failed": lambda route: route.fulfill(
            content_type="text/event-stream",
            body=stream("half an").split("data: [DONE]")[0].rsplit("data: ", 1)[0]
            + 'data: {"error": {"message": "the step failed"}}\n\n',
        ),
    }
    for said, fail in failures.items():
        page.evaluate("begin()")
        page.route("**/v1/chat/completions", fail)
        message.fill("A long question that took an hour to write.")
        page.keyboard.press("Enter")
        expect(problem).to_contain_text(said)
        expect(page.locator(".user .text")).to_have_text("A long question that took an hour to write.")
        page.unroute("**/v1/chat/completions")
    expect(page.locator(".error .text")).to_have_text("half an")
    page.reload()
    expect(problem).to_contain_text("the step failed")
    page.route("**/v1/chat/completions", answering("better"))
    page.get_by_role("button", name="Retry").click()
    expect(page.locator(".assistant .text")).to_have_text("better")
    expect(page.locator(".error")).to_have_count(0)
    assert page.evaluate("told()") == [
        {"role": "user", "content": "A long question that took an hour to write."},
        {"role": "assistant", "content": "better"},
    ]
    page.route("**/v1/models", lambda route: route.abort())
    page.route("**/metrics", lambda route: route.abort())
    expect(page.locator("#model")).to_have_text("the server can't be reached", timeout=10_000)
    page.unroute("**/v1/models")
    page.unroute("**/metrics")
    expect(page.locator("#model")).to_have_text("fa-serve-demo", timeout=10_000)
    page.close()


@pytest.mark.slow
def test_retry_edit_copy_and_history(browser, served):
    expect = expecting()
    page = open_page(browser, served.url)
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    message = page.get_by_label("Message", exact=True)
    texts = page.locator(".message .text")
    sent = []

    def answer(route):
        sent.append(route.request.post_data_json)
        route.fulfill(content_type="text/event-stream", body=stream(f"```python\nanswer = {len(sent)}\n```"))

    page.route("**/v1/chat/completions", answer)
    page.get_by_label("System message").fill("Be brief.")
    for number, question in enumerate(("First", "Second")):
        message.fill(question)
        page.keyboard.press("Enter")
        expect(page.locator(".note")).to_have_count(number + 1)
    page.get_by_role("button", name="Retry").click()
    expect(texts.last).to_contain_text("answer = 3")
    assert sent[2] == sent[1]
    assert [each["role"] for each in sent[1]["messages"]] == ["system", "user", "assistant", "user"]
    page.get_by_role("button", name="Copy the code").last.click()
    assert page.evaluate("navigator.clipboard.readText()") == "answer = 3"
    expect(page.locator(".code button").last).to_have_text("Copied")
    page.get_by_role("button", name="Copy", exact=True).last.click()
    assert page.evaluate("navigator.clipboard.readText()") == "```python\nanswer = 3\n```"

    page.get_by_role("button", name="Edit").first.click()
    expect(message).to_have_value("First")
    page.get_by_role("button", name="Keep it").click()
    expect(message).to_have_value("")
    expect(texts).to_have_count(4)
    page.get_by_role("button", name="Edit").first.click()
    message.fill("Edited")
    page.keyboard.press("Enter")
    expect(texts).to_have_count(2)
    expect(texts.last).to_contain_text("answer = 4")
    assert sent[3]["messages"] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Edited"}]

    page.get_by_label("API key").fill("secret")
    page.get_by_role("button", name="New").click()
    message.fill("Another")
    page.keyboard.press("Enter")
    expect(page.locator(".note")).to_have_count(1)
    page.reload()
    expect(texts.first).to_have_text("Another")
    expect(page.get_by_label("System message")).to_have_value("Be brief.")
    expect(page.get_by_label("API key")).to_have_value("")
    assert "secret" not in page.evaluate("JSON.stringify(localStorage)")
    page.get_by_role("button", name="Edited", exact=True).click()
    expect(texts.first).to_have_text("Edited")
    page.get_by_role("button", name="Forget Edited").click()
    expect(texts).to_have_count(0)
    page.get_by_role("button", name="Forget all").click()
    assert json.loads(page.evaluate("localStorage.getItem(STORE)"))["conversations"] == []
    page.evaluate('localStorage.setItem(STORE, \'{"conversations": [{"title": 1}, null], "knobs": {"send": 1}}\')')
    page.reload()
    expect(page.locator("#history li")).to_have_count(0)
    assert page.problems == []
    page.close()


@pytest.mark.slow
def test_images_are_sent_where_the_model_takes_them(browser, served):
    expect = expecting()
    page = open_page(browser, served.url, **{"v1/models": model_card(input_modalities=["text", "image"])})
    sent = []

    def answer(route):
        sent.append(route.request.post_data_json)
        route.fulfill(content_type="text/event-stream", body=stream("A dot."))

    page.route("**/v1/chat/completions", answer)
    paste = """([kind, data]) => {
        const bytes = Uint8Array.from(atob(data.split(",")[1]), x => x.charCodeAt(0)), files = new DataTransfer();
        files.items.add(new File([bytes], "dot.png", {type: "image/png"}));
        files.items.add(new File(["x"], "notes.txt", {type: "text/plain"}));
        const options = kind === "paste" ? {clipboardData: files} : {dataTransfer: files};
        const event = kind === "paste" ? new ClipboardEvent(kind, options) : new DragEvent(kind, options);
        document.getElementById(kind === "paste" ? "question" : "form").dispatchEvent(event);
    }"""
    expect(page.get_by_role("button", name="Add image")).to_be_visible()
    previews = page.locator("#pictures img")
    for number, kind in enumerate(("paste", "drop")):
        page.evaluate(paste, [kind, PIXEL])
        expect(previews).to_have_count(number + 1)
    page.locator("#file").set_input_files({"name": "dot.png", "mimeType": "image/png", "buffer": b"x"})
    expect(previews).to_have_count(3)
    page.get_by_role("button", name="Remove image 3").click()
    expect(previews).to_have_count(2)
    page.get_by_label("Message", exact=True).fill("What is this?")
    page.keyboard.press("Enter")
    expect(page.locator(".note")).to_have_count(1)
    image = {"type": "image_url", "image_url": {"url": PIXEL}}
    assert sent[0]["messages"] == [{"role": "user", "content": [image, image, {"type": "text", "text": "What is this?"}]}]
    expect(page.locator(".user img")).to_have_count(2)
    expect(previews).to_have_count(0)
    assert page.locator(".user img").first.evaluate("image => image.naturalWidth") == 1
    page.evaluate("localStorage.setItem = () => { throw new Error('no room'); }; keep()")
    expect(page.locator(".user img")).to_have_count(2)
    page.close()


def test_a_model_without_images_and_adapters_offers_none(page):
    expecting()(page.get_by_role("button", name="Add image")).to_be_hidden()
    expecting()(page.get_by_label("Adapter")).to_be_hidden()


@pytest.mark.slow
def test_an_adapter_is_asked_for_by_its_name(browser, served):
    expect = expecting()
    sent = []

    def answer(route):
        sent.append(route.request.post_data_json["model"])
        route.fulfill(content_type="text/event-stream", body=stream("Yes."))

    cards = model_card()
    cards["data"].append(cards["data"][0] | {"id": "tuned", "parent": "m"})
    page = open_page(browser, served.url, **{"v1/models": cards, "v1/chat/completions": answer})
    for number, adapter in enumerate(("m", "tuned")):
        page.get_by_label("Adapter").select_option(adapter)
        page.get_by_label("Message", exact=True).fill("Are you there?")
        page.keyboard.press("Enter")
        expect(page.locator(".note")).to_have_count(number + 1)
    assert sent == ["m", "tuned"]
    page.close()


@pytest.mark.slow
def test_views_of_encoders_and_of_the_model(browser, served):
    expect = expecting()
    vectors = {"data": [{"embedding": each} for each in ([1, 0], [0.6, 0.8], [0, 2])]}
    page = open_page(browser, served.url, **{"v1/models": model_card(task="embed"), "v1/embeddings": vectors})
    expect(page.get_by_role("link", name="Chat")).to_be_hidden()
    expect(page.get_by_role("heading", name="Similarity of texts")).to_be_visible()
    page.get_by_role("button", name="Compute").click()
    rows = page.locator("#result tbody tr")
    expect(rows).to_have_count(3)
    assert rows.nth(0).locator("td").all_inner_texts()[1:] == ["1.000", "0.600", "0.000"]
    assert rows.nth(1).locator("td").all_inner_texts()[1:] == ["0.600", "1.000", "0.800"]
    page.route("**/v1/embeddings", lambda route: route.fulfill(status=400, json={"error": {"message": "too long"}}))
    page.get_by_role("button", name="Compute").click()
    expect(page.locator("#result")).to_have_text("too long")
    expect(page.get_by_label("Texts, one in each line")).to_have_value(re.compile("A dog sleeps"))
    page.get_by_role("link", name="Model").click()
    expect(page.locator("#about")).to_contain_text("embeddings")
    page.close()

    ranked = {"results": [{"index": 1, "relevance_score": 0.75}, {"index": 0, "relevance_score": -2}]}
    page = open_page(browser, served.url, **{"v1/models": model_card(task="score"), "v1/rerank": ranked})
    page.get_by_label("Query").fill("Where is Paris?")
    page.get_by_role("button", name="Compute").click()
    expect(page.locator("#result tbody tr").first).to_contain_text("Paris is in France.")
    page.close()

    classes = {"data": [{"index": 0, "label": "good", "probs": [0.1, 0.9]}, {"index": 1, "label": "bad", "probs": [0.8, 0.2]}]}
    page = open_page(browser, served.url, **{"v1/models": model_card(task="classify"), "classify": classes})
    page.get_by_role("button", name="Compute").click()
    expect(page.locator("#result tbody tr").first.locator("td")).to_have_text(["I love it.", "good", "0.900"])
    page.close()


def test_the_view_of_the_model(page):
    expect = expecting()
    page.get_by_role("link", name="Model").click()
    facts = page.locator("#facts")
    for fact in ("fa-serve-demo", "chats and completions", "2048 tokens", "fa_serve "):
        expect(facts).to_contain_text(fact)
    expect(page.locator("#chat")).to_be_hidden()
    page.go_back()
    expect(page.locator("#chat")).to_be_visible()


@pytest.mark.slow
def test_the_embedded_model_answers_what_the_empty_page_proposes(browser, served):
    """The first thing that a stranger presses."""
    expect = expecting()
    page = open_page(browser, served.url)
    page.get_by_label("Temperature").fill("0")
    answers = {
        "What is 17 + 25?": "17 + 25 = 42.",
        "Write a Python function that reads a file.": "def read_text(",
        "What can you do?": "I add two numbers below 100 and write Python.",
    }
    assert page.locator("#ideas button").all_inner_texts() == list(answers)
    for idea, answer in answers.items():
        page.evaluate("begin()")
        page.get_by_role("button", name=idea).click()
        expect(page.locator(".note")).to_have_count(1, timeout=30_000)
        expect(page.locator(".assistant .text")).to_contain_text(answer)
    page.close()
