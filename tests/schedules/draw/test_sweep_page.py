"""The page of a sweep; test_html_browser.py shows it in a browser."""

from __future__ import annotations

from html_pages import Page, payload
from sweep_rows import ROWS, page_of


def test_a_page_is_one_file_with_every_trial() -> None:
    text = page_of(*ROWS)
    assert payload(text)["trials"] == ROWS
    assert not [link for link in Page(text).links if not (link[1] or "").startswith(("data:", "#"))]
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "")
