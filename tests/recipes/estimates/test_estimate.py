"""What a dry run says, and the checks that come before anything is written."""

import json
import re
from collections import namedtuple
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from polybasic.chain.base.console import Console
from polybasic.chain.base.errors import UserError
from polybasic.chain.formats.checkpoints.checkpoint import load_tensors, stored_tensors
from polybasic.chain.kernels.product_times import multiplies_fast
from polybasic.quantize.blocks import round_to_blocks
from polybasic.recipes.cli.run import on_devices
from polybasic.recipes.estimates import dry_run as estimates
from polybasic.recipes.estimates.costs import StageEstimate
from polybasic.recipes.estimates.dry_run import check_inputs, estimate, foresee, print_estimates
from polybasic.recipes.estimates.hardware_profiles import hardware_at_hand, hardware_named
from polybasic.recipes.estimates.sizes import count_of_head, shape_of_small, shape_of_target
from polybasic.recipes.pipeline.running import PipelineStage, Workspace, run_stages
from polybasic.recipes.pipeline.sources import SOURCE_STAGES
from polybasic.recipes.pipeline.stages import stages_of
from polybasic.recipes.schema.loading import load_recipe
from polybasic.recipes.schema.recipe import Recipe
from polybasic.train.features.offline_features import TOP_TOKENS
from polybasic.train.features.target import load_target
from polybasic.train.head.start import new_head
from polybasic.train.settings import HeadSettings
from tests.checkpoints import FAMILIES, write_family
from tests.conftest import write_intermediate
from tests.recipes.published_configs import write_config

STAGES = stages_of(load_recipe("base"))
Usage = namedtuple("Usage", "total used free")


def given(folder: Path) -> list[str]:
    """What the base leaves to be given: a model, of which the sizes are here, and conversations."""
    model = write_config(folder, "lmsys/vicuna-7b-v1.5")
    return [f"target.model={model}", "data.conversations=shipped"]


def four(folder: Path) -> list[str]:
    """The models of `llama31-8b-four`, of which the sizes are here."""
    names = {"target": "Llama-3.1-8B-Instruct", "small": "Llama-3.2-1B-Instruct"}
    return [
        f"{section}.model={write_config(folder, f'meta-llama/{name}')}"
        for section, name in names.items()
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_of_every_family_are_counted(family: str, tmp_path: Path) -> None:
    write_family(tmp_path, family)
    shape = shape_of_target(load_recipe("base", [f"target.model={tmp_path}"]))
    tensors = load_tensors(tmp_path)
    assert shape.num_parameters == sum(tensor.numel() for tensor in tensors.values())


def test_a_folder_is_sized_from_its_config(tmp_path: Path) -> None:
    config = {
        "model_type": "llama",
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
        "vocab_size": 512,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "tie_word_embeddings": True,
        "dtype": "float32",
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    shape = shape_of_target(load_recipe("base", [f"target.model={tmp_path}"]))
    assert (shape.num_kv_heads, shape.head_size, shape.weight_bytes) == (2, 64, 4)
    assert shape.num_parameters == 512 * 128 + 2 * (4 * 128**2 + 3 * 128 * 256 + 256) + 128
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "mamba"}))
    with pytest.raises(UserError, match="unsupported architecture"):
        shape_of_target(load_recipe("base", [f"target.model={tmp_path}"]))


