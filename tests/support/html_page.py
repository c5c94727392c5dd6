"""A parser for generated HTML pages."""

from html.parser import HTMLParser


class Page(HTMLParser):
    """A parser that collects a page's tags, links, and text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags, self.links, self.text = list[str](), list[str](), ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value for key, value in attrs if key == "href" and value]

    def handle_data(self, data: str) -> None:
        self.text += data
