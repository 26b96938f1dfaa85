"""In what two reports differ beside their numbers: chain, machine, versions, settings, systems."""

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict

from polybasic.chain.base.readable import readable_bytes
from polybasic.deploy.bench.schema import Report

DIGITS = 12
"""Of a digest, as it is shown."""
_OTHER_MACHINE = ("device", "accelerator", "processor", "instruction_set", "cores", "threads")
_OTHER_ANSWERS = ("max_new_tokens", "temperature", "seed", "dtype")


class Difference(BaseModel):
    """What two reports do not have in common; None where one does not say it.

    Attributes:
        part: "chain", "machine", "setting", "version" or "system".
        name: of what differs, within the part.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    part: str
    name: str
    before: str | None
    after: str | None


def differences(before: Report, after: Report) -> list[Difference]:
    """All of them, by part. Systems that one of the reports lacks are not among them."""
    differing = []
    parts = [_facts(report) for report in (before, after)]
    for part in parts[0]:
        earlier, later = (side[part] for side in parts)
        if part == "system":
            common = before.systems.keys() & after.systems.keys()
            earlier, later = (
                {name: value for name, value in side.items() if name.split(":")[0] in common}
                for side in (earlier, later)
            )
        for name in dict.fromkeys([*earlier, *later]):
            if earlier.get(name) != later.get(name):
                values = {"before": earlier.get(name), "after": later.get(name)}
                differing.append(Difference(part=part, name=name, **values))
    return differing


def notes(before: Report, after: Report, found: list[Difference]) -> list[str]:
    """What a reader must know before the numbers, a sentence each."""
    differing = {(difference.part, difference.name) for difference in found}
    said = []
    if any(("machine", name) in differing for name in _OTHER_MACHINE):
        said.append(
            "The machines differ: compare speedups, whose two sides were measured on one machine."
        )
    if names := [name for name in _OTHER_ANSWERS if ("setting", name) in differing]:
        said.append(f"Answers are other ones, as they were asked for with another {_and(names)}.")
    for title, report in (("before", before), ("after", after)):
        if not report.complete:
            said.append(
                f"The benchmark {title} was interrupted: {report.answered} of {report.planned} "
                "turns are in its report."
            )
        if report.grown:
            said.append(
                f"The chain {title} is a small one grown to the costs of {report.grown}: its "
                "speed means something, its text does not."
            )
    noisy = [
        title for title, report in (("before", before), ("after", after)) if report.noise.warnings
    ]
    if noisy:
        spread = max(report.noise.spread for report in (before, after))
        said.append(
            f"Noise of the machine is warned of {_and(noisy)}: changes of speed by less than "
            f"{100 * spread:.0f} %, as its repeats differ, are taken for that."
        )
    return said


def named(report: Report) -> str:
    """Which report it is, in a line."""
    return f"{report.chain}, {report.made[:16].replace('T', ' ')} UTC, {report.command}"


def _facts(report: Report) -> dict[str, dict[str, str]]:
    settings = {
        name: value
        for name, value in _flat(report.settings)
        # systems are compared by name; the digest tells prompts apart, however they are named
        if name.split(".")[0] not in ("systems", "prompts")
    }
    systems: dict[str, str] = {}
    for name, system in report.systems.items():
        told = {"plan": system.shown_plan, "dtype": system.dtype, "version": system.version}
        systems |= {f"{name}: {key}": value for key, value in told.items() if value is not None}
    return {
        "chain": {
            "name": report.chain,
            "files": report.chain_digest[:DIGITS],
            **({"grown to": report.grown} if report.grown else {}),
        },
        "machine": dict(_flat(report.hardware)),
        "version": report.versions,
        "setting": settings,
        "system": systems,
    }


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from _flat(value, f"{name}.")
        elif isinstance(value, list | tuple):
            yield name, ", ".join(map(str, value))
        elif name.endswith("_bytes"):
            yield name.removesuffix("_bytes"), readable_bytes(value)
        elif value is not None:
            yield name, str(value)[:DIGITS] if name.endswith("sha256") else str(value)


def _and(names: list[str]) -> str:
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))