@pytest.mark.parametrize(
    "train",
    [
        {},
        {"draft_vocab_size": 128},
        {"kind": "eagle3", "feature_loss_weight": 0},
        {"kind": "eagle3", "feature_loss_weight": 0, "draft_vocab_size": 128},
        {"kind": "medusa", "feature_loss_weight": 0, "num_positions": 3},
        {"kind": "hydra", "feature_loss_weight": 0, "draft_vocab_size": 128},
        {"kind": "early_exit", "feature_loss_weight": 0, "exit_layer": 1, "adapter_rank": 32},
    ],
)
def test_heads_are_counted_as_they_are_built(train: dict, tmp_path: Path) -> None:
    settings = HeadSettings(**train, dtype="float32")
    write_family(tmp_path, "llama3")
    shape = shape_of_target(load_recipe("base", [f"target.model={tmp_path}"]))
    target = load_target(tmp_path, torch.device("cpu"))
    drafted = torch.arange(128) if settings.draft_vocab_size else None
    built = target.head_shape(settings), target.embedding, settings, 0, None, None
    head = new_head(*built, target.lm_head, drafted)
    num = sum(each.numel() for each in head.parameters() if each.requires_grad)
    count = count_of_head(shape, settings)
    assert abs(count.num_parameters - num) <= shape.hidden_size, "but for a norm"
    token = torch.zeros(1, 1).long()
    features = target.features(token, None, head.shape.feature_layers, TOP_TOKENS)
    assert count.feature_bytes == sum(each.nbytes for each in features.tensors().values())


def test_what_is_written_before_training_is_counted(tmp_path: Path) -> None:
    plain = rows_of(tmp_path, "train.features=online")
    offline = rows_of(tmp_path, "train.features=offline")
    written = offline["draft"].disk_bytes - plain["draft"].disk_bytes
    recipe = load_recipe("base").train
    assert recipe.num_conversations is not None
    assert recipe.num_conversations < recipe.num_steps * recipe.batch_size
    assert written == pytest.approx(recipe.num_conversations * 280 * (4096 * 2 + TOP_TOKENS * 6))
    assert offline["draft"].seconds < plain["draft"].seconds
    asked = rows_of(tmp_path, "data.regenerate.temperature=0")
    one_by_one = rows_of(
        tmp_path, "data.regenerate.temperature=0", "data.regenerate.num_parallel=1"
    )["regenerated"]
    assert one_by_one.seconds > asked["regenerated"].seconds > 20
    server = "data.regenerate.endpoint=http://localhost:8000/v1"
    assert rows_of(tmp_path, server)["regenerated"].seconds < 10
    assert "regenerated" not in plain


def test_shipped_conversations_are_counted_as_they_are(tmp_path: Path) -> None:
    asked = "data.regenerate.temperature=0", "data.max_tokens=1024"
    shipped = rows_of(tmp_path, "data.conversations=shipped", *asked)["regenerated"]
    (tmp_path / "some.jsonl").write_text("")
    unknown = rows_of(tmp_path, f"data.conversations={tmp_path}/some.jsonl", *asked)["regenerated"]
    assert shipped.disk_bytes == 2 * 955 * 280 * 5
    assert shipped.seconds < unknown.seconds / 50
    more = rows_of(tmp_path, "data.conversations=shipped", "data.self_prompted=955", *asked)
    assert more["regenerated"].disk_bytes == 2 * shipped.disk_bytes
    assert 0 < more["self_prompted"].disk_bytes < shipped.disk_bytes
    assert shipped.seconds < more["regenerated"].seconds < 2 * shipped.seconds
    assert 0 < more["self_prompted"].seconds < shipped.seconds


def test_every_stage_has_an_estimate(tmp_path: Path) -> None:
    recipe = load_recipe("llama31-8b-four", four(tmp_path))
    rows = estimate(stages_of(recipe), Workspace(recipe, tmp_path / "out"), None)
    assert [row.name for row in rows] == [stage.name for stage in stages_of(recipe)]
    assert all(row.memory_bytes > 0 for row in rows)
    assert all(row.seconds > 0 for row in rows if row.name not in SOURCE_STAGES)
    assert rows[1].num_parameters > rows[2].num_parameters > 0
    assert not (tmp_path / "out").exists()


