"""What the site does with links to files that are beside its pages: it names them.

In the repository `[text](../examples/x.py)` is a link; the site has no such page.
"""

from __future__ import annotations

import re
from typing import Any

BESIDE = re.compile(r"\[([^\]]+)\]\((\.\./[^)]+)\)")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """A page's text, without links that lead out of the site."""
    return BESIDE.sub(lambda found: f"{found[1]} (`{found[2][3:]}`)", markdown)
