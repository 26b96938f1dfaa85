"""Peers with a chain's target, in all of their modes, as systems of a benchmark."""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

from polybasic.chain.base.errors import UserError
from polybasic.chain.formats.checkpoints.block_types import BLOCK_TYPES
from polybasic.chain.formats.checkpoints.config import read_config
from polybasic.chain.formats.checkpoints.kinds import MODEL_KINDS
from polybasic.chain.formats.tokenizer import load_tokenizer
from polybasic.chain.model.reference import load_reference_model, quiet_transformers
from polybasic.deploy.bench.peers.catalogue import PEERS
from polybasic.deploy.bench.peers.process import PeerSystem, run_worker
from polybasic.deploy.bench.systems.chain_systems import weight_type
from polybasic.deploy.bench.systems.system import System
from polybasic.deploy.runtime.chain import Chain
from polybasic.deploy.runtime.hardware import available_bytes
from polybasic.deploy.runtime.memory import MARGIN
from polybasic.deploy.runtime.rounds.sampling import Sampling

GGUF_TYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
LLAMA_DRAFTED, LLAMA_DRAFTED_BY_SMALL, LLAMA_LOOKUP, OPENVINO_DRAFTED, NGRAM = 8, 3, 2, 4, 2
"""Tokens that each drafts at a time, and most that prompt lookup looks for."""
_INT4 = "int4"
_OTHER_WEIGHTS = "Its weights have 4 bits: its answers are those of another model than the target."


@dataclass(frozen=True)
class Mode:
    """One way in which a peer answers.

    Attributes:
        words: of its worker's command line, after `-m`.
        files: folders or files of the models that it loads.
        weights: their dtype, where it is not the target's.
        samples: whether sampled tokens follow the target's distribution.
    """

    name: str
    description: str
    words: tuple[object, ...]
    files: tuple[Path, ...]
    weights: str = ""
    samples: bool = True

    @property
    def num_bytes(self) -> int:
        """Of its files."""
        inside = [entry for path in self.files for entry in (path, *path.rglob("*"))]
        return sum(entry.stat().st_size for entry in inside if entry.is_file())


@dataclass(frozen=True)
class PeerSystems:
    """Peers that run, and those that do not.

    Attributes:
        systems: loaded.
        missing: a sentence for each mode or peer that does not run, with its reason.
    """

    systems: list[System] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)


@contextmanager
def peer_systems(
    names: Sequence[str],
    chain: Chain,
    python: Path,
    say: Callable[[str], None],
    is_greedy: bool = True,
) -> Iterator[PeerSystems]:
    """All modes of some peers, loaded; they end with the block.

    Their files are written for this run alone, below the folder for temporary files. They compute
    on the CPU, with as many threads as torch has here. What does not run is said and left out.

    Args:
        names: of `PEERS`, which `check_peers` found installed.
        python: of their environment.
        say: takes a line of progress.
        is_greedy: whether nothing is sampled; otherwise modes that sample from another
            distribution are left out.
    """
    peers, python = PeerSystems(), python.absolute()

    def leave_out(what: str, why: str) -> None:
        peers.missing.append(f"{what} does not run: {why}.")
        say(peers.missing[-1])

    device = chain.engine.models.target.device
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="polybasic-peers-")))
        for name in names:
            runtime = PEERS[name].runtime
            if device.type != "cpu":
                leave_out(runtime, f"peers compute on the CPU, and this chain on {device.type}")
                continue
            say(f"{runtime}: converting the target and loading it")
            try:
                modes = _MODES[name](chain, python, folder)
            except UserError as error:
                leave_out(runtime, str(error))
                continue
            for mode in modes:
                if not (is_greedy or mode.samples):
                    leave_out(mode.name, "what it samples has another distribution than the target")
                    continue
                needed, left = MARGIN * mode.num_bytes, available_bytes(device)
                if left is not None and needed > left:
                    leave_out(
                        mode.name, f"it needs {needed:.2g} bytes of memory, {left:.2g} are left"
                    )
                    continue
                try:
                    peers.systems.append(_loaded(mode, runtime, chain, python, stack))
                except UserError as error:
                    leave_out(mode.name, str(error))
        yield peers


def _loaded(mode: Mode, runtime: str, chain: Chain, python: Path, stack: ExitStack) -> PeerSystem:
    """A system that has answered once.

    Raises:
        UserError: it cannot.
    """
    threads = torch.get_num_threads()
    shared = ("--threads", threads, "--context", chain.engine.context_tokens)
    worker, *words = mode.words
    command = (python, "-m", f"workers.{worker}", *shared, *words)
    system = PeerSystem(mode.name, runtime, mode.description, command, threads, chain.stop_tokens)
    stack.callback(system.close)
    if mode.weights:
        system.dtype, system.notes = mode.weights, (_OTHER_WEIGHTS,)
    system.answer([1, 2, 3], 4, Sampling())
    return system


def write_gguf(
    chain: Chain, kinds: Sequence[str], folder: Path, has_texts: bool = False
) -> dict[str, Path]:
    """The target as GGUF, a file of each kind ("BF16", "Q4_0") below `folder`.

    The kind of a target in blocks is a file with these, of one in 4 bits Q4_1, which has its codes.

    Args:
        has_texts: with the target's vocabulary; by default for token ids alone.

    Raises:
        UserError: llama.cpp computes the target otherwise.
    """
    from polybasic.chain.formats.gguf import writing

    files = {kind: folder.absolute() / f"{kind}.gguf" for kind in kinds}
    stop = () if has_texts else chain.stop_tokens
    for kind, path in files.items():
        matrices = None if weight_type(chain) in (kind, _INT4) else kind
        writing.write_gguf(chain.target_folder, path, matrices=matrices, stop=stop)
    return files


