"""What a model writes: Markdown becomes nodes, attacks stay text, and long text is shown in time."""

import re

import pytest
from browser_pages import answering, expecting

WRITTEN = {
    "# Title #": "<h3>Title</h3>",
    "## A\n#### B\n### C\n## D\n# E": "<h3>A</h3><h4>B</h4><h4>C</h4><h3>D</h3><h3>E</h3>",
    "**bold**, *thin*, ~~gone~~ and `a*b*`": (
        "<p><strong>bold</strong>, <em>thin</em>, <del>gone</del> and <code>a*b*</code></p>"
    ),
    "one\ntwo\n\nthree": "<p>one<br>two</p><p>three</p>",
    "2 * 3 * 4 and snake_case_name and __init__": "<p>2 * 3 * 4 and snake_case_name and <strong>init</strong></p>",
    "- a\n- b\n  - c\n  - d\n\nafter": "<ul><li>a</li><li><p>b</p><ul><li>c</li><li>d</li></ul></li></ul><p>after</p>",
    "3. a\n4. b": '<ol start="3"><li>a</li><li>b</li></ol>',
    "> a\n> b": "<blockquote><p>a<br>b</p></blockquote>",
    "---": "<hr>",
    r"\*not thin\*": "<p>*not thin*</p>",
    "open **bold and `code": "<p>open **bold and `code</p>",
    "5 < 6 && 7 > 2": "<p>5 &lt; 6 &amp;&amp; 7 &gt; 2</p>",
}


def shown(page, text: str) -> str:
    return page.evaluate(
        "text => { const box = document.createElement('div'); box.append(markdown(text)); return box.innerHTML; }", text
    )


@pytest.mark.parametrize(("text", "html"), WRITTEN.items(), ids=lambda value: value[:12])
def test_markdown(page, text, html):
    assert shown(page, text) == html


def test_markdown_with_links_tables_and_code(page):
    link = '<a href="{0}" target="_blank" rel="noopener noreferrer nofollow">{1}</a>'
    address = "https://host.example/a?b=(c)"
    assert shown(page, "See [here](https://x.example) or https://y.example/a_b_c.") == (
        f"<p>See {link.format('https://x.example', 'here')} or {link.format('https://y.example/a_b_c', 'https://y.example/a_b_c')}.</p>"
    )
    assert address[:-1] in shown(page, f"<{address}>")
    table = shown(page, "a | b\n--|:-:\n1 | **2**\n3 | 4 | 5\n\nend")
    assert "<thead><tr><th>a</th><th>b</th></tr></thead>" in table
    assert "<tr><td>1</td><td><strong>2</strong></td></tr><tr><td>3</td><td>4</td></tr></tbody>" in table
    assert table.endswith("<p>end</p>")
    code = shown(page, "```python\nif a < b:\n    print('*x*')\n```\nend")
    assert "<code>if a &lt; b:\n    print('*x*')</code></pre>" in code
    assert 'aria-label="Copy the code (python)"' in code
    assert "<code>still open" in shown(page, "~~~\nstill open\n```"), "a stream is shown as far as it goes"
    assert "<code>x</code></pre></div></li></ul>" in shown(page, "- item\n  ```\n  x\n  ```")