def test_the_smaller_model_is_estimated_by_its_own_shape(tmp_path: Path) -> None:
    def rows(*overrides: str) -> dict:
        recipe = load_recipe("llama31-8b-four", [*four(tmp_path), *overrides])
        return {
            row.name: row for row in estimate(stages_of(recipe), Workspace(recipe, tmp_path), None)
        }

    small = shape_of_small(load_recipe("llama31-8b-four", four(tmp_path)))
    assert small is not None
    assert (small.vocab_size, small.num_layers, small.hidden_size) == (128256, 16, 2048)
    assert shape_of_small(load_recipe("base")) is None
    whole = rows()
    assert whole["small"].num_parameters == small.num_parameters
    assert whole["small_draft"].num_parameters == small.num_draft_parameters
    packed = rows("small.role=drafter")["chain"].disk_bytes
    assert whole["chain"].disk_bytes - packed == small.num_draft_bytes


def test_a_smaller_model_that_is_missing_is_told(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    recipe = load_recipe("base", [*given(tmp_path), "small.model=no/where/here"])
    with pytest.raises(UserError, match="checkpoint not found"):
        estimate(stages_of(recipe), Workspace(recipe, tmp_path), None)


def rows_of(tmp_path: Path, *overrides: str, hardware: str = "cpu") -> dict[str, StageEstimate]:
    recipe = load_recipe("base", [*given(tmp_path), *overrides])
    workspace = Workspace(recipe, tmp_path / "out")
    rows = estimate(stages_of(recipe), workspace, None, hardware_named(hardware))
    return {row.name: row for row in rows}


def test_faster_machines_take_less_time_and_nothing_else(tmp_path: Path) -> None:
    def seconds(hardware: str) -> dict[str, float]:
        return {name: row.seconds for name, row in rows_of(tmp_path, hardware=hardware).items()}

    cpu, a100, h100 = map(seconds, ("cpu", "a100-80gb", "h100-80gb"))
    assert h100["draft"] < a100["draft"] < cpu["draft"]
    assert h100["intermediate"] < a100["intermediate"] < cpu["intermediate"]
    on_cpu, on_h100 = rows_of(tmp_path), rows_of(tmp_path, hardware="h100-80gb")
    for name, row in on_cpu.items():
        assert replace(row, seconds=0) == replace(on_h100[name], seconds=0)


def test_models_are_trained_on_in_float32_where_bfloat16_is_slow(tmp_path: Path) -> None:
    model = write_config(tmp_path, "lmsys/vicuna-7b-v1.5")
    given = f"target.model={model}", "train.features=offline"
    fast, slow = (rows_of(tmp_path, *given, hardware=name) for name in ("cpu", "cpu-avx2"))
    num = shape_of_target(load_recipe("base", [*given])).num_parameters
    assert slow["draft"].memory_bytes - fast["draft"].memory_bytes == 2 * num
    online = rows_of(tmp_path, given[0], "train.features=online")["draft"].disk_bytes
    written = [rows["draft"].disk_bytes - online for rows in (fast, slow)]
    states = [bytes_of * 4096 + TOP_TOKENS * 6 for bytes_of in (2, 4)]
    assert written[1] * states[0] == pytest.approx(written[0] * states[1])
    assert written[0] > 0
    named = rows_of(tmp_path, *given, "train.dtype=bfloat16", hardware="cpu-avx2")["draft"]
    assert named.memory_bytes == fast["draft"].memory_bytes
    # kernels multiply bfloat16 fast everywhere
    assert slow["plan"].memory_bytes == fast["plan"].memory_bytes


@pytest.mark.processor
@pytest.mark.skipif("torch.cuda.is_available()", reason="a GPU is at hand")
def test_the_profile_at_hand_trains_as_this_processor_does() -> None:
    profile, _ = hardware_at_hand()
    assert profile.trains_in_float32 != multiplies_fast(torch.bfloat16)


def test_processes_share_the_steps_and_zero3_the_target(tmp_path: Path) -> None:
    write_config(tmp_path, "lmsys/vicuna-7b-v1.5")
    given = (f"target.model={tmp_path / 'lmsys--vicuna-7b-v1.5'}", "train.num_steps=20000")
    single = rows_of(tmp_path, *given)["draft"]
    four = rows_of(tmp_path, *given, "train.num_processes=4")["draft"]
    sharded = rows_of(tmp_path, *given, "train.num_processes=4", "train.zero_stage=3")["draft"]
    assert four.seconds == pytest.approx(single.seconds / 4, rel=0.02)
    saved = four.memory_bytes - sharded.memory_bytes
    # lm_head stays whole, and a layer is gathered for its pass
    assert saved == pytest.approx(
        2 * (0.75 * 32 * 202_383_360 - 202_383_360 + 32000 * 4096), rel=0.01
    )
    assert (single.num_ranks, sharded.num_ranks) == (1, 4)
    assert sharded.other_rank_bytes == sharded.memory_bytes


def test_a_chain_is_divided_over_devices(tmp_path: Path) -> None:
    model = write_config(tmp_path, "meta-llama/Llama-3.1-70B-Instruct")

    def report(num: int) -> StageEstimate:
        given = f"bench.tensor_parallel={num}", "bench.systems=[target, polybasic]"
        return rows_of(tmp_path, f"target.model={model}", *given, hardware="8xh100-80gb")["report"]

    single, four, eight = report(1), report(4), report(8)
    # 80 layers of 855,638,016 weights in bfloat16 and 4 bits, and two output projections; two
    # embeddings are whole everywhere; the process, caches and the rest
    embedding = 2 * 128256 * 8192
    divided = 80 * 855_638_016 * (2 + 0.5 + 2.5 / 128) + 2 * embedding
    assert eight.other_rank_bytes == pytest.approx(0.7e9 + 1.15 * (divided / 8 + 2 * embedding))
    assert single.memory_bytes - four.memory_bytes == pytest.approx(1.15 * divided * 3 / 4)
    assert four.memory_bytes < 80e9 < single.memory_bytes
    assert eight.seconds < four.seconds < single.seconds
    assert (single.num_ranks, eight.num_ranks) == (1, 8)
    told = r"key/value heads: bench.tensor_parallel = 3, heads 8; use 1 or 2 or 4 or 8$"
    with pytest.raises(UserError, match=told):
        report(3)


def test_the_page_on_scale_has_these_figures(tmp_path: Path) -> None:
    page = (Path(__file__).parents[3] / "docs" / "scale.md").read_text("utf-8")
    column = page.split("in GB, first device + each of the others:")[1].split("\n\n")[1]
    said = {row.split("|")[1].strip(): row.split("|")[3].strip(" *") for row in column.splitlines()}
    model = write_config(tmp_path, "meta-llama/Llama-3.1-70B-Instruct")
    for num in (1, 2, 4, 8):
        given = f"target.model={model}", f"plan.tensor_parallel={num}"
        plan = rows_of(tmp_path, *given)["plan"]
        found = [plan.memory_bytes, *([plan.other_rank_bytes] if num > 1 else [])]
        assert said[str(num)] == " + ".join(f"{each / 1e9:.0f}" for each in found)


@pytest.mark.parametrize("name", ["0xh100-80gb", "xh100-80gb", "4x", "8xh100", "-1xcpu", "4xx"])
def test_hardware_that_is_none_is_told(name: str) -> None:
    with pytest.raises(UserError, match=f"unknown hardware: --hardware {name}"):
        hardware_named(name)


def test_a_dry_run_states_memory_by_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    model, four = write_config(tmp_path, "Qwen/Qwen3-8B"), "4xrtx-4090"
    recipe = load_recipe("qwen3-8b", [*on_devices(four), f"target.model={model}"])
    hardware = hardware_named(four)
    rows = estimate(stages_of(recipe), Workspace(recipe, tmp_path), None, hardware)
    print_estimates(rows, tmp_path, hardware, "by --hardware", Console())
    said = capsys.readouterr().out
    lines = {line.split()[0]: line for line in said.splitlines() if " run: " in line}
    assert re.search(r"4 x \d+\.\d GB", lines["draft"])
    assert re.search(r"\d+\.\d GB \+ 3 x \d+\.\d GB", lines["plan"])
    assert re.search(r"^report needs \d+\.\d GB of a device that has 24\.0 GB$", said, re.M)
    assert "plan needs" not in said
    assert "times are for 4xrtx-4090, 4 devices, each one RTX 4090" in said


def test_what_is_made_of_a_model_is_counted(tmp_path: Path) -> None:
    model = write_config(tmp_path, "lmsys/vicuna-7b-v1.5")
    plain = rows_of(tmp_path, f"target.model={model}")
    (tmp_path / "head").mkdir()
    (tmp_path / "head" / "config.json").write_text("{}")
    (tmp_path / "head" / "pytorch_model.bin").write_bytes(b"1")
    ready = rows_of(tmp_path, f"target.model={model}", f"draft.model={tmp_path / 'head'}")
    assert ready["draft"].seconds < 10 < plain["draft"].seconds
    merged = rows_of(tmp_path, f"target.model={model}", "target.adapter=org/adapter")
    assert plain["target"].disk_bytes == 0
    assert merged["target"].disk_bytes == pytest.approx(13.5e9, rel=0.01)
    distilled = rows_of(tmp_path, f"target.model={model}", "quantize.distill={num_steps: 200}")
    assert distilled["intermediate"].seconds > plain["intermediate"].seconds
    assert (plain["intermediate"].is_on_host, distilled["intermediate"].is_on_host) == (True, False)


def test_a_dry_run_asks_the_hub_for_nothing_but_configs(tmp_path: Path, monkeypatch) -> None:
    """Folders with config.json are enough; ids of data, adapter and head are only read."""

    def refuse(*arguments: object, **options: object) -> None:
        raise AssertionError(f"downloads {arguments} {options}")

    for name in ("hf_hub_download", "snapshot_download", "HfApi"):
        monkeypatch.setattr(f"huggingface_hub.{name}", refuse)
    monkeypatch.setattr("polybasic.train.data.conversations.HfApi", refuse)
    model = write_config(tmp_path, "Qwen/Qwen3-8B")
    recipe = load_recipe(
        "qwen3-8b", [f"target.model={model}", "target.adapter=org/adapter", "draft.model=org/head"]
    )
    rows = estimate(stages_of(recipe), Workspace(recipe, tmp_path / "out"), None)
    reasons = {row.name: row.state.reason for row in rows}
    assert reasons["data"] == "to be downloaded"
    assert {row.state.action for row in rows} == {"run"}
    for key in ("target.adapter", "draft.model"):
        malformed = load_recipe("qwen3-8b", [f"target.model={model}", f"{key}=no-such-folder"])
        with pytest.raises(UserError, match="no-such-folder is neither a folder nor a hub id"):
            estimate(stages_of(malformed), Workspace(malformed, tmp_path / "out"), None)
    absent = load_recipe("qwen3-8b", [f"target.model={model}", "draft.model=package:no_such/head"])
    with pytest.raises(UserError, match="package not found: no_such"):
        estimate(stages_of(absent), Workspace(absent, tmp_path / "out"), None)


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("data.conversations=no.jsonl", "conversation file not found: data.conversations = no."),
        ("bench.prompts=no.jsonl", "prompts not found: no.jsonl"),
        ("target.model=no/where/here", "checkpoint not found"),
        ("target.model=./", "not a checkpoint"),
        ("data.conversations=nonsense", "conversations not found"),
        ("data.conversations=org/name:a.parquet", "not a conversation file"),
        ("small={role: drafter}", r"value is to be given: small\.model of recipe base; add small"),
    ],
)
def test_missing_inputs_are_told_before_anything_runs(override, told, tmp_path, monkeypatch):
    recipe, out = load_recipe("base", [*given(tmp_path), override]), tmp_path / "out"
    out.mkdir()
    monkeypatch.chdir(out)
    with pytest.raises(UserError, match=told):
        estimate(STAGES, Workspace(recipe, out), None)
    assert list(out.iterdir()) == []


