"""Reruns the benchmarks of the CPU, and prints what changed against this hardware's record.

    python benchmarks/bench.py CHAIN [--update] [--strict] [--turns 5] [--records FOLDER]

`make bench` runs it on the chain of recipes/cpu-100m.yaml: passes, rounds and end to end, one after
the other in one process, and the bandwidth of memory before, between and behind them. A record
belongs to a device, processor, number of cores and of threads; the first run on hardware that has
none writes one. Systems run the plans of the record, so that the same work is compared.

What slower and faster mean is said in benchmarks/comparison.py. With `--strict` the exit code is 1
where something is slower; without it 0, since a shared machine may have its reasons. `--update`
writes the record anew, with the plans that the chain has now.
"""

import argparse
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from answering import Here
from comparison import compare, table_of
from end_to_end import HERE, EndToEndSettings, measure_end_to_end, print_end_to_end
from end_to_end import to_json as end_to_end_json
from passes import PassSettings, load_for, measure_passes, print_passes
from record import console, header, print_header, write_record
from rounds import RoundSettings, measure_rounds, print_rounds
from systems import read_prompts, system_plans
from timing import Bandwidth, measure_bandwidth

from polybasic.chain.errors import UserError
from polybasic.chain.formats.files import read_json, sha256_of_object
from polybasic.chain.formats.plan import Plan
from polybasic.deploy import Chain

RECORDS = Path(__file__).resolve().parent / "records"
SCRIPT = "bench"
HARDWARE_KEYS = ("device", "accelerator", "processor", "cores", "threads")
"""What makes hardware the same hardware."""
SHAPES = ("2x4", "7x4", "10x2", "10x4")
NUM_PROMPTS_PER_TASK = 1


def record_of(records: Path, hardware: Mapping[str, Any]) -> tuple[Path, dict[str, Any] | None]:
    """The record of this hardware and its content; where there is none, a name for it and None."""
    schema = f"polybasic.benchmark.{SCRIPT}/1"
    for path in sorted(records.glob("*.json")):
        content = read_json(path, "benchmark record")
        if content.get("schema") == schema and _is_same(content["hardware"], hardware):
            return path, content
    slug = re.sub(r"[^a-z0-9]+", "-", str(_processor(hardware)).lower()).strip("-")
    stem = f"{hardware['device']}-{hardware['cores']}-cores"
    names = [stem, f"{stem}-{slug}", f"{stem}-{slug}-{hardware['threads']}-threads"]
    paths = [records / f"{name}-{SCRIPT}.json" for name in names]
    return next((path for path in paths if not path.exists()), paths[-1]), None


def _is_same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return all(one.get(key) == other.get(key) for key in HARDWARE_KEYS)


def _processor(hardware: Mapping[str, Any]) -> Any:
    return hardware.get("accelerator") or hardware["processor"]


def measure(chain: Chain, plans: Mapping[str, Plan], settings: Mapping[str, Any]) -> dict[str, Any]:
    """All benchmarks, printed one by one; the content of a record behind its head."""
    device = chain.engine.models.target.device
    measured = [measure_bandwidth(device)]
    print(f"{measured[0].shown()}\n")
    pass_settings = PassSettings(
        context=settings["context"],
        rows=tuple(settings["rows"]),
        shapes=tuple(settings["shapes"]),
        repeats=settings["repeats"],
        turns=settings["turns"],
    )
    passes = measure_passes(chain, pass_settings, measured[0])
    print_passes(passes)
    measured.append(measure_bandwidth(device))
    tokens = settings["max_new_tokens"]
    prompts = read_prompts(chain, None, settings["num_prompts_per_task"], tokens)
    round_settings = RoundSettings(max_new_tokens=tokens, turns=settings["turns"])
    rounds = measure_rounds(chain, plans, prompts, round_settings, Bandwidth.joined(measured))
    print_rounds(rounds, chain)
    measured.append(measure_bandwidth(device))
    times = measure_end_to_end(
        {HERE: Here(chain)}, plans, prompts, EndToEndSettings(tokens, settings["turns"])
    )
    print_end_to_end(times, plans, chain)
    measured.append(measure_bandwidth(device))
    return {
        "settings": dict(settings),
        "chain": identity(chain),
        "bandwidth": Bandwidth.joined(measured).to_json(),
        **passes.to_json(),
        "rounds": rounds.to_json(),
        "end_to_end": end_to_end_json(times, plans),
    }


