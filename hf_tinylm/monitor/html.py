"""Pieces of a page. Text is escaped unless a function of this module made it."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from typing import Any

STYLE = """
:root { color-scheme: light dark; --text: #1b1f24; --soft: #57606a; --ground: #ffffff; --line: #d0d7de; --bad: #b3261e }
@media (prefers-color-scheme: dark) {
  :root { --text: #e6e8eb; --soft: #9aa4af; --ground: #14171b; --line: #343b44; --bad: #ff8a80 }
}
* { box-sizing: border-box }
body { margin: 0 auto; max-width: 70rem; padding: 1rem; font: 16px/1.5 system-ui, sans-serif; color: var(--text);
  background: var(--ground); overflow-wrap: anywhere }
h1 { font-size: 1.6rem } h2 { font-size: 1.2rem; margin-top: 2.2rem; border-bottom: 1px solid var(--line) }
.soft { color: var(--soft) } .bad { color: var(--bad) }
.wide { overflow-x: auto }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; overflow-wrap: normal }
th, td { text-align: left; padding: .25rem .8rem .25rem 0; border-bottom: 1px solid var(--line); vertical-align: top }
td { max-width: 40rem } .hash { font-family: ui-monospace, monospace; font-size: .8rem; overflow-wrap: anywhere }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr)); gap: 1rem }
.charts svg { width: 100%; height: auto } .sample { white-space: pre-wrap } .when { white-space: nowrap }
pre { overflow-x: auto; font-size: .8rem }
@media (max-width: 34rem) { th, td { padding-right: .5rem; font-size: .9rem } }
h1 small { font-weight: normal; color: var(--soft) } progress { width: 100%; accent-color: #0072b2 }
.facts { display: grid; grid-template-columns: repeat(auto-fill, minmax(10.5rem, 1fr)); gap: .6rem 1rem;
  margin: 1rem 0 }
dt { color: var(--soft); font-size: .8rem } dd { margin: 0; font-size: 1.05rem; font-variant-numeric: tabular-nums }
#axes { margin-top: 2rem; color: var(--soft) } #axes label { margin-left: .6rem; padding: .4rem 0 }
#axes + div h2 { margin-top: .6rem }
footer { position: sticky; bottom: 0; padding: .3rem 0; background: var(--ground); font-size: .8rem }
"""


class Html(str):
    """Markup that is safe to put into a page as it stands."""


def text(value: Any) -> Html:
    """A value as escaped text; None is a dash, markup stays markup."""
    if isinstance(value, Html):
        return value
    return Html(html.escape("-" if value is None else str(value)))


def element(tag: str, *inside: Any, name: str = "") -> Html:
    """`<tag class="name">inside</tag>`; what is inside is escaped unless it is markup."""
    given = f' class="{html.escape(name)}"' if name else ""
    return Html(f"<{tag}{given}>{''.join(map(text, inside))}</{tag}>")


def table(head: Sequence[Any], rows: Iterable[Sequence[Any]]) -> Html:
    """A table that scrolls sideways where it is wider than the screen; without rows a word that there are none."""
    body = [element("tr", *(element("td", cell) for cell in row)) for row in rows]
    if not body:
        return element("p", "None.", name="soft")
    top = [element("tr", *(element("th", cell) for cell in head))] if head else []
    return element("div", element("table", *top, *body), name="wide")


def section(title: str, *inside: Any) -> Html:
    """A part of the page with its heading."""
    return element("section", element("h2", title), *inside)


def leaves(value: Any, where: str = "") -> list[tuple[str, Any]]:
    """(dotted name, value) of every value inside nested objects."""
    if not isinstance(value, dict):
        return [(where, value)]
    return [pair for key in value for pair in leaves(value[key], f"{where}.{key}" if where else str(key))]


def missing(words: str) -> Html:
    """What is said where something is not there."""
    return element("p", words, name="soft")


def page(title: str, *inside: Any) -> str:
    """A whole page that needs nothing but itself."""
    policy = "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
    return _document(title, Html(policy), element("h1", title), *inside)


def live_page(title: str, parts: Sequence[str], axes: Sequence[str]) -> str:
    """A page whose parts are filled by `page.js`, which its server offers; `axes` are what curves may be over."""
    first = " checked"
    choices = [
        Html(f'<label><input type="radio" name="over" value="{axis}"{first if axis == axes[0] else ""}> {axis}</label>')
        for axis in axes
    ]
    choice = Html(f'<form id="axes">curves over {"".join(choices)}</form>')
    empty = {name: Html(f'<div id="{name}"></div>') for name in parts}
    empty["curves"] = Html(choice + empty["curves"])
    head = Html('<link rel="icon" href="data:,"><script src="page.js" defer></script>')
    return _document(title, head, *empty.values(), Html('<footer id="connection" class="soft">loading</footer>'))


def _document(title: str, head: Html, *inside: Any) -> str:
    """A document. A lone surrogate, which JSON may hold and UTF-8 not, is a `?`."""
    whole = (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"{head}{element('title', title)}<style>{STYLE}</style></head>\n<body>\n"
        + "\n".join(map(text, inside))
        + "\n</body></html>\n"
    )
    return whole.encode("utf-8", "replace").decode("utf-8")