def _llama_modes(chain: Chain, python: Path, folder: Path) -> list[Mode]:
    """llama.cpp by its C interface."""
    from polybasic.chain.formats.gguf import writing

    dtype = weight_type(chain)
    if is_in_4_bits := dtype == _INT4:
        dtype = "Q4_1"
    is_in_few_bits = dtype in BLOCK_TYPES
    own = dtype if is_in_few_bits else GGUF_TYPES[dtype]
    files = write_gguf(chain, (own,) if is_in_few_bits else (own, "Q4_0"), folder)
    small = _smaller_model(chain)
    if small is not None:
        files[small] = folder.absolute() / "smaller.gguf"
        writing.write_gguf(chain.member_folders[small], files[small], stop=chain.stop_tokens)
    library = f"llama.cpp by its C interface with the target as GGUF in {dtype}"

    def mode(
        name: str, kind: str, says: str, *more: object, drafter: tuple[Path, ...] = ()
    ) -> Mode:
        words = ("llama_engine", files[kind], "--dtype", dtype, *more, *drafter)
        weights = "" if kind == own and not is_in_4_bits else kind
        return Mode(name, says, words, (files[kind], *drafter), weights)

    modes = [
        mode("llama.cpp", own, library),
        mode(
            "llama.cpp lookup", own,
            f"{library}; prompt lookup: {LLAMA_LOOKUP} tokens after at most {NGRAM} equal ones",
            *("--lookup", LLAMA_LOOKUP, "--ngram", NGRAM),
        ),
    ]  # fmt: skip
    if small is not None or not is_in_few_bits:  # a target in 4 or 8 bits drafts for no other
        drafter, says = (small, small) if small is not None else ("Q4_0", "the target in Q4_0")
        num_drafted = LLAMA_DRAFTED if small is None else LLAMA_DRAFTED_BY_SMALL
        modes.append(
            mode(
                "llama.cpp draft", own, f"{library}; {says} drafts {num_drafted} tokens",
                "--num-drafted", num_drafted, "--draft", drafter=(files[drafter],),
            )
        )  # fmt: skip
    if not is_in_few_bits:
        says = "llama.cpp by its C interface with the target as GGUF in Q4_0"
        modes.append(mode("llama.cpp Q4_0", "Q4_0", says))
    return modes


def _smaller_model(chain: Chain) -> str | None:
    """The last member that is a whole model of another shape than the target."""
    whole = [member.name for member in chain.manifest.members if member.kind in MODEL_KINDS]
    shapes = {name: read_config(chain.member_folders[name]).decoder for name in whole}
    smaller = [name for name in whole if shapes[name] != shapes[whole[0]]]
    return smaller[-1] if smaller else None


def _write_checkpoint(chain: Chain, member: str, folder: Path) -> None:
    """A member's weights as transformers reads them, with the target's tokenizer."""
    dtype, device = chain.engine.models.target.dtype, torch.device("cpu")
    with quiet_transformers():
        load_reference_model(chain.member_folders[member], dtype, device).save_pretrained(folder)
    load_tokenizer(chain.target_folder).save_pretrained(folder)


def _openvino_modes(chain: Chain, python: Path, folder: Path) -> list[Mode]:
    """OpenVINO GenAI's pipeline over optimum-intel's export."""
    dtype = weight_type(chain)
    if dtype in BLOCK_TYPES or dtype == _INT4:
        raise UserError("optimum-intel reads no such weights", dtype, "leave it out")

    def export(checkpoint: Path, exports: Path, *more: object) -> None:
        words = (python, "-m", "workers.write_openvino", checkpoint.absolute(), exports, *more)
        run_worker(words, torch.get_num_threads())

    export(chain.target_folder, folder)
    own, packed = folder / "exported", folder / "int4"
    drafter, says = packed, "the target in int4"
    if (small := _smaller_model(chain)) is not None:
        checkpoint, exports = folder / "checkpoint", folder / "smaller"
        _write_checkpoint(chain, small, checkpoint)
        export(checkpoint, exports, "--group-size", 32)  # as Q4_0 has it
        drafter, says = exports / "int4", f"{small} in int4 by groups of 32"
    pipeline = "LLMPipeline with the target as optimum-intel exports it"

    def mode(
        name: str, path: Path, says: str, *more: object, drafter: tuple[Path, ...] = ()
    ) -> Mode:
        precision = "bf16" if dtype == "bfloat16" else "f32"
        words = ("openvino_pipeline", path, "--precision", precision, *more, *drafter)
        weights = "" if path == own else "int4"
        # at a temperature of 0.001 its answers with a draft model are not the greedy ones
        return Mode(name, says, words, (path, *drafter), weights, samples=not drafter)

    return [
        mode("OpenVINO", own, pipeline),
        mode(
            "OpenVINO lookup", own,
            f"{pipeline}; prompt lookup: {OPENVINO_DRAFTED} tokens after at most {NGRAM} equal "
            "ones",
            *("--lookup", OPENVINO_DRAFTED, "--ngram", NGRAM),
        ),
        mode(
            "OpenVINO assisted", own,
            f"{pipeline}; {says} drafts {OPENVINO_DRAFTED} tokens",
            *("--num-drafted", OPENVINO_DRAFTED, "--draft"), drafter=(drafter,),
        ),
        mode("OpenVINO int4", packed, f"{pipeline}, in int4 by groups of 128"),
    ]  # fmt: skip


_MODES: dict[str, Callable[[Chain, Path, Path], list[Mode]]] = {
    "llama.cpp": _llama_modes,
    "openvino": _openvino_modes,
}
