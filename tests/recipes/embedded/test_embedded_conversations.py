"""The embedded conversations: stable bytes, right answers, prompts that are never trained on."""

import hashlib
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from polybasic.deploy.settings import TASKS
from polybasic.recipes.embedded import conversations
from polybasic.recipes.embedded.conversations import (
    COMPOSERS,
    FAMILIAR,
    NEW,
    is_heldout,
    topics_of,
    write_conversations,
    write_prompts,
)
from polybasic.recipes.embedded.german import VERBS, arrange
from polybasic.recipes.embedded.world import ALL_COUNTRIES, ALL_PEOPLE, ALL_TOWNS, TOWN_BY_NAME

NUM_CONVERSATIONS = 3000
NUM_PROMPTS = 40


def _rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    path = tmp_path_factory.mktemp("embedded") / "conversations.jsonl"
    write_conversations(path, NUM_CONVERSATIONS, seed=3)
    return _rows(path)


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    path = tmp_path_factory.mktemp("embedded") / "prompts.jsonl"
    write_prompts(path, NUM_PROMPTS, seed=3)
    return _rows(path)


def _first_turns(rows: list[dict[str, Any]], task: str) -> set[str]:
    return {
        next(turn["value"] for turn in row["conversations"] if turn["from"] == "human")
        for row in rows
        if row["task"] == task
    }


def _answers(rows: list[dict[str, Any]], task: str) -> list[tuple[str, str]]:
    """The first (user, assistant) pair of each conversation of a task."""
    pairs = []
    for row in rows:
        if row["task"] == task:
            turns = [turn for turn in row["conversations"] if turn["from"] != "system"]
            pairs.append((turns[0]["value"], turns[1]["value"]))
    return pairs


def test_the_six_groups_are_those_of_the_benchmark() -> None:
    assert tuple(COMPOSERS) == TASKS


def test_rows_are_sharegpt_with_groups_in_turn(trained: list[dict[str, Any]]) -> None:
    assert [row["task"] for row in trained[:7]] == [*TASKS, TASKS[0]]
    assert len({row["id"] for row in trained}) == NUM_CONVERSATIONS
    for row in trained:
        roles = [turn["from"] for turn in row["conversations"]]
        if roles[0] == "system":
            roles = roles[1:]
        assert roles == ["human", "gpt"] * (2 if row["task"] == "mt_bench" else 1)
        assert all(turn["value"].strip() for turn in row["conversations"])
    assert any(row["conversations"][0]["from"] == "system" for row in trained)


def test_prompts_are_in_spec_bench_format(prompts: list[dict[str, Any]]) -> None:
    assert [row["category"] for row in prompts] == [
        task for task in TASKS for _ in range(NUM_PROMPTS)
    ]
    assert [row["question_id"] for row in prompts] == list(range(1, len(TASKS) * NUM_PROMPTS + 1))
    for row in prompts:
        assert len(row["turns"]) == (2 if row["category"] == "mt_bench" else 1)
        assert len(row["reference"]) == len(row["turns"])


@pytest.mark.parametrize("task", TASKS)
def test_no_prompt_is_ever_trained_on(
    trained: list[dict[str, Any]], prompts: list[dict[str, Any]], task: str
) -> None:
    heldout = {row["turns"][0] for row in prompts if row["category"] == task}
    assert len(heldout) == NUM_PROMPTS
    assert all(is_heldout(turn) for turn in heldout)
    assert not any(is_heldout(turn) for turn in _first_turns(trained, task))
    assert not heldout & _first_turns(trained, task)


def test_without_the_split_prompts_would_be_trained_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, num_prompts = tmp_path / "rows.jsonl", 200
    monkeypatch.setattr(conversations, "_NUM_BUCKETS", 1)  # every turn is in the held-out bucket
    write_prompts(path, num_prompts, seed=3)
    heldout = {row["turns"][0] for row in _rows(path) if row["category"] == "qa"}
    monkeypatch.setattr(conversations, "_HELDOUT_BUCKET", 1)  # none is
    write_conversations(path, NUM_CONVERSATIONS, seed=3)
    assert heldout & _first_turns(_rows(path), "qa")


def test_topics_are_split_in_each_task() -> None:
    for task, composers in COMPOSERS.items():
        familiar, new = topics_of(task, FAMILIAR), topics_of(task, NEW)
        assert familiar
        assert new
        assert sorted(familiar + new) == sorted(composers)
    assert topics_of("qa", NEW) == ["people"], "the split is the same in every process"


