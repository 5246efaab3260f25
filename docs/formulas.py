"""Typesets the formulas of the documentation as MathML, which browsers show without loading
anything.
"""

from __future__ import annotations

import html
import re
from typing import Any

from latex2mathml.converter import convert


def on_page_content(content: str, **_: Any) -> str:
    """Replace every formula that pymdownx.arithmatex has marked; mkdocs calls this for
    each page.
    """
    pattern = r'<(span|div) class="arithmatex">\\[([](.*?)\\[)\]]</\1>'

    def typeset(found: re.Match[str]) -> str:
        display = "block" if found[1] == "div" else "inline"
        return f"<{found[1]}>{convert(html.unescape(found[2]), display=display)}</{found[1]}>"

    return re.sub(pattern, typeset, content, flags=re.DOTALL)
