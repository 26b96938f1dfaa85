"""Models without a chain, as the chain of them: nothing trained, and n-grams below all."""

import shlex
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from polybasic.chain.formats.kept import CHAINS, folder_stamp, kept_folder
from polybasic.chain.formats.manifest import Manifest, Provenance
from polybasic.chain.formats.package import TARGET_NAME, Part, package_chain
from polybasic.chain.formats.plan import AdaptiveFlush, Flush, Ngram, Plan, Tree
from polybasic.chain.formats.tokenizer import needs_preparation, prepare_tokenizer

_TREE = Tree(depth=8, top_k=1, rows=12)
ALONE = Plan(members=(TARGET_NAME,), tree=_TREE, ngram=Ngram())
"""What runs of a target alone until a plan is measured."""
_FLUSH = Flush(
    length=32,
    adaptive=AdaptiveFlush(
        break_even=0.6, acceptance=(0.4, 0.45, 0.55, 0.65, 0.75, 0.83, 0.92, 0.99)
    ),
)
"""Above a model that was not measured: blocks that are short where its guesses are unsure.

The acceptance is about that of Qwen2.5-Coder-0.5B's tokens by the 1.5B. Any break-even from 0.5 to
0.8 is within a tenth of the best on code and chat; blocks of six tokens lose a third on chat.
"""
_VERSION = 2
"""Of what is made of models; raised where the same ones give another chain."""
_RECIPE = {"train": {"kind": "none"}, "quantize": None}
"""What a recipe says of a chain in which nothing was trained, and the target not quantized."""


def bare_chain(checkpoint: Path, reference: str, below: Sequence[Part] = ()) -> Path:
    """The folder of the chain of a model in the cache, made unless it is there.

    It refers to the model's files where they lie. What is planned and measured of it is kept in it.

    Args:
        checkpoint: folder of the model.
        reference: how the user named it.
        below: intermediates, from the model down.

    Raises:
        UserError: a model that cannot be a target, one below that does not fit it, or as
            `kept_folder`.
    """
    folders = [checkpoint, *(part.folder for part in below)]
    stamps = [folder_stamp(folder) for folder in folders]

    def make(folder: Path) -> None:
        with TemporaryDirectory() as temporary:
            tokenizer = None
            if needs_preparation(checkpoint, None):
                tokenizer = Path(temporary) / "tokenizer"
                prepare_tokenizer(checkpoint, None, tokenizer)
            package_chain(
                folder,
                checkpoint,
                str(checkpoint.resolve()),
                copy_target=False,
                parts=below,
                plan=_plan([part.name for part in below]),
                provenance=Provenance(
                    recipe={"name": Path(reference).stem, **_RECIPE},
                    command=shlex.join(["polybasic", "generate", reference]),
                    package_versions={},
                    data_digests={},
                ),
                quality={},
                training={},
                tokenizer=tokenizer,
            )

    name = checkpoint.resolve().name
    return kept_folder(CHAINS, name, [_VERSION, stamps], make)


def is_bare(manifest: Manifest) -> bool:
    """Whether nothing in a chain was trained."""
    return all(manifest.provenance.recipe.get(key, "") == value for key, value in _RECIPE.items())


def _plan(below: Sequence[str]) -> Plan:
    members = (TARGET_NAME, *below)
    flush = dict.fromkeys(members[:-1], _FLUSH)
    return ALONE.model_copy(update={"members": members, "flush": flush})
