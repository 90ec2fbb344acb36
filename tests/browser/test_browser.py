"""The built site in Chromium: ``nox -s docs site``."""

from __future__ import annotations

import functools
import http.server
import re
import threading
import urllib.parse
from html.parser import HTMLParser
from typing import TYPE_CHECKING, Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, sync_playwright

from tests.support.limits import scaled
from tests.support.pages import ROOT
from tools.website.browser import find_chromium

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.browser
SITE = ROOT / "build" / "docs"
FILES = sorted(path.relative_to(SITE).as_posix() for path in SITE.rglob("*.html"))
JUDGED = [
    "index.html",
    "install.html",
    "packages.html",
    "zh/install.html",
    "performance.html",
    "compatibility.html",
    "tutorials/run-a-checkpoint.html",
    "from/bitsandbytes.html",
    "reference/actors.html",
    "architecture.html",
    "search.html",
    "certificates/bitsandbytes/certificate.html",
]
"""Pages of each kind, for what takes seconds a page."""
NARROW, WIDE = 360, 1280


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *arguments: object) -> None:
        """Print nothing."""


@pytest.fixture(scope="session")
def address() -> Iterator[str]:
    """Serve the built site on a free port, and return its address."""
    handler = functools.partial(_Quiet, directory=str(SITE))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """Start Chromium without a window."""
    with sync_playwright() as programs:
        found = programs.chromium.launch(executable_path=find_chromium(), args=["--no-sandbox"])
        yield found
        found.close()


FIRST_ERROR = 400
"""The least status of an answer that is an error: 304 says that a file has not changed."""


def open_page(browser: Browser, width: int = WIDE, scheme: Any = "light") -> tuple[Page, list[str]]:
    """Return a page of a width, and the list that gets what its console and its requests complain of."""
    page = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme).new_page()
    errors: list[str] = []
    page.on("console", lambda message: errors.append(message.text) if message.type in {"error", "warning"} else None)
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("response", lambda got: errors.append(f"{got.status} {got.url}") if got.status >= FIRST_ERROR else None)
    page.on("request", lambda request: None if "127.0.0.1" in request.url else errors.append(f"asks {request.url}"))
    return page, errors


class _Links(HTMLParser):
    """Targets of a page's links, pictures and scripts, and the names of its places."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.targets: set[str] = set()
        self.names: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Collect what a tag names."""
        del tag
        for key, value in attrs:
            if value and key in {"href", "src"}:
                self.targets.add(value)
            elif value and key in {"id", "name"}:
                self.names.add(value)


def broken_links() -> list[str]:
    """Return each link within the site whose file or place is not there, with its page."""
    pages = {name: _Links((SITE / name).read_text(encoding="utf-8")) for name in FILES}
    broken = []
    for name, links in pages.items():
        for target in links.targets:
            parts = urllib.parse.urlparse(target)
            if parts.scheme or parts.netloc:
                continue
            file = ((SITE / name).parent / urllib.parse.unquote(parts.path)).resolve() if parts.path else SITE / name
            page = pages.get(file.relative_to(SITE).as_posix())
            if not file.is_file() or (page and parts.fragment and parts.fragment not in page.names):
                broken.append(f"{name}: {target}")
    return sorted(broken)


def test_the_site_is_built() -> None:
    """There are pages to look at."""
    assert {*JUDGED} <= {*FILES}


def test_no_link_is_broken() -> None:
    """Each link within the site leads to a file, and to a place in it."""
    assert broken_links() == []


@pytest.mark.parametrize("width", [NARROW, WIDE])
def test_every_page_fits_and_complains_of_nothing(width: int, browser: Browser, address: str) -> None:
    """No page scrolls sideways, has an error in its console, or asks another host."""
    page, errors = open_page(browser, width)
    wide = []
    for name in FILES:
        page.goto(address + name)
        if page.evaluate("document.documentElement.scrollWidth > document.documentElement.clientWidth"):
            wide.append(name)
    assert errors == []
    assert wide == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", JUDGED)
def test_a_page_is_accessible(name: str, scheme: str, browser: Browser, address: str) -> None:
    """WCAG 2 A and AA hold by axe, contrast included, in light and in dark colours."""
    page, _ = open_page(browser, scheme=scheme)
    page.goto(address + name)
    rules = {"runOnly": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa"], "resultTypes": ["violations"]}
    found = Axe().run(page, options=rules).response["violations"]
    assert [(item["id"], node["target"], node["failureSummary"]) for item in found for node in item["nodes"]] == []


def test_dark_mode_is_dark(browser: Browser, address: str) -> None:
    """A reader whose system is dark gets dark pages, and the button changes that."""
    page, _ = open_page(browser, scheme="dark")
    page.goto(address)

    def lightness() -> float:
        colour = page.evaluate("getComputedStyle(document.body).backgroundColor")
        return sum(map(int, re.findall(r"\d+", colour)[:3])) / 3

    assert lightness() < 64
    page.locator(".content-icon-container .theme-toggle").click()
    seen = {lightness()}
    page.locator(".content-icon-container .theme-toggle").click()
    seen.add(lightness())
    assert max(seen) > 192


def test_search_finds_nf4(browser: Browser, address: str) -> None:
    """The search box, filled by keys alone, leads to pages about NF4."""
    page, errors = open_page(browser)
    page.goto(address)
    page.locator("input[name=q]").focus()
    page.keyboard.type("nf4")
    page.keyboard.press("Enter")
    page.wait_for_selector("#search-results li a", timeout=1000 * scaled(60))
    assert page.locator("#search-results li a").count() > 3
    assert errors == []


def test_keys_reach_the_links(browser: Browser, address: str) -> None:
    """Tabs go over the skip link, search, navigation and content, and what has the focus is visible."""
    page, _ = open_page(browser)
    page.goto(address)
    reached = []
    for _ in range(120):
        page.keyboard.press("Tab")
        reached.append(
            page.evaluate("document.activeElement.getAttribute('href') || document.activeElement.name || ''")
        )
        style = "getComputedStyle(document.activeElement)"
        if reached[-1] == "install.html":
            assert page.evaluate(f"{style}.outlineStyle !== 'none' || {style}.boxShadow !== 'none'")
    assert {"q", "install.html", "first-steps.html", "tutorials/run-a-checkpoint.html"} <= {*reached}
    page.keyboard.press("Shift+Tab")
