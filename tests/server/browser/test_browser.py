"""The pages are whole documents, and their policy allows what is written in them alone."""

import re

import httpx
import pytest
from fa_serve.server.browser import PLAYGROUND, REFERENCE


@pytest.mark.parametrize(("path", "page"), [("/", PLAYGROUND), ("/docs", REFERENCE)], ids=["playground", "reference"])
def test_a_page_loads_nothing_from_elsewhere_and_runs_its_own_scripts_alone(served, path, page):
    response = httpx.get(f"{served.url}{path}")
    assert response.text == page.text
    assert response.headers["content-type"].startswith("text/html")
    policy = dict(each.split(" ", 1) for each in response.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == "'none'"
    assert "unsafe" not in str(policy)
    scripts = re.findall("<script>", response.text)
    assert len(policy["script-src"].split()) == len(scripts) == (2 if path == "/" else 1)
    assert policy["require-trusted-types-for"] == "'script'"
    assert not re.findall(r"(?:src|href)=\"(?:https?:)?//", response.text)
    assert not re.findall(r"<(?:link rel=\"stylesheet\"|script src)", response.text), "a file is not written into the page"
    assert not re.findall(r"\son\w+=|\sstyle=", response.text), "the policy would ignore it"
