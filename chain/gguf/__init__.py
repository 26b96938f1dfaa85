"""Models of a chain as GGUF, the format of llama.cpp, written by its own package `gguf`.

What llama.cpp reads of a file, and what it computes with it, is taken from its converter
(`conversion/` of ggml-org/llama.cpp) and from its models (`src/models/`), as of gguf 0.19.0.
"""

from polybasic.chain.errors import UserError

try:
    import gguf  # noqa: F401
except ImportError as error:
    raise UserError("gguf is not installed", f"{error}", "pip install 'polybasic[gguf]'") from error
