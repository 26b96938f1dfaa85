"""Exported EAGLE-3 heads and draft vocabularies, against what the engines' loaders ask for."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from polybasic.chain.base.errors import UserError
from polybasic.chain.formats.checkpoints.checkpoint import load_tensors
from polybasic.chain.formats.checkpoints.config import read_config
from polybasic.chain.formats.checkpoints.draft_vocabulary import draft_tables
from polybasic.chain.formats.checkpoints.shapes import check_shapes
from polybasic.chain.formats.head_kinds.eagle3 import EAGLE3
from polybasic.chain.formats.package import Part
from polybasic.chain.formats.plan import Plan, Tree
from polybasic.chain.heads.export import (
    ENGINES,
    Engine,
    export_head,
    launch_command,
)
from polybasic.chain.heads.importing import import_head, required_weights
from tests.chain.heads.exported import content_of, loaded
from tests.chain.heads.test_eagle3_import import (
    DRAFTED,
    FC_NORMS,
    FEATURE_LAYERS,
    HEAD_NORMS,
    NUM_LAYERS,
    H,
    I,
    as_specforge,
    eagle3_tensors,
    with_norms,
)
from tests.chain.heads.test_importing import eagle_tensors, write_eagle
from tests.checkpoints import VOCAB_SIZE, write_family
from tests.conftest import package_around

K, D = H // 2, len(DRAFTED)
PLAN = Plan(members=("target", "draft"), tree=Tree(depth=2, top_k=2, rows=6))
# What vLLM 0.33.0 builds (Eagle3LlamaForCausalLM of vllm/model_executor/models/llama_eagle3.py: qkv
# reads 2H, fc has no bias, a map only where the draft vocabulary is not the target's) and
# SGLang 0.5.23 (LlamaForCausalLMEagle3 of sglang/srt/models/llama_eagle3.py: the same, d2t kept
# beside the parameters).
PARAMETERS = {
    "model.embed_tokens.weight": (VOCAB_SIZE, H),
    "model.fc.weight": (H, 3 * H),
    "model.layers.0.hidden_norm.weight": (H,),
    "model.layers.0.input_layernorm.weight": (H,),
    "model.layers.0.post_attention_layernorm.weight": (H,),
    "model.layers.0.self_attn.qkv_proj.weight": (H + 2 * K, 2 * H),
    "model.layers.0.self_attn.o_proj.weight": (H, H),
    "model.layers.0.mlp.gate_up_proj.weight": (2 * I, H),
    "model.layers.0.mlp.down_proj.weight": (H, I),
    "model.norm.weight": (H,),
    "lm_head.weight": (D, H),
    "draft_id_to_target_id": (D,),
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("eagle3_export") / "target"
    write_family(folder, "llama3", dtype=torch.float32, num_hidden_layers=NUM_LAYERS)
    return folder


@pytest.fixture
def packed(target: Path, tmp_path: Path) -> Callable[..., Path]:
    """A chain whose draft head was imported, of the model in `of`; the head may be changed."""

    def pack(
        tensors: dict[str, Tensor],
        change: dict[str, Any] | None = None,
        of: Path = target,
        imported: dict[str, Any] | None = None,
    ) -> Path:
        is_eagle3 = "norm.weight" in tensors
        write = as_specforge if is_eagle3 else write_eagle
        write(tmp_path / "head", tensors, **(imported or {}))  # type: ignore[operator]
        import_head(tmp_path / "head", of, tmp_path / "draft")
        path = tmp_path / "draft" / "config.json"
        path.write_text(json.dumps(content_of(tmp_path / "draft") | (change or {})))
        part = Part("draft", "drafter", "eagle3" if is_eagle3 else "eagle2", tmp_path / "draft")
        package_around(tmp_path / "chain", of, [part], PLAN)
        return tmp_path / "chain"

    return pack


def layers_of(*layers: int) -> dict[str, Any]:
    return {"eagle_config": {"eagle_aux_hidden_state_layer_ids": layers}}


@pytest.mark.parametrize("to", ENGINES)
def test_an_export_comes_back_bit_for_bit(
    target: Path, packed: Callable[..., Path], tmp_path: Path, to: Engine
) -> None:
    tensors = eagle3_tensors(target)
    exported = export_head(packed(tensors, layers_of(1, 3, 6)), to, None, tmp_path / "out")
    assert (exported.kind, exported.model, exported.hot_tokens) == ("eagle3", str(target), None)
    written = load_tensors(exported.folder)
    assert written.keys() == tensors.keys()
    assert all(torch.equal(written[name], tensors[name]) for name in tensors)
    import_head(exported.folder, target, tmp_path / "again")
    before, after = tmp_path / "draft", tmp_path / "again"
    assert read_config(after).head == read_config(before).head
    assert read_config(after).head.feature_layers == (1, 3, 6)


@pytest.mark.parametrize("to", ["vllm", "sglang"])
def test_the_engines_find_all_parameters(
    target: Path, packed: Callable[..., Path], tmp_path: Path, to: Engine
) -> None:
    folder = export_head(packed(eagle3_tensors(target)), to, None, tmp_path / "out").folder
    assert loaded(folder) == PARAMETERS
    config = content_of(folder)
    assert (config["architectures"], config["model_type"]) == (["LlamaForCausalLMEagle3"], "llama")
    # SGLang: fc has a bias by `bias`; both: the attention by it or by `attention_bias`
    assert (config["bias"], config["attention_bias"], config["qkv_bias"]) == (False, False, False)
    # SGLang takes lm_head from the target where it is null, and ties it by tie_word_embeddings
    assert (config["draft_vocab_size"], config["vocab_size"]) == (D, VOCAB_SIZE)
    assert (config["target_hidden_size"], config["tie_word_embeddings"]) == (H, False)
    # read as false where they are left out, by both
    assert not config.keys() & {"norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"}


def test_variants_are_named_to_engines_that_compute_them(
    target: Path, packed: Callable[..., Path], tmp_path: Path
) -> None:
    tensors = with_norms(eagle3_tensors(target), FC_NORMS)
    variants = {"fc_norm": True, "norm_output": True}
    chain = packed(tensors, imported=variants)
    for to in ("vllm", "sglang"):
        folder = export_head(chain, to, None, tmp_path / to).folder
        norms = {f"model.{name}": (H,) for name in FC_NORMS}
        assert loaded(folder) == PARAMETERS | norms
        assert content_of(folder).items() >= variants.items()
    with pytest.raises(UserError, match="EAGLE does not compute this head: draft has fc_norm"):
        export_head(chain, "eagle", None, tmp_path / "eagle")


def test_norms_that_an_engine_lacks_are_refused(
    target: Path, packed: Callable[..., Path], tmp_path: Path
) -> None:
    residual = packed(eagle3_tensors(target), {"norm_before_residual": True})
    with pytest.raises(UserError, match="draft has norm_before_residual"):
        export_head(residual, "sglang", None, tmp_path / "out")
    assert content_of(export_head(residual, "vllm", None, tmp_path / "out").folder)[
        "norm_before_residual"
    ]


def test_norms_of_queries_and_keys_are_not_exported(
    target: Path, packed: Callable[..., Path], tmp_path: Path
) -> None:
    chain = packed(with_norms(eagle3_tensors(target), HEAD_NORMS))
    with pytest.raises(UserError, match="draft norms queries and keys"):
        export_head(chain, "vllm", None, tmp_path / "out")


def test_without_a_draft_vocabulary_there_are_no_tables(
    target: Path, packed: Callable[..., Path], tmp_path: Path
) -> None:
    # vLLM's class has no map then, and its loader stops at a d2t in the file
    chain = packed(eagle3_tensors(target, None))
    for to in ENGINES:
        folder = export_head(chain, to, None, tmp_path / to).folder
        assert not load_tensors(folder).keys() & {"d2t", "t2d"}
        # SGLang reads the key whatever the head
        assert content_of(folder)["draft_vocab_size"] == VOCAB_SIZE


@pytest.mark.parametrize("to", ENGINES)
def test_layers_are_named_as_each_engine_counts(
    target: Path, packed: Callable[..., Path], tmp_path: Path, to: Engine
) -> None:
    chain = packed(eagle3_tensors(target), layers_of(0, 3, 6))
    exported = export_head(chain, to, None, tmp_path / "out")
    config = content_of(exported.folder)
    # vllm/v1/worker/gpu_model_runner.py looks at the top first, and llama.py captures what enters
    assert config["eagle_aux_hidden_state_layer_ids"] == [0, 3, 6]
    # SGLang's set_eagle3_layers_to_capture adds one and captures what enters
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [-1, 2, 5]
    message = (
        "EAGLE's own code reads the inputs of layers 2, 3, 4 of this model, the head was trained "
        "on those of 0, 3, 6"
    )
    assert exported.warnings == ((message,) if to == "eagle" else ())


@pytest.mark.parametrize("to", ENGINES)
def test_layers_that_all_engines_read_are_not_named(
    target: Path, packed: Callable[..., Path], tmp_path: Path, to: Engine
) -> None:
    exported = export_head(packed(eagle3_tensors(target)), to, None, tmp_path / "out")
    config = content_of(exported.folder)
    assert "eagle_aux_hidden_state_layer_ids" not in config
    assert config["eagle_config"] == {"use_aux_hidden_state": True}
    assert exported.warnings == ()
    assert read_config(tmp_path / "draft").head.feature_layers == FEATURE_LAYERS


@pytest.mark.parametrize("to", ENGINES)
def test_a_layer_that_is_read_twice_is_refused(
    target: Path, packed: Callable[..., Path], tmp_path: Path, to: Engine
) -> None:
    chain = packed(eagle3_tensors(target), layers_of(1, 3, 3))
    with pytest.raises(UserError, match="draft reads layers 1, 3, 3, and it hands out each"):
        export_head(chain, to, None, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("to", ENGINES)
def test_biases_that_the_engines_would_drop(
    target: Path, packed: Callable[..., Path], tmp_path: Path, to: Engine
) -> None:
    biases = {
        f"midlayer.self_attn.{part}_proj.bias": torch.zeros(size).bfloat16()
        for part, size in (("q", H), ("k", K), ("v", K))
    }
    chain = packed(eagle3_tensors(target) | biases)
    folder = export_head(chain, to, None, tmp_path / "out").folder
    assert not load_tensors(folder).keys() & biases.keys()
    biases["midlayer.self_attn.v_proj.bias"] += 1
    draft = tmp_path / "draft"
    save_file(load_tensors(draft) | biases, draft / "model.safetensors", {"format": "pt"})
    package_around(chain, target, [Part("draft", "drafter", "eagle3", draft)], PLAN)
    with pytest.raises(UserError, match=r"v_proj\.bias of draft is not zero, and its EAGLE-3"):
        export_head(chain, to, None, tmp_path / "other")


def test_eagle_reads_its_keys(target: Path, packed: Callable[..., Path], tmp_path: Path) -> None:
    folder = export_head(packed(eagle3_tensors(target)), "eagle", None, tmp_path / "out").folder
    assert {path.name for path in folder.iterdir()} == {"config.json", "pytorch_model.bin"}
    # what eagle/model/cnets.py reads of a config
    for key in ("draft_vocab_size", "head_dim", "hidden_act", "rope_theta", "target_hidden_size"):
        assert key in content_of(folder)
    assert content_of(folder)["rope_scaling"] is None


@pytest.mark.parametrize("name", [*required_weights(EAGLE3), "d2t", "t2d"])
def test_a_chain_has_all_that_an_engine_would_leave_random(
    target: Path, packed: Callable[..., Path], tmp_path: Path, name: str
) -> None:
    packed(eagle3_tensors(target))
    draft = tmp_path / "draft"
    tensors = load_tensors(draft)
    del tensors[name]
    save_file(tensors, draft / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match=f"missing tensor: {name} in"):
        check_shapes("eagle3", draft, read_config(draft).head)


def test_sglang_reads_the_draft_vocabulary_of_an_eagle2_head(
    target: Path, packed: Callable[..., Path], tmp_path: Path
) -> None:
    tables = draft_tables(DRAFTED, VOCAB_SIZE)
    chain = packed(eagle_tensors(target) | tables)
    exported = export_head(chain, "sglang", None, tmp_path / "out")
    names = {"config.json", "model.safetensors", "hot_token_ids.pt"}
    assert {path.name for path in exported.folder.iterdir()} == names
    assert exported.hot_tokens == tmp_path / "out" / "hot_token_ids.pt"
    # load_token_map of speculative/spec_utils.py: torch.load(weights_only=True) in torch.tensor
    hot_tokens = torch.tensor(torch.load(exported.hot_tokens, weights_only=True))
    assert torch.equal(hot_tokens, DRAFTED)
    assert hot_tokens.dtype == torch.int64
    command = launch_command("sglang", exported)
    assert command.endswith(f"--speculative-token-map {exported.hot_tokens}")
    # eagle_draft_extend_cuda_graph_runner.py sizes logits by these keys before it counts the tokens
    assert not content_of(exported.folder).keys() & {"draft_vocab_size", "hot_vocab_size"}
    assert not load_tensors(exported.folder).keys() & tables.keys()
    assert exported.warnings == ()
    import_head(exported.folder, target, tmp_path / "again")
    again = load_tensors(tmp_path / "again")
    assert all(torch.equal(again[name], table) for name, table in tables.items())
    # an export is replaced by another
    export_head(chain, "vllm", None, tmp_path / "out")
    assert {path.name for path in exported.folder.iterdir()} == names - {"hot_token_ids.pt"}


@pytest.mark.parametrize(("to", "named"), [("eagle", "EAGLE"), ("vllm", "vLLM")])
def test_others_draft_over_the_whole_vocabulary(
    target: Path, packed: Callable[..., Path], tmp_path: Path, to: Engine, named: str
) -> None:
    tables = draft_tables(DRAFTED, VOCAB_SIZE)
    exported = export_head(packed(eagle_tensors(target) | tables), to, None, tmp_path / "out")
    assert exported.warnings == (
        f"{named} knows no draft vocabulary of an EAGLE-2 head: it drafts over all {VOCAB_SIZE} "
        f"tokens, not over {D}",
    )
    assert exported.hot_tokens is None
    # vLLM's AutoWeightsLoader stops at names that its class does not have
    assert not load_tensors(exported.folder).keys() & tables.keys()
    assert "draft_vocab_size" not in content_of(exported.folder)


@pytest.mark.parametrize(
    ("family", "make", "told"),
    [
        ("gemma2", eagle_tensors, "of model_type gemma2, its EAGLE class is Llama's"),
        ("gemma3", eagle3_tensors, "does not hand out the inputs of that model's layers"),
    ],
)
def test_a_gemma_target_is_none_of_the_engines(
    packed: Callable[..., Path],
    tmp_path: Path,
    family: str,
    make: Callable[[Path], dict[str, Tensor]],
    told: str,
) -> None:
    gemma = tmp_path / "gemma"
    write_family(gemma, family, num_hidden_layers=NUM_LAYERS, layer_types=None)
    chain = packed(make(gemma), of=gemma)
    for to in ("vllm", "sglang"):
        with pytest.raises(UserError, match=told):
            export_head(chain, to, None, tmp_path / "out")
    assert export_head(chain, "eagle", None, tmp_path / "out").folder.is_dir()
