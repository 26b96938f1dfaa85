"""What a recipe names from elsewhere: downloads, templates, adapters, heads, and their digests."""

import json
import shutil
from http.server import SimpleHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from polybasic.chain.base.errors import UserError
from polybasic.chain.formats.manifest import Provenance
from polybasic.chain.formats.places import without_places
from polybasic.deploy.planner.prompts import read_questions
from polybasic.deploy.planner.settings import BenchSettings, PlanSettings
from polybasic.recipes.pipeline.downloads import fetch, is_url
from polybasic.recipes.pipeline.prompts import (
    PLAN_PROMPTS_NAME,
    PROMPTS_NAME,
    bench_prompts,
    plan_prompts,
    prompts_of_run,
    with_prompts,
)
from polybasic.recipes.pipeline.running import PipelineStage, Workspace, run_stages
from polybasic.recipes.pipeline.sources import (
    chat_template_of,
    checkpoint_of,
    tokenizer_of,
)
from polybasic.recipes.pipeline.stages import stages_of
from polybasic.recipes.schema.loading import load_recipe
from polybasic.recipes.schema.recipe import Recipe
from polybasic.train.data.conversations import load_conversations, split_conversations
from tests.checkpoints import CHATML, write_family
from tests.conftest import write_intermediate
from tests.recipes.serving import served

QUESTIONS = [{"question_id": index, "category": "qa", "turns": [f"{index}?"]} for index in (1, 2)]


def write_questions(path: Path, rows: list[dict] = QUESTIONS) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")


def stage_of(recipe: Recipe, name: str) -> PipelineStage:
    return next(stage for stage in stages_of(recipe) if stage.name == name)


