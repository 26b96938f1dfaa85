"""Stands in for pypcre, which needs a compiler; gptqmodel asks no more of it than of `re`.

`make interop` puts this folder on the path of its environment alone.
"""

import re
from re import *  # noqa: F403


class Flag:
    """Flags under PCRE's names."""

    CASELESS = re.IGNORECASE
    DOTALL = re.DOTALL
    MULTILINE = re.MULTILINE