ATTACKS = (
    "<script>attacked = 1</script>",
    "<img src=x onerror='attacked = 1'>",
    "![x](javascript:attacked=1) ![y](https://tracker.example/pixel.png)",
    "[a](javascript:attacked=1) [b](JaVaScRiPt:attacked=1) [c]( javascript:attacked=1)",
    "[d](data:text/html,<script>attacked=1</script>)",
    '[e](https://x.example/" onmouseover="attacked=1) [f](vbscript:x) [g](//x.example) [h](java\nscript:attacked=1)',
    '```" onfocus=attacked=1 autofocus\n</code></pre><script>attacked = 1</script>\n```',
    "```<img/src=x/onerror=attacked=1>\nx\n```",
    "| <svg onload=attacked=1> | b |\n|---|---|\n| <iframe src=javascript:attacked=1> | [x](javascript:attacked=1) |",
    "# <style>body{display:none}</style>\n> <form action=//x.example><input>\n\n- <a href=javascript:attacked=1>x</a>",
    "&lt;script&gt;attacked=1&lt;/script&gt; \\<script>attacked=1</script> `<script>attacked=1</script>`",
    "<math><mtext></form><form><mglyph><style></math><img src onerror=attacked=1>",
    "{{constructor.constructor('attacked=1')()}} ${attacked=1} <template><script>attacked=1</script></template>",
)
TAGS = {"A", "BLOCKQUOTE", "BR", "BUTTON", "CODE", "DEL", "DIV", "EM", "H3", "HR", "LI", "OL", "P", "PRE", "SPAN", "STRONG"} | {
    "TABLE", "TBODY", "TD", "TH", "THEAD", "TR", "UL"
}  # fmt: skip
ATTRIBUTES = {"aria-label", "class", "data-copies", "href", "rel", "role", "start", "tabindex", "target", "type"}


@pytest.mark.parametrize("number", range(len(ATTACKS)))
def test_what_a_model_says_is_never_more_than_text(page, number):
    """In the log, as the answer of a model. All that is made are the tags above, and links to safe addresses."""
    requested = []

    def note(request):
        requested.append(request.url)

    page.on("request", note)
    page.route("**/v1/chat/completions", answering(ATTACKS[number]))
    page.evaluate("begin()")
    page.get_by_label("Message", exact=True).fill("attack")
    page.keyboard.press("Enter")
    expecting()(page.locator(".note")).to_have_count(1)
    made = page.evaluate("""() => [...document.querySelectorAll(".assistant .text *")].map(node =>
        [node.tagName, node.namespaceURI, node.getAttributeNames(), node.href ?? ""])""")
    page.unroute("**/v1/chat/completions")
    assert {tag for tag, _, _, _ in made} <= TAGS
    assert {space for _, space, _, _ in made} == {"http://www.w3.org/1999/xhtml"}
    assert {name for _, _, names, _ in made for name in names} <= ATTRIBUTES
    assert all(re.match(r"https?://|mailto:", address) for _, _, _, address in made if address)
    assert page.evaluate("typeof attacked") == "undefined"
    page.remove_listener("request", note)
    assert all(url.startswith(page.url.split("#")[0]) for url in requested)


def test_the_policy_stops_what_a_mistake_would_let_through(page):
    """HTML can't be set, and handlers, addresses and scripts that are added do not run."""
    assert (
        page.evaluate("""() => {
        try { document.createElement("div").innerHTML = "<b>x</b>"; return "set"; } catch (error) { return error.name; }
    }""")
        == "TypeError"
    )
    page.evaluate("""() => {
        const script = document.createElement("script"), image = document.createElement("img");
        try { script.append("attacked = 1"); document.body.append(script); } catch {}
        image.setAttribute("alt", "x");
        try { image.setAttribute("onerror", "attacked = 1"); } catch {}
        image.src = "https://tracker.example/pixel.png";
        document.body.append(image);
        setTimeout(() => image.remove(), 200);
    }""")
    page.wait_for_timeout(300)
    assert page.evaluate("typeof attacked") == "undefined"
    assert any("Content Security Policy" in problem for problem in page.problems)
    page.problems.clear()


@pytest.mark.parametrize("piece", ["[", "`", "**a", "*a ", "_", "> ", "- ", "|", "![](", "  - ", "~~~", "https://", "a | b\n"])
def test_long_text_is_shown_in_time(page, piece):
    text = piece * (40_000 // len(piece))
    took = page.evaluate("text => { const begin = performance.now(); markdown(text); return performance.now() - begin; }", text)
    assert took < 2000
