"""Reruns passes, rounds and end to end, and prints what changed against this hardware's record.

    python benchmarks/bench.py CHAIN [--update] [--strict] [--turns 5] [--records FOLDER]

`make bench` runs it on the chain of recipes/smollm2-135m.yaml: one benchmark after the other in one
process, and the bandwidth of memory before, between and after them. A record belongs to a device,
processor, number of cores and of threads; the first run on hardware that has none writes one: the
figures as JSON, and what is printed beside it as Markdown. Systems run the plans of the record, so
that the same work is compared.

What slower and faster mean is said in benchmarks/comparison.py. With `--strict` the exit code is 1
where something is slower; without it 0, since a shared machine may have its reasons. `--update`
writes the record anew, with the plans that the chain has now.
"""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from answering import Here
from command import ScriptReport, head_of, load, options, positive, run, shown_head
from comparison import ComparedFigure, compare, report_changes
from end_to_end import HERE, Times, measure_end_to_end, report_end_to_end, shown_plans, speedup
from measuring import all_of, measure_bandwidth
from passes import (
    Cost,
    PassSettings,
    draft_cases,
    pass_cases,
    report_drafts,
    report_passes,
    room_for,
)
from rounds import Breakdown, measure_rounds, report_rounds
from systems import read_prompts, system_plans

from polybasic.chain.base.errors import UserError
from polybasic.chain.formats.files import read_json, sha256_of_object, whole_file
from polybasic.chain.formats.plan import Plan
from polybasic.deploy import Chain

RECORDS = Path(__file__).resolve().parent / "records"
SCHEMA = "polybasic.benchmark.bench/2"
HARDWARE_KEYS = ("device", "accelerator", "processor", "cores", "threads")
"""What makes hardware the same hardware."""
SHAPES = ("2x4", "7x4", "10x2", "10x4")


def record_of(records: Path, hardware: Mapping[str, Any]) -> tuple[Path, dict[str, Any] | None]:
    """The record of this hardware and its content; where there is none, a name for it and None."""
    for path in sorted(records.glob("*.json")):
        content = read_json(path, "benchmark record")
        if content.get("schema") == SCHEMA and _is_same(content["hardware"], hardware):
            return path, content
    name = str(hardware.get("accelerator") or hardware["processor"])
    slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    stem = f"{hardware['device']}-{hardware['cores']}-cores"
    names = [stem, f"{stem}-{slug}", f"{stem}-{slug}-{hardware['threads']}-threads"]
    paths = [records / f"{name}-bench.json" for name in names]
    return next((path for path in paths if not path.exists()), paths[-1]), None