def test_a_model_and_conversations_have_no_default() -> None:
    told = r"^value is to be given: target\.model and data\.conversations of recipe a; add target"
    with pytest.raises(UserError, match=told):
        check_inputs(Recipe(name="a"), [])


def test_what_no_copy_can_be_made_of_is_told_before_anything_runs(tmp_path: Path) -> None:
    write_family(tmp_path / "model", "qwen2", intermediate_size=272)
    model = f"target.model={tmp_path / 'model'}"
    recipe = load_recipe("base", [model, "data.conversations=shipped"])
    workspace = Workspace(recipe, tmp_path / "out")
    told = r"linear does not divide into groups: mlp\.gate_proj\.weight \[272, 128\]"
    with pytest.raises(UserError, match=told):
        estimate(stages_of(recipe), workspace, None)
    # a command that makes no copy does not ask
    estimate(stages_of(recipe), workspace, ["data", "target", "draft"])
    assert not (tmp_path / "out").exists()


def test_the_bytes_of_a_copy_are_those_of_its_groups(tmp_path: Path) -> None:
    """SmolLM2-135M's widths, and the group sizes that can be asked for."""
    write_family(
        tmp_path / "model",
        "llama2",
        hidden_size=576,
        intermediate_size=1536,
        num_attention_heads=9,
        num_key_value_heads=3,
        num_hidden_layers=1,
    )
    model = f"target.model={tmp_path / 'model'}"

    def num_bytes(*overrides: str) -> int:
        return shape_of_target(load_recipe("base", [model, *overrides])).num_int4_bytes

    write_intermediate(tmp_path / "int4", tmp_path / "model", 64)
    tensors = load_tensors(tmp_path / "int4")
    assert num_bytes() == pytest.approx(sum(tensor.nbytes for tensor in tensors.values()), rel=0.01)
    small = shape_of_small(
        load_recipe("llama31-8b-four", [f"small.model={tmp_path / 'model'}", "quantize=null"])
    )
    round_to_blocks(tmp_path / "model", tmp_path / "blocks")
    stored = stored_tensors(tmp_path / "blocks").values()
    assert small is not None
    assert small.num_int4_bytes == pytest.approx(sum(tensor.nbytes for tensor in stored), rel=0.01)
    assert num_bytes() == num_bytes("quantize.group_size=64") < num_bytes("quantize.group_size=32")


