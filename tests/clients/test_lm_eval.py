"""lm-eval over HTTP gives the scores that the library's own log-probabilities give."""

import json
from typing import Any

import lm_eval
import pytest
from lm_eval.tasks import TaskManager

from polybasic.deploy import Chain
from tests.deploy.serve.serving import Served

QUESTIONS = [
    {"question": "what is it?", "choices": [" a tree", " an ant.", " rain"], "label": 1},
    {"question": "who was there, and when", "choices": [" in june", " no one"], "label": 0},
    {"question": "is it on?", "choices": ["\nyes", "\nno", "\nlater"], "label": 2},
    {"question": "where", "choices": [" here", " out there, in the rain"], "label": 1},
]
CHOOSE = """
task: choose
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_target: label
doc_to_choice: choices
target_delimiter: ""
metric_list:
  - metric: acc
  - metric: acc_norm
"""
CONTINUE = """
task: continue
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{choices[label]}}"
generation_kwargs:
  until: ["n"]
  max_gen_toks: 20
metric_list:
  - metric: exact_match
"""
SHARED = """
dataset_path: json
dataset_kwargs: {{data_files: {{test: "{path}"}}}}
test_split: test
"""


@pytest.fixture(scope="module")
def found(chain: Chain, server: Served, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What lm-eval says of both tasks."""
    folder = tmp_path_factory.mktemp("tasks")
    data = folder / "questions.jsonl"
    data.write_text("".join(json.dumps(question) + "\n" for question in QUESTIONS))
    for name, task in (("choose", CHOOSE), ("continue", CONTINUE)):
        (folder / f"{name}.yaml").write_text(task + SHARED.format(path=data))
    return lm_eval.simple_evaluate(
        model="local-completions",
        model_args={
            "model": "tiny",
            "base_url": f"{server.url}/v1/completions",
            "tokenizer": str(chain.folder / "tokenizer"),
            "tokenizer_backend": "huggingface",
            "num_concurrent": 3,
            "max_length": 128,
        },
        tasks=["choose", "continue"],
        task_manager=TaskManager(include_path=str(folder)),
        log_samples=True,
        bootstrap_iters=0,
    )


def log_likelihood(chain: Chain, question: str, choice: str) -> float:
    """Of a choice behind a question, by the library."""
    num_before = len(chain.tokenizer(question)["input_ids"])
    answer = chain.begin(
        chain.tokenizer(question + choice)["input_ids"], max_new_tokens=0, prompt_logprobs=0
    )
    while not answer.is_over:
        assert chain.step()
    assert answer.prompt_logprobs is not None
    return sum(row.logprob for row in answer.prompt_logprobs[num_before - 1 :])


def test_log_likelihoods_and_scores(chain: Chain, found: Any) -> None:
    num_right = 0
    for sample in found["samples"]["choose"]:
        question = QUESTIONS[sample["doc_id"]]
        expected = [
            log_likelihood(chain, question["question"], choice) for choice in question["choices"]
        ]
        assert [float(response[0][0]) for response in sample["resps"]] == pytest.approx(
            expected, abs=1e-4
        )
        num_right += max(range(len(expected)), key=expected.__getitem__) == question["label"]
    scores = found["results"]["choose"]
    assert scores["acc,none"] == num_right / len(QUESTIONS)


def test_continuations(chain: Chain, found: Any) -> None:
    texts = set()
    for sample in found["samples"]["continue"]:
        ids = chain.tokenizer(QUESTIONS[sample["doc_id"]]["question"])["input_ids"]
        expected = chain.generate(ids, max_new_tokens=20, temperature=0, stop=["n"]).text
        assert sample["resps"][0][0] == expected
        texts.add(expected)
    assert len(texts) > 1, "answers that could be mixed up"