def test_new_topics_are_for_the_target_alone(trained: list[dict[str, Any]]) -> None:
    topics = {task: {False: set(), True: set()} for task in TASKS}
    for row in trained:
        topics[row["task"]][row["target_only"]].add(row["topic"])
    for task in TASKS:
        assert topics[task] == {
            False: set(topics_of(task, FAMILIAR)),
            True: set(topics_of(task, NEW)),
        }
    assert 0.2 < sum(row["target_only"] for row in trained) / len(trained) < 0.3


@pytest.mark.parametrize("num", [1, 2, 5, 6])
def test_half_of_the_prompts_of_each_task_are_of_new_topics(tmp_path: Path, num: int) -> None:
    write_prompts(tmp_path / "q.jsonl", num, seed=0)
    rows = _rows(tmp_path / "q.jsonl")
    for task in TASKS:
        of_task = [row for row in rows if row["category"] == task]
        groups = [row["group"] for row in of_task]
        assert groups == [FAMILIAR] * (num - num // 2) + [NEW] * (num // 2)
        assert all(row["topic"] in topics_of(task, row["group"]) for row in of_task)
        # the topics of a group take turns
        for group in (FAMILIAR, NEW):
            topics = [row["topic"] for row in of_task if row["group"] == group]
            assert len(set(topics)) == min(len(topics), len(topics_of(task, group)))


def test_prompts_may_be_without_groups(tmp_path: Path) -> None:
    write_prompts(tmp_path / "with.jsonl", 2, seed=0)
    write_prompts(tmp_path / "without.jsonl", 2, seed=0, has_groups=False)
    grouped = _rows(tmp_path / "with.jsonl")
    assert all(row.pop("group") for row in grouped)
    assert _rows(tmp_path / "without.jsonl") == grouped


def test_answers_of_new_topics_hold_what_heads_have_not_seen(
    trained: list[dict[str, Any]], prompts: list[dict[str, Any]]
) -> None:
    def sequences(answer: str) -> set[str]:
        words = re.findall(r"[^\W\d_]+", answer)
        return {" ".join(words[start : start + 3]) for start in range(len(words) - 2)}

    for task in TASKS:
        seen = {
            sequence
            for row in trained
            if row["task"] == task and not row["target_only"]
            for turn in row["conversations"]
            if turn["from"] == "gpt"
            for sequence in sequences(turn["value"])
        }
        shares = {}
        for group in (FAMILIAR, NEW):
            found = [
                sequence
                for row in prompts
                if (row["category"], row["group"]) == (task, group)
                for answer in row["reference"]
                for sequence in sequences(answer)
            ]
            shares[group] = sum(each not in seen for each in found) / len(found)
        assert shares[NEW] > shares[FAMILIAR] + 0.15, (task, shares)


def test_bytes_depend_on_the_seed_and_on_nothing_else(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path;"
        "from polybasic.recipes.embedded.conversations import write_conversations as write;"
        "write(Path(sys.argv[1]), 120, int(sys.argv[2])); assert 'torch' not in sys.modules"
    )
    digests = []
    for hash_seed, seed in (("0", "5"), ("1", "5"), ("0", "6")):
        path = tmp_path / f"{hash_seed}{seed}.jsonl"
        subprocess.run(
            [sys.executable, "-c", script, str(path), seed],
            check=True,
            env={"PYTHONHASHSEED": hash_seed},
        )
        digests.append(hashlib.sha256(path.read_bytes()).hexdigest())
    assert digests[0] == digests[1] != digests[2]


def test_outputs_differ_from_prompt_to_prompt(trained: list[dict[str, Any]]) -> None:
    for task in TASKS:
        answers = [answer for _, answer in _answers(trained, task)]
        # Facts of the small world are asked for again and again, all else hardly ever repeats.
        least = 0.3 if task == "qa" else 0.95
        assert len(set(answers)) > least * len(answers), task


def test_every_equation_is_true_and_the_last_is_the_answer(trained: list[dict[str, Any]]) -> None:
    equation = re.compile(r"(\d+) ([*/+-]) (\d+) = (\d+)")
    for problem, solution in _answers(trained, "math_reasoning"):
        equations = equation.findall(solution)
        assert equations
        for left, sign, right, result in equations:
            exact = {
                "*": int(left) * int(right),
                "+": int(left) + int(right),
                "-": int(left) - int(right),
                "/": int(left) // int(right),
            }[sign]
            assert exact == int(result), solution
            assert sign != "/" or int(left) % int(right) == 0
        assert solution.endswith(f"The answer is {equations[-1][3]}.")
        known = set(re.findall(r"\d+", problem)) | {row[3] for row in equations}
        assert {number for row in equations for number in row[:3] if number.isdigit()} <= known


def test_answers_agree_with_the_world(trained: list[dict[str, Any]]) -> None:
    kinds = set()
    for question, answer in _answers(trained, "qa"):
        towns = [town for town in ALL_TOWNS if town.name in question]
        people = [person for person in ALL_PEOPLE if person.name in question]
        countries = [country for country in ALL_COUNTRIES if country.name in question]
        if len(towns) == 2:
            kinds.add("two towns")
            assert all(f"{t.num_people:,}" in answer or str(t.founded) in answer for t in towns)
        elif towns:
            kinds.add("town")
            facts = (towns[0].river, towns[0].landmark, str(towns[0].founded))
            assert all(fact in answer for fact in facts)
        elif people:
            kinds.add("person")
            assert people[0].work in answer
            assert TOWN_BY_NAME[people[0].town].region in answer
        else:
            kinds.add("country")
            assert countries[0].capital in answer
            assert countries[0].currency in answer
    assert kinds == {"two towns", "town", "person", "country"}


def test_comparisons_name_the_right_town(trained: list[dict[str, Any]]) -> None:
    num_compared = 0
    for question, answer in _answers(trained, "qa"):
        towns = [town for town in ALL_TOWNS if town.name in question]
        conclusion = re.search(r"So (\w+) is the (larger|older)", answer)
        if len(towns) == 2 and conclusion:
            num_compared += 1
            named, other = sorted(towns, key=lambda town: town.name != conclusion[1])
            if conclusion[2] == "older":
                assert named.founded < other.founded
            else:
                assert named.num_people > other.num_people
    assert num_compared > 5


def test_passage_answers_quote_the_passage_of_the_asked_person(
    trained: list[dict[str, Any]],
) -> None:
    for prompt, answer in _answers(trained, "rag"):
        number, name = re.search(r"in passage (\d), which is about (\w+)\.", answer).groups()
        quote = re.search(r'says: "(.+?)" The rest', answer)[1]
        passage = re.search(rf"Passage {number}: (.+)", prompt)[1]
        assert quote in passage
        assert name in quote
        assert prompt.count(quote) == 1
        assert answer.endswith(quote)


def test_summaries_say_who_where_and_when(trained: list[dict[str, Any]]) -> None:
    for report, summary in _answers(trained, "summarization"):
        assert len(summary) < 0.8 * len(report)
        sentences = re.split(r"(?<=\.) ", summary)
        assert sentences[0] in report  # day, who, what, where
        for said in (sentences[1], sentences[-1]):
            fact = re.sub(r"^(The report says that|Looking ahead,) ", "", said)
            assert fact[1:] in report


def test_german_and_english_have_the_same_sentences(trained: list[dict[str, Any]]) -> None:
    for prompt, answer in _answers(trained, "translation"):
        if "sentence by sentence:\n" in answer:
            lines = re.findall(r'- "(.+)" means: (.+)', answer)
            assert " ".join(german for german, _ in lines) in prompt
        else:
            english = answer.removeprefix("Here is the translation: ")
            assert 3 <= english.count(".") <= prompt.count(".")


@pytest.mark.parametrize(
    ("opening", "german", "english"),
    [
        (
            "time",
            "Gestern suchten die Kinder im Park einen Hund.",
            "Yesterday the children looked for a dog in the park.",
        ),
        (
            "place",
            "Im Park suchten die Kinder gestern einen Hund.",
            "In the park the children looked for a dog yesterday.",
        ),
        (
            "subject",
            "Die Kinder suchten gestern einen Hund.",
            "The children looked for a dog yesterday.",
        ),
    ],
)
def test_word_order_by_hand(opening: str, german: str, english: str) -> None:
    sentence = arrange(
        opening,
        subject=("die Kinder", "the children"),
        verb=("suchten", "looked for"),
        obj=("einen Hund", "a dog"),
        time=("gestern", "yesterday"),
        place=("im Park", "in the park"),
    )
    assert sentence == (german, english)


def test_verbs_agree_with_number_and_time() -> None:
    eats = next(verb for verb in VERBS if verb.german[0] == "isst")
    forms = [
        eats.form(is_plural, is_past) for is_past in (False, True) for is_plural in (False, True)
    ]
    assert forms == [("isst", "eats"), ("essen", "eat"), ("aß", "ate"), ("aßen", "ate")]