def test_a_missing_extra_is_named(monkeypatch, tmp_path: Path) -> None:
    known = estimates.importlib.util.find_spec
    monkeypatch.setattr(
        estimates.importlib.util,
        "find_spec",
        lambda name: None if name == "awq" else known(name),
    )
    recipe = load_recipe("base", given(tmp_path))
    check_inputs(recipe, [stage for stage in STAGES if stage.name != "intermediate"])
    with pytest.raises(UserError, match=r"pip install 'polybasic\[quantize\]'"):
        check_inputs(recipe, STAGES)


def test_foreseen_states_skip_what_is_whole(tmp_path: Path) -> None:
    def counting(name: str, *needs: str, value: int = 0) -> PipelineStage:
        return PipelineStage(
            name, needs, lambda w: {"value": value}, lambda w, f: {}, lambda w, f: {}
        )

    stages = [counting("a"), counting("b", "a"), counting("c", "a", "b")]
    workspace = Workspace(load_recipe("base"), tmp_path)
    actions = {name: state.action for name, state in foresee(stages, workspace).items()}
    assert actions == {"a": "run", "b": "run", "c": "run"}
    run_stages(stages, workspace, None, lambda line: None)
    changed = [stages[0], counting("b", "a", value=1), stages[2]]
    states = foresee(changed, workspace)
    assert [states[name].action for name in "abc"] == ["skip", "run", "run"]
    assert states["b"].reason == "changed: value"
    assert states["c"].reason == "after b"
