"""What small training tests train on: conversations that count, and the shape of a small head."""

import json
from pathlib import Path

from polybasic.train.head.eagle2 import HeadShape

SMALL_SHAPE = HeadShape(
    vocab_size=50,
    hidden_size=32,
    intermediate_size=48,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    rms_norm_eps=1e-5,
    rope={"rope_type": "default", "rope_theta": 500.0},
    context_tokens=64,
)


def write_counting(path: Path, question: str, shortest: int, spread: int) -> str:
    """Write 40 conversations in ShareGPT's format and return the path as text.

    Args:
        path: a .jsonl file.
        question: with a place for the number to count on from.
        shortest: numbers of the shortest answer.
        spread: answers are up to so many numbers, less one, longer.
    """
    rows = [
        {
            "id": str(first),
            "conversations": [
                {"from": "human", "value": question.format(first)},
                {
                    "from": "gpt",
                    "value": " ".join(map(str, range(first, first + shortest + first % spread))),
                },
            ],
        }
        for first in range(40)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return str(path)