def _is_same(record: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return all(record.get(key) == other.get(key) for key in HARDWARE_KEYS)


def measure(
    chain: Chain, plans: Mapping[str, Plan], settings: Mapping[str, Any], report: ScriptReport
) -> dict[str, Any]:
    """All benchmarks, reported one by one; the content of a record after its head."""
    device, turns = chain.engine.models.target.device, settings["turns"]
    tokens = settings["max_new_tokens"]
    measured = [measure_bandwidth(device)]
    report.say(measured[0].shown())
    shapes, repeats = tuple(settings["shapes"]), settings["repeats"]
    rows, contexts = tuple(settings["rows"]), (settings["context"],)
    pass_settings = PassSettings(contexts, rows, shapes, repeats, turns)
    passes = all_of(pass_cases(chain, pass_settings, measured[0]))
    report_passes(report, passes)
    drafts = all_of(draft_cases(chain, pass_settings, measured[0]))
    report_drafts(report, drafts)
    measured.append(measure_bandwidth(device))
    prompts = read_prompts(chain, None, settings["num_prompts_per_task"], tokens)
    rounds = measure_rounds(chain, plans, prompts, tokens, turns)
    report_rounds(report, rounds, chain, max(measured, key=lambda bandwidth: bandwidth.bound))
    measured.append(measure_bandwidth(device))
    answering = {HERE: dict.fromkeys(plans, Here(chain))}
    times = measure_end_to_end(answering, plans, prompts, tokens, turns)
    report_end_to_end(report, times, shown_plans(plans, chain))
    measured.append(measure_bandwidth(device))
    figures = figures_of(passes, drafts, rounds, times)
    return {
        "settings": dict(settings),
        "chain": identity(chain),
        "read_bytes_per_second": median(bandwidth.read.median for bandwidth in measured),
        "plans": {name: plan.model_dump(mode="json") for name, plan in plans.items()},
        "figures": {name: figure.to_json() for name, figure in figures.items()},
    }


def figures_of(
    passes: Sequence[Cost], drafts: Sequence[Cost], rounds: Mapping[str, Breakdown], times: Times
) -> dict[str, ComparedFigure]:
    """All that is compared, by name."""
    found, alone = {}, times[HERE]["target"].per_token
    for cost in passes:
        found[f"pass {cost.member}, {cost.what}"] = ComparedFigure.of(cost.seconds.times(1e3))
    for cost in drafts:
        found[f"draft {cost.member}, {cost.what}"] = ComparedFigure.of(cost.seconds.times(1e3))
    for system, breakdown in rounds.items():
        for operation in breakdown.operations():
            found[f"round {system}, {operation}"] = ComparedFigure.of(
                breakdown.per_round(operation)
            )
    for system, answers in times[HERE].items():
        found[f"token {system}"] = ComparedFigure.of(answers.per_token)
        if system != "target":
            found[f"speedup {system}"] = ComparedFigure.of(speedup(alone, answers.per_token))
        lengths = answers.tokens_per_target_pass
        found[f"tokens a pass {system}"] = ComparedFigure(lengths, (lengths,))
    return found


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
    then = record["settings"]
    for key, value in settings.items():
        if key not in ("turns", "repeats") and then.get(key) != value:
            raise UserError(
                "record of other settings",
                f"{path}: {key} {then.get(key)}, now {value}",
                "measure as it was, or write it anew with --update",
            )
    sizes, known = identity(chain)["parameters"], record["chain"]["parameters"]
    if sizes != known:
        raise UserError(
            "record of another chain",
            f"{path}: parameters {known}, now {sizes}",
            "name the chain of recipes/smollm2-135m.yaml, or write the record anew with --update",
        )


def compare_with(
    record: Mapping[str, Any], name: str, content: Mapping[str, Any], report: ScriptReport
) -> int:
    """Report what changed; the number of figures that are slower.

    Args:
        record: of the name.
        content: of this run, its head included.
    """
    has_same_weights = record["chain"]["weights_sha256"] == content["chain"]["weights_sha256"]
    then, now = (
        {name: ComparedFigure.from_json(figure) for name, figure in side["figures"].items()}
        for side in (record, content)
    )
    speed = content["read_bytes_per_second"] / record["read_bytes_per_second"]
    changes = compare(then, now, speed, has_same_weights)
    report_changes(report, changes)
    if not has_same_weights:
        report.say("The record's chain has other weights: what depends on answers is not judged.")
    if record["kernels"] != content["kernels"]:
        report.say(f"Kernels then: {record['kernels']}; now: {content['kernels']}.")
    verdicts = [change.verdict for change in changes]
    slower, faster = verdicts.count("slower"), verdicts.count("faster")
    report.say(
        f"{len(changes)} figures against {name} (commit {record['commit'] or 'unknown'}): "
        f"{slower} slower, {faster} faster; memory is read {speed:.2f} times as fast as then."
    )
    return slower


def write_record(path: Path, content: Mapping[str, Any], report: ScriptReport) -> None:
    """Write the figures, one a line, and what was printed beside them, both whole."""
    figures = (f"{json.dumps(name)}: {figure}" for name, figure in content["figures"].items())
    lines = [
        f"{json.dumps(key)}: {json.dumps(value)}"
        for key, value in content.items()
        if key != "figures"
    ]
    lines.append('"figures": {\n' + ",\n".join(figures) + "\n}")
    with whole_file(path) as partial:
        partial.write_text("{\n" + ",\n".join(lines) + "\n}\n", "utf-8")
    report.write(path.with_suffix(".md"))


def main() -> int:
    parser = options(
        __doc__, "chain", "--device", "--dtype", "--repeats", "--turns", "--max-new-tokens",
        "--num-prompts-per-task",
    )  # fmt: skip
    parser.add_argument("--update", action="store_true", help="write the record anew")
    parser.add_argument("--strict", action="store_true", help="exit code 1 if something is slower")
    parser.add_argument("--records", type=Path, default=RECORDS, help="the folder of records")
    parser.add_argument("--context", type=positive, default=256)
    parser.add_argument("--rows", type=positive, nargs="+", default=(1, 2, 4, 8, 16, 24))
    parser.add_argument("--shapes", nargs="+", default=SHAPES, metavar="DEPTHxTOP_K")
    arguments = parser.parse_args()
    names = ("context", "rows", "shapes", "repeats", "turns", "num_prompts_per_task")
    settings = {name: getattr(arguments, name) for name in (*names, "max_new_tokens", "dtype")}
    settings |= {name: list(settings[name]) for name in ("rows", "shapes")}
    chain = load(arguments, room_for([arguments.context]))
    head = head_of(__file__, arguments, chain.engine.models.target.device)
    report = ScriptReport()
    report.say(shown_head("make bench", head))
    path, record = record_of(arguments.records, head["hardware"])
    if record is not None and not arguments.update:
        check_comparable(record, path, settings, chain)
        plans = {name: Plan.model_validate(plan) for name, plan in record["plans"].items()}
    else:
        plans = system_plans(chain)
    content = {"schema": SCHEMA, **head, **measure(chain, plans, settings, report)}
    if record is not None and not arguments.update:
        num_slower = compare_with(record, path.name, content, report)
        report.write(arguments.record)
        return 1 if num_slower and arguments.strict else 0
    write_record(path, content, report)
    if record is None:
        print(f"no record of this hardware was there: {path.name} is the first")
    return 0


if __name__ == "__main__":
    run(main)
