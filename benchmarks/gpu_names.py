"""Names in the record of the GPU benchmark, for what writes it and what reads it. No torch here."""

TARGET, EAGLE2, THREE, HF_GENERATE = "target", "eagle2", "polybasic_full", "hf_generate"
"""Systems: the target alone, with a draft head, with all members; transformers' own loop."""
WHOLE, DECODING = "milliseconds_per_token", "decoding_milliseconds_per_token"
"""Of an answer: with the prefill, and behind the first round."""
RUNTIME, CUBLAS = "runtime", "cuBLAS"
"""Kernels: those that the runtime chooses, and PyTorch's for dense products."""
PYTORCH_INT4, GEMLITE = "PyTorch int4", "gemlite"
SDPA, FLEX = "SDPA", "flex attention"


def answers_part(shape: str, context: int, temperature: float, source: int = 0) -> str:
    """What the part is called that measures answers to the prompts of a question file."""
    how = "greedy" if temperature == 0 else f"temperature {temperature:g}"
    return f"{shape} answers behind {context}, {how}{f', prompts {source + 1}' if source else ''}"