class CutShort(SimpleHTTPRequestHandler):
    """Promises more than it sends."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "1000")
        self.end_headers()
        self.wfile.write(b"half")


def test_urls_are_told_from_files() -> None:
    assert is_url("https://a.b/c.jsonl")
    assert is_url("http://localhost:1/c.jsonl")
    for name in ("c.jsonl", "https", "ftp://a.b/c", "https://a b", "shipped"):
        assert not is_url(name)


def test_downloads_are_whole_or_not_at_all(tmp_path: Path) -> None:
    write_questions(tmp_path / "question.jsonl")
    path = tmp_path / "fetched.jsonl"
    with served(tmp_path) as url:
        fetch(f"{url}/question.jsonl", path, "bench.prompts")
        assert path.read_bytes() == (tmp_path / "question.jsonl").read_bytes()
        with pytest.raises(UserError) as refused:
            fetch(f"{url}/none.jsonl", path, "bench.prompts")
    assert str(refused.value) == (
        f"download failed: bench.prompts = {url}/none.jsonl (404 File not found); check the URL"
    )
    with pytest.raises(UserError, match=r"download failed: .* refused\); check the network"):
        fetch(f"{url}/question.jsonl", path, "bench.prompts")
    with served(tmp_path, CutShort) as url, pytest.raises(UserError, match="996 more expected"):
        fetch(f"{url}/question.jsonl", path, "bench.prompts")
    # the older file is left as it was, and nothing beside it
    assert path.read_bytes() == (tmp_path / "question.jsonl").read_bytes()
    assert {each.name for each in tmp_path.iterdir()} == {"question.jsonl", "fetched.jsonl"}


def data_stage(tmp_path: Path, *overrides: str) -> Workspace:
    given = ["data.conversations=shipped", "data.num_heldout=6", *overrides]
    workspace = Workspace(load_recipe("base", given), tmp_path / "out")
    run_stages(stages_of(workspace.recipe), workspace, ("data",), lambda line: None)
    return workspace


def test_own_conversations_are_what_plan_and_report_ask_about(tmp_path: Path) -> None:
    rows = [
        {"conversations": [{"from": "human", "value": f"{n}?"}, {"from": "gpt", "value": "!"}]}
        for n in range(20)
    ]
    (tmp_path / "chats.json").write_text(json.dumps(rows))
    workspace = data_stage(tmp_path, f"data.conversations={tmp_path / 'chats.json'}")
    data = workspace.folder("data")
    names = (PLAN_PROMPTS_NAME, PROMPTS_NAME)
    plan, bench = (
        {question.turns[0] for question in read_questions(data / name)} for name in names
    )
    assert len(plan) == len(bench) == 3
    assert not plan & bench
    assert plan | bench <= {f"{n}?" for n in range(20)}
    made = Provenance(
        recipe=without_places(workspace.recipe.model_dump(mode="json")),
        command="",
        package_versions={},
        data_digests=workspace.identity("data"),
    )
    chain, conversations = workspace.folder("chain"), made.recipe["data"]["conversations"]
    for name, source in (
        (PROMPTS_NAME, bench_prompts(BenchSettings(), conversations, "--prompts")),
        (PLAN_PROMPTS_NAME, plan_prompts(PlanSettings(), conversations, "--prompts")),
    ):
        found = prompts_of_run(source, chain, made, name)
        assert found == (source, data / name)
        assert source.shown == "held-out turns of chats.json"
        assert with_prompts(PlanSettings(), source, data / name).num_prompts_per_task == 36
        write_questions(data / name)
        shipped, nothing = prompts_of_run(source, chain, made, name)
        assert (shipped.shown, nothing) == ("shipped", None)


def test_shipped_prompts_are_held_out_ones_which_plan_and_report_share(tmp_path: Path) -> None:
    training, _ = split_conversations(load_conversations("shipped"), 120)
    learned = {messages[0]["content"] for messages in training["messages"]}
    asked = []
    for source in (
        bench_prompts(BenchSettings(), ""),
        plan_prompts(PlanSettings(), ""),
        bench_prompts(BenchSettings(prompts="shipped"), "a.jsonl"),
    ):
        assert (source.shown, source.is_kept, source.file) == ("shipped", True, None)
        questions = read_questions(source.write(tmp_path / "prompts.jsonl"))
        asked.append({question.turns[0] for question in questions})
        assert len({question.task for question in questions}) == 8
        assert not asked[-1] & learned
    bench, plan, again = asked
    assert again == bench
    assert not bench & plan
    assert 50 < len(plan) <= len(bench) + 8


def test_what_heads_learned_of_the_shipped_conversations_is_not_asked(tmp_path: Path) -> None:
    """A chain whose run is gone, and held out fewer of them."""
    data = {"conversations": "shipped", "num_heldout": 48}
    made = Provenance(recipe={"data": data}, command="", package_versions={}, data_digests={})
    source = bench_prompts(BenchSettings(), "shipped", "--prompts")
    source, _ = prompts_of_run(source, tmp_path, made, PROMPTS_NAME)
    training, _ = split_conversations(load_conversations("shipped"), 48)
    learned = {messages[0]["content"] for messages in training["messages"]}
    questions = read_questions(source.write(tmp_path / "prompts.jsonl"))
    assert questions
    assert not {question.turns[0] for question in questions} & learned


def test_the_data_stage_keeps_downloaded_prompts(tmp_path: Path) -> None:
    write_questions(tmp_path / "bench.jsonl")
    write_questions(tmp_path / "plan.jsonl", QUESTIONS[:1])
    with served(tmp_path) as url:
        named = [f"bench.prompts={url}/bench.jsonl", f"plan.prompts={url}/plan.jsonl"]
        workspace = data_stage(tmp_path, *named)
    data = workspace.folder("data")
    assert len(read_questions(data / "prompts.jsonl")) == 2
    assert len(read_questions(data / "plan_prompts.jsonl")) == 1
    identity = workspace.identity("data")
    assert set(identity) == {"conversations", "prompts", "plan_prompts"}
    before = workspace.record("data")
    # the server is gone, and is not asked
    assert data_stage(tmp_path, *named).record("data") == before
    with pytest.raises(UserError, match=r"download failed: bench\.prompts = \S+/other\.jsonl"):
        data_stage(tmp_path, named[0].replace("bench.jsonl", "other.jsonl"), named[1])
    assert workspace.record("data") == before


def test_downloaded_prompts_that_are_none_are_refused(tmp_path: Path) -> None:
    (tmp_path / "page.jsonl").write_text("<html></html>\n")
    with (
        served(tmp_path) as url,
        pytest.raises(UserError, match=r"prompt is not JSON: \S+prompts\.jsonl line 1"),
    ):
        data_stage(tmp_path, f"bench.prompts={url}/page.jsonl")
    assert not (tmp_path / "out" / "data").exists()


def test_a_chat_template_is_text_or_a_file(tmp_path: Path) -> None:
    path = tmp_path / "chat.jinja"
    path.write_text(CHATML)

    def text(named: object) -> str | None:
        given = {"model": "a/b", "chat_template": named}
        recipe = Recipe.model_validate({"name": "a", "target": given})
        return chat_template_of(recipe)

    assert text(str(path)) == text(CHATML) == CHATML
    assert text(None) is None
    for named in (tmp_path / "none.jinja", tmp_path):
        with pytest.raises(UserError, match=r"chat template not found: target\.chat_template = /"):
            text(str(named))


class Whole(Workspace):
    """A workspace whose data stage is whole, and whose other stages are their folders."""

    def identity(self, stage: str) -> dict[str, Any]:
        if stage == "data":
            return {"conversations": "c", "prompts": "p"}
        return super().identity(stage)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    write_family(tmp_path / "base", "qwen2", num_shards=1)
    return tmp_path / "base"


def run_target(base: Path, out: Path, **target: Any) -> Whole:
    recipe = Recipe.model_validate({"name": "a", "target": {"model": str(base), **target}})
    workspace = Whole(recipe, out)
    run_stages([stage_of(recipe, "target")], workspace, None, lambda line: None)
    return workspace


def test_a_target_with_all_that_it_needs_is_left_where_it_is(base: Path, tmp_path: Path) -> None:
    workspace = run_target(base, tmp_path / "out")
    assert checkpoint_of(workspace, "target") == tokenizer_of(workspace) == base
    assert {path.name for path in workspace.folder("target").iterdir()} == {"stage.json"}


def test_a_template_of_the_recipe_makes_another_target(base: Path, tmp_path: Path) -> None:
    plain = run_target(base, tmp_path / "plain").record("target")
    workspace = run_target(base, tmp_path / "out", chat_template=CHATML.replace("im_", "my_"))
    assert checkpoint_of(workspace, "target") == base
    assert tokenizer_of(workspace) == tmp_path / "out" / "target" / "tokenizer"
    found = workspace.record("target")
    assert plain is not None
    assert found is not None
    assert found.identity != plain.identity
    assert set(found.inputs) - set(plain.inputs) == {"chat_template"}
    assert {"tokenizer.json", "chat_template.jinja"} <= set(found.identity["tokenizer"])


def test_a_target_without_a_template_is_told_at_once(base: Path, tmp_path: Path) -> None:
    (base / "chat_template.jinja").unlink()
    with pytest.raises(UserError, match=r"without a chat template: .*set target\.chat_template"):
        run_target(base, tmp_path / "out")


def test_a_target_without_weights_is_told_at_once(base: Path, tmp_path: Path) -> None:
    (base / "model.safetensors").unlink()
    with pytest.raises(UserError, match="no weights"):
        run_target(base, tmp_path / "out")


def test_a_target_in_4_bits_is_not_quantized_again(base: Path, tmp_path: Path) -> None:
    write_intermediate(tmp_path / "awq", base)
    with pytest.raises(UserError, match=r"quantized already: .*config\.json.*set quantize=null"):
        run_target(tmp_path / "awq", tmp_path / "out")


def test_a_changed_adapter_is_merged_again(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter, merges = tmp_path / "adapter", []
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text("{}")
    (adapter / "adapter_model.safetensors").write_bytes(b"1")

    def merge(found_base: Path, found_adapter: Path, out: Path) -> dict[str, Any]:
        merges.append((found_base, found_adapter))
        shutil.copytree(found_base, out)
        return {"rank": 4}

    monkeypatch.setattr("polybasic.train.adapters.merge_adapter", merge)
    workspace = run_target(base, tmp_path / "out", adapter=str(adapter))
    merged = tmp_path / "out" / "target" / "merged"
    assert merges == [(base, adapter)]
    assert checkpoint_of(workspace, "target") == tokenizer_of(workspace) == merged
    record = workspace.record("target")
    assert record is not None
    assert record.summary == {"model": str(base), "adapter": {"rank": 4}}
    assert "model.safetensors" in record.identity
    run_target(base, tmp_path / "out", adapter=str(adapter))
    assert len(merges) == 1
    (adapter / "adapter_model.safetensors").write_bytes(b"12")
    run_target(base, tmp_path / "out", adapter=str(adapter))
    assert len(merges) == 2
