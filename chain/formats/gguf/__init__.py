"""Models as GGUF, the format of llama.cpp: read as checkpoints, and written.

What llama.cpp reads of a file, and what it computes with it, is taken from its converter
(`conversion/` of ggml-org/llama.cpp), its models (`src/models/`) and its tokenizers
(`src/llama-vocab.cpp`), as of gguf 0.19.0.
"""
