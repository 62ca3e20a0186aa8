"""Parts of pages that are generated."""

from __future__ import annotations

import re


def replace_block(text: str, block: str, name: str = "results") -> str:
    """`text` with `block` between the marks called `name`.

    >>> replace_block("a <!-- results --> b <!-- /results --> c", "new")
    'a <!-- results -->\\nnew\\n<!-- /results --> c'
    """
    first, last = f"<!-- {name} -->", f"<!-- /{name} -->"
    if text.count(first) != 1 or text.count(last) != 1 or text.index(first) > text.index(last):
        raise ValueError(f"the text must hold {first} and then {last}, each once")
    pattern = re.escape(first) + r".*" + re.escape(last)
    return re.sub(pattern, lambda _: f"{first}\n{block}\n{last}", text, flags=re.DOTALL)
