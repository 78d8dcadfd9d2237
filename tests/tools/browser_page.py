"""The server's page in a real browser: ``make browser`` installs playwright; Chromium must be installed."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest
from playwright import sync_api as playwright

from tests.tools.test_serve import ENDLESS, PROMPTS, Client, Reference, folder, idle, reference, server, waits_until

__all__ = ["folder", "reference", "server"]  # fixtures
BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
MARKDOWN = """# A *title*
Two lines
of **bold**, *slanted* and `a*b*c` text, 2 * 3 * 4, [a link](https://example.org/a?b=1) and [none](javascript:alert(1)).

1. one
   - inner
   - other
2. two

```python
x = "<b>" # **not bold**
```
> quoted
> ## deeper

| a | b |
|---|---|
| 1 | `2` |

<img src=x onerror=alert(1)>
```
never closed"""
AS_HTML = (
    "<h2>A <em>title</em></h2><p>Two lines\nof <strong>bold</strong>, <em>slanted</em> and <code>a*b*c</code> text, "
    '2 * 3 * 4, <a href="https://example.org/a?b=1" rel="noopener noreferrer" target="_blank">a link</a> and '
    "[none](javascript:alert(1)).</p>"
    '<ol start="1"><li>one<ul><li>inner</li><li>other</li></ul></li><li>two</li></ol>'
    '<pre><code>x = "&lt;b&gt;" # **not bold**</code></pre>'
    "<blockquote><p>quoted</p><h3>deeper</h3></blockquote>"
    "<table><tr><th>a</th><th>b</th></tr><tr><td>1</td><td><code>2</code></td></tr></table>"
    "<p>&lt;img src=x onerror=alert(1)&gt;</p><pre><code>never closed</code></pre>"
)


@pytest.fixture
def page(server: Client) -> Iterator[Any]:
    assert BROWSER, "there is no chromium or google-chrome to show the page"
    with playwright.sync_playwright() as running:
        browser = running.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        found = browser.new_page()
        errors: list[str] = []
        found.on("pageerror", lambda error: errors.append(str(error)))
        found.on("requestfailed", lambda asked: errors.append(asked.url) if "/v1/" not in asked.url else None)
        found.on("console", lambda message: errors.append(message.text) if "Security Policy" in message.text else None)
        found.goto(f"http://127.0.0.1:{server.port}/")
        playwright.expect(found.locator("#model")).to_have_text("tiny-llama")
        found.click("summary")
        yield found
        browser.close()
        assert errors == []


def send(page: Any, text: str, tokens: int) -> None:
    page.fill("#prompt", text)
    page.fill("#tokens", str(tokens))
    page.fill("#temperature", "0")
    page.click("#send")


def has_status(page: Any, text: str) -> None:
    playwright.expect(page.locator("#status")).to_contain_text(text)


def expected_answer(server: Client, *turns: str, tokens: int) -> str:
    """The server's answer to a chat whose turns alternate."""
    messages = [{"role": ("user", "assistant")[i % 2], "content": turn} for i, turn in enumerate(turns)]
    found = server.post("/v1/chat/completions", messages=messages, temperature=0, max_tokens=tokens)
    return found["choices"][0]["message"]["content"]


def test_a_chat_keeps_its_turns(page: Any, server: Client) -> None:
    """The second answer depends on the first; Regenerate replaces the last; New chat forgets both."""
    first = expected_answer(server, "the cat", tokens=4)
    second = expected_answer(server, "the cat", first, "and", tokens=4)
    assert second != expected_answer(server, "and", tokens=4)
    answers = page.locator(".assistant .content")

    def shows(*texts: str) -> None:
        playwright.expect(answers).to_have_count(len(texts))
        has_status(page, "4 tokens, ended: length")
        assert [text.split() for text in answers.all_text_contents()] == [text.split() for text in texts]

    send(page, "the cat", 4)
    shows(first)
    send(page, "and", 4)
    playwright.expect(page.locator(".regenerate")).to_have_count(1)
    shows(first, second)
    page.click(".regenerate")
    playwright.expect(page.locator(".regenerate")).to_have_count(1)
    shows(first, second)
    page.click("#new")
    playwright.expect(answers).to_have_count(0)
    send(page, "and", 4)
    alone = expected_answer(server, "and", tokens=4)
    shows(alone)
    send(page, "the cat " * 7000, 4)  # a message without an answer is not repeated
    has_status(page, "the request has more than 50000 bytes")
    send(page, "more", 4)
    shows(alone, "", expected_answer(server, "and", alone, "more", tokens=4))


def test_a_text_is_continued(page: Any, server: Client, reference: Reference) -> None:
    """Also an error message, and an interrupted text."""
    page.select_option("#mode", "text")
    send(page, PROMPTS[0], 8)
    has_status(page, "8 tokens, ended: length")
    expected = PROMPTS[0] + reference.greedy(PROMPTS[0])
    assert page.text_content(".assistant .content") == expected
    page.get_by_role("button", name="Regenerate").click()
    playwright.expect(page.locator(".regenerate")).to_have_count(1)
    assert page.locator(".assistant .content").all_text_contents() == [expected]
    page.click("#new")
    send(page, "the cat " * 7000, 4)
    has_status(page, "the request has more than 50000 bytes")
    page.get_by_role("button", name="Retry").click()
    playwright.expect(page.get_by_role("button", name="Retry")).to_have_count(1)
    has_status(page, "the request has more than 50000 bytes")
    page.click("#new")
    send(page, ENDLESS, 7900)
    assert waits_until(lambda: len(page.text_content(".assistant .content")) > 30)
    page.click("#stop")
    has_status(page, "Stopped")
    assert waits_until(lambda: idle(server), 8.0), "the server has dropped the text"
    playwright.expect(page.locator("#send")).to_be_visible()


def test_more_tokens_than_the_context_has(page: Any, server: Client) -> None:
    """The first message of a model with a short context is answered with as many tokens as fit."""
    send(page, "def f(x):", 100_000)
    assert waits_until(lambda: len(page.text_content(".assistant .content")) > 30)
    page.click("#stop")
    has_status(page, "Stopped")
    assert waits_until(lambda: idle(server), 8.0)


@pytest.mark.parametrize("mode", ["chat", "text"])
def test_enter_sends(page: Any, mode: str) -> None:
    """Also without a chat template; Shift+Enter starts a line."""
    page.select_option("#mode", mode)
    page.fill("#tokens", "4")
    page.fill("#prompt", "the")
    page.press("#prompt", "Shift+Enter")
    assert page.input_value("#prompt") == "the\n"
    page.press("#prompt", "Enter")
    has_status(page, "4 tokens")


@pytest.mark.parametrize("mode", ["chat", "text"])
def test_probabilities_of_tokens(page: Any, server: Client, mode: str) -> None:
    page.select_option("#mode", mode)
    page.check("#probabilities")
    send(page, "the cat", 4)
    has_status(page, "4 tokens")
    page.get_by_role("button", name="Probabilities", exact=True).click()
    tokens = page.locator(".tokens .list button")
    playwright.expect(tokens).to_have_count(4)
    tokens.nth(1).click()
    playwright.expect(page.locator(".tokens tr").first).to_contain_text("chosen")  # greedy: the likeliest
    assert page.locator(".tokens tr").count() >= 2  # texts of one byte are equal in the interface of completions
    shares = [float(text.split()[0]) for text in page.locator(".tokens td:nth-child(3)").all_text_contents()]
    assert shares == sorted(shares, reverse=True) and shares[0] == float(
        tokens.nth(1).get_attribute("title").split()[0]
    )


def test_markdown_and_never_markup(page: Any) -> None:
    script = "async text => { const {element, markdown} = await import('/page/markdown.js');"
    script += " return element('div', markdown(text)).innerHTML; }"
    assert page.evaluate(script, MARKDOWN) == AS_HTML
    page.select_option("#mode", "text")
    send(page, "<img src=x onerror=alert(1)> the", 2)
    has_status(page, "2 tokens")
    assert page.locator("#log img").count() == 0 and "<img src=x" in page.text_content("#log")


def test_colours_and_narrow_screens(page: Any) -> None:
    """The chosen colours survive a reload, and a phone shows no horizontal scroll bar."""
    back = "getComputedStyle(document.body).backgroundColor"
    page.emulate_media(color_scheme="dark")
    dark = page.evaluate(back)
    page.click("#theme")
    playwright.expect(page.locator("#theme")).to_have_text("Light")
    light = page.evaluate(back)
    page.reload()
    page.click("summary")
    assert light != dark and page.evaluate(back) == light
    page.set_viewport_size({"width": 360, "height": 640})
    send(page, "the cat", 4)
    has_status(page, "4 tokens")
    assert page.get_attribute("#settings", "open") is None, "closed, so that the answer can be seen"
    assert page.evaluate("document.documentElement.scrollWidth") <= 360


def test_a_model_without_a_template(page: Any, reference: Reference) -> None:
    """The page continues texts, and says why."""
    models = {"data": [{"id": "tiny-llama", "has_chat_template": False}]}
    page.route("**/v1/models", lambda route: route.fulfill(json=models))
    page.reload()
    has_status(page, "This model has no chat template: it continues texts.")
    page.click("summary")
    playwright.expect(page.locator("#mode")).to_be_disabled()
    send(page, PROMPTS[0], 8)
    has_status(page, "8 tokens, ended: length")
    assert page.text_content(".assistant .content") == PROMPTS[0] + reference.greedy(PROMPTS[0])
