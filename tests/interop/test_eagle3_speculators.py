"""Heads that speculators itself writes, imported and computed by this runtime as it computes them.

Heads are random: what is compared is arithmetic, and no weights can be fetched.
"""

from pathlib import Path

import pytest
import torch
from speculators import SpeculatorsConfig, VerifierConfig
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from speculators.proposals.greedy import GreedyTokenProposalConfig
from torch import Tensor
from transformers import LlamaConfig

from polybasic.chain.base.errors import UserError
from polybasic.chain.formats.checkpoints.checkpoint import load_tensors
from polybasic.chain.formats.checkpoints.config import read_config
from polybasic.chain.formats.checkpoints.draft_vocabulary import draft_tables
from polybasic.chain.heads.importing import import_head
from polybasic.chain.kernels.rows import consecutive_rows
from polybasic.chain.model.loading import load_decoder, load_head
from polybasic.deploy.runtime.rounds.cache import KeyValueCache
from tests.checkpoints import VOCAB_SIZE, write_family

H, NUM_ROWS, FEATURE_LAYERS = 128, 40, [1, 3, 5]
DRAFTED = torch.arange(3, 99, 2)
CPU = torch.device("cpu")
TOLERANCE = 1e-5
"""Of logits relative to the largest, between two ways of the same float32 arithmetic."""


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("speculators") / "target"
    write_family(folder, "llama3", dtype=torch.float32, num_hidden_layers=7)
    return folder


def new_head(target: Path, *, norm_before_residual: bool = False) -> Eagle3DraftModel:
    """A random head of speculators, with norms that are not all ones."""
    layer = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=H,
        intermediate_size=192,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 20000.0},
        max_position_embeddings=128,
    )
    layer._attn_implementation = "eager"
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layer,
        draft_vocab_size=len(DRAFTED),
        norm_before_residual=norm_before_residual,
        eagle_aux_hidden_state_layer_ids=FEATURE_LAYERS,
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=3)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
        ),
    )
    torch.manual_seed(3)
    head = Eagle3DraftModel(config).eval()
    head.load_vocab_mappings(**draft_tables(DRAFTED, VOCAB_SIZE))
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.uniform_(0.7, 1.3) if parameter.dim() == 1 else parameter.normal_(0, 0.1)
        head.embed_tokens.weight.copy_(load_tensors(target)["model.embed_tokens.weight"])
    return head


@torch.inference_mode()
def logits_by_speculators(head: Eagle3DraftModel, token_ids: Tensor, read: Tensor) -> Tensor:
    """[R, D], of the first of its unrolled steps."""
    taken: list[Tensor] = []
    handle = head.lm_head.register_forward_hook(lambda *call: taken.append(call[2][0]))
    documents = torch.zeros(1, len(token_ids), dtype=torch.long)
    head(read[None], token_ids[None], documents, ttt_steps=1)
    handle.remove()
    assert len(taken) == 1
    return taken[0]


@torch.inference_mode()
def logits_by_runtime(draft: Path, target: Path, token_ids: Tensor, read: Tensor) -> Tensor:
    """[R, D]."""
    decoder = load_decoder(read_config(target), torch.float32, CPU, NUM_ROWS)
    head = load_head(read_config(draft), decoder, NUM_ROWS)
    cache = KeyValueCache(head.config, 1, 64, torch.float32, CPU)
    rows = consecutive_rows(0, NUM_ROWS)
    states = head.forward(token_ids, [cache.layers], [rows], head.features(read))
    return head.logits(states)


@pytest.mark.parametrize("is_imported", [True, False], ids=["imported", "other weights"])
def test_logits_are_those_of_speculators(target: Path, tmp_path: Path, is_imported: bool) -> None:
    head = new_head(target)
    head.save_pretrained(tmp_path / "head")
    import_head(tmp_path / "head", target, tmp_path / "draft")
    assert read_config(tmp_path / "draft").head.feature_layers == tuple(FEATURE_LAYERS)
    if not is_imported:
        with torch.no_grad():
            head.layers[0].hidden_norm.weight += 0.1
    torch.manual_seed(0)
    token_ids, read = torch.randint(0, VOCAB_SIZE, (NUM_ROWS,)), torch.randn(NUM_ROWS, 3 * H)
    expected = logits_by_speculators(head, token_ids, read)
    found = logits_by_runtime(tmp_path / "draft", target, token_ids, read)
    difference = (found - expected).abs().max() / expected.abs().max()
    print(f"{difference:.1e} of the largest logit")
    assert (difference < TOLERANCE) == is_imported


def test_a_variant_of_speculators_is_refused(target: Path, tmp_path: Path) -> None:
    new_head(target, norm_before_residual=True).save_pretrained(tmp_path / "head")
    with pytest.raises(UserError, match=r"variant of EAGLE-3: .*norm_before_residual True"):
        import_head(tmp_path / "head", target, tmp_path / "draft")