def identity(chain: Chain) -> dict[str, Any]:
    """What tells chains apart: the recipe's name, shape, and a digest of all members' weights."""
    manifest = chain.manifest
    files = {member.name: member.files for member in manifest.members}
    return {
        "recipe": manifest.provenance.recipe.get("name"),
        "grown": manifest.grown,
        "parameters": {member.name: member.num_parameters for member in manifest.members},
        "weights_sha256": sha256_of_object(files),
    }


def check_comparable(
    record: Mapping[str, Any], path: Path, settings: Mapping[str, Any], chain: Chain
) -> None:
    """Refuse a record of other settings, or of models of other sizes.

    Raises:
        UserError: it is one.
    """
    then, now = record["settings"], dict(settings)
    for key in now:
        if key not in ("turns", "repeats") and then.get(key) != now[key]:
            raise UserError(
                "record of other settings",
                f"{path}: {key} {then.get(key)}, now {now[key]}",
                "measure as it was, or write it anew with --update",
            )
    sizes, known = identity(chain)["parameters"], record["chain"]["parameters"]
    if sizes != known:
        raise UserError(
            "record of another chain",
            f"{path}: parameters {known}, now {sizes}",
            "name the chain of recipes/cpu-100m.yaml, or write the record anew with --update",
        )


def plans_of(record: Mapping[str, Any] | None, chain: Chain) -> dict[str, Plan]:
    """Systems and their plans: the record's, else the chain's own."""
    if record is None:
        return system_plans(chain)
    plans = record["end_to_end"]["plans"]
    return {name: Plan.model_validate(plan) for name, plan in plans.items()}


def report(record: Mapping[str, Any], path: Path, content: Mapping[str, Any]) -> int:
    """Print what changed; the number of figures that are slower.

    Args:
        record: read from `path`.
        content: of this run, its head included.
    """
    has_same_weights = record["chain"]["weights_sha256"] == content["chain"]["weights_sha256"]
    changes = compare(record, content, has_same_weights)
    console().print(table_of(changes))
    if not has_same_weights:
        print("the record's chain has other weights: what depends on answers is shown, not judged")
    if record["kernels"] != content["kernels"]:
        print(f"kernels then: {record['kernels']}; now: {content['kernels']}")
    by_verdict = {
        verdict: [change for change in changes if change.verdict == verdict]
        for verdict in ("slower", "faster")
    }
    speed = content["bandwidth"]["read"]["median"] / record["bandwidth"]["read"]["median"]
    counts = ", ".join(f"{len(found)} {verdict}" for verdict, found in by_verdict.items())
    print(
        f"{len(changes)} figures against {path.name} (commit {record['commit'] or 'unknown'}): "
        f"{counts}; memory is read {speed:.2f} times as fast as then"
    )
    return len(by_verdict["slower"])


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("chain", type=Path)
    parser.add_argument("--update", action="store_true", help="write the record anew")
    parser.add_argument("--strict", action="store_true", help="exit code 1 if something is slower")
    parser.add_argument("--records", type=Path, default=RECORDS, help="the folder of records")
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--rows", type=int, nargs="+", default=(1, 2, 4, 8, 16, 24))
    parser.add_argument("--shapes", nargs="+", default=SHAPES, metavar="DEPTHxTOP_K")
    parser.add_argument("--repeats", type=int, default=12, help="calls of a pass in a turn")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--num-prompts-per-task", type=int, default=NUM_PROMPTS_PER_TASK)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--dtype", default="bfloat16")
    return parser.parse_args(arguments)


def main() -> int:
    arguments = parsed()
    names = ("context", "rows", "shapes", "repeats", "turns", "num_prompts_per_task")
    settings = {name: getattr(arguments, name) for name in (*names, "max_new_tokens", "dtype")}
    settings |= {name: list(settings[name]) for name in ("rows", "shapes")}
    chain = load_for(arguments.chain, arguments.dtype, None, arguments.context)
    device = chain.engine.models.target.device
    head = header(SCRIPT, device, {arguments.chain: "CHAIN", arguments.records: "RECORDS"})
    print_header(head)
    path, record = record_of(arguments.records, head["hardware"])
    if record is not None and not arguments.update:
        check_comparable(record, path, settings, chain)
    plans = plans_of(None if arguments.update else record, chain)
    content = measure(chain, plans, settings)
    if record is not None and not arguments.update:
        num_slower = report(record, path, {**head, **content})
        return 1 if num_slower and arguments.strict else 0
    write_record(path, head, content)
    if record is None:
        print(f"no record of this hardware was there: {path.name} is the first")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
