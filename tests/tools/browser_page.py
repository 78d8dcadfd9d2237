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


@pytest.fixture
def page(server: Client) -> Iterator[Any]:
    assert BROWSER, "there is no chromium or google-chrome to show the page"
    with playwright.sync_playwright() as running:
        browser = running.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        found = browser.new_page()
        errors: list[str] = []
        found.on("pageerror", lambda error: errors.append(str(error)))
        found.on("requestfailed", lambda asked: errors.append(asked.url) if "/v1/" not in asked.url else None)
        found.goto(f"http://127.0.0.1:{server.port}/")
        yield found
        browser.close()
        assert errors == []


def generate(page: Any, prompt: str, tokens: int) -> None:
    page.fill("#prompt", prompt)
    page.fill("#tokens", str(tokens))
    page.fill("#temperature", "0")
    page.click("#send")


def test_a_visitor_tries_the_model(page: Any, server: Client, reference: Reference) -> None:
    """A completion, a chat, an error message, and an interrupted text."""
    generate(page, PROMPTS[0], 8)
    playwright.expect(page.locator("#status")).to_have_text("ended: length, 8 tokens")
    assert page.text_content("#output") == PROMPTS[0] + reference.greedy(PROMPTS[0])
    page.check("#chat")
    generate(page, "the cat", 4)
    playwright.expect(page.locator("#status")).to_contain_text("4 tokens")
    messages = [{"role": "user", "content": "the cat"}]
    expected = server.post("/v1/chat/completions", messages=messages, temperature=0, max_tokens=4)["choices"][0]
    assert page.text_content("#output") == expected["message"]["content"]
    page.uncheck("#chat")
    generate(page, "the cat " * 7000, 4)
    playwright.expect(page.locator("#status")).to_contain_text("the request has more than 50000 bytes")
    generate(page, ENDLESS, 7900)
    assert waits_until(lambda: len(page.text_content("#output")) > 30)
    page.click("#stop")
    playwright.expect(page.locator("#status")).to_have_text("stopped")
    assert waits_until(lambda: idle(server), 8.0), "the server has dropped the text"
    playwright.expect(page.locator("#send")).to_be_enabled()


def test_text_is_never_markup(page: Any) -> None:
    generate(page, "<img src=x onerror=alert(1)> the", 2)
    playwright.expect(page.locator("#status")).to_contain_text("2 tokens")
    assert page.locator("#output img").count() == 0 and "<img src=x" in page.text_content("#output")
