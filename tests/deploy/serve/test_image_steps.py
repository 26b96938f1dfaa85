"""What images are built from is pinned; the steps of the CPU image make a server that answers."""

import json
import os
import re
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest
import torch

from tests.deploy.serve.images import IMAGES, PORT, ROOT, compose, of, run, steps


@pytest.mark.parametrize("name", ["cpu", "cuda"])
def test_what_an_image_is_built_from_is_pinned_or_named_by_the_operator(name: str) -> None:
    dockerfile, build = f"Dockerfile.{name}", compose()["services"][name]["build"]
    arguments = dict(f"{argument}=".split("=")[:2] for argument in of(dockerfile, "ARG"))
    assert of(dockerfile, "FROM") == ["${BUILD_IMAGE} AS build", "${BASE_IMAGE}"]
    # no host of a registry, and no digest that nobody here could look up
    images = [arguments.pop(each) for each in ("BUILD_IMAGE", "BASE_IMAGE")]
    assert all(re.fullmatch(r"python:3\.11(-slim)?", image) for image in images)
    assert set(arguments.values()) == {""}
    assert set(build["args"]) == {*arguments, "BUILD_IMAGE", "BASE_IMAGE"}
    installed = [line for line in of(dockerfile, "RUN") if "pip install" in line]
    assert installed
    for line in installed:
        for command in re.findall(r"pip install ([^&;]+)", line):
            assert "--no-deps" in command
            has_digests = "--require-hashes --requirement requirements.lock" in command
            is_ours = command.split()[-1] in (".", '"$wheel"')
            assert has_digests or is_ours or '--index-url "$TORCH_INDEX_URL" "$torch"' in command
    for service in ("prometheus", "grafana"):
        image = compose()["services"][service]["image"]
        assert re.fullmatch(rf"\$\{{{service.upper()}_IMAGE:-\w+/\w+:[\w.]+\}}", image)


def test_an_image_installs_what_is_locked_and_nothing_of_trainings() -> None:
    def blocks(path: Path) -> dict[str, str]:
        found = re.split(r"\n(?=\w)", path.read_text("utf-8").strip())
        return {block.partition("==")[0]: block for block in found}

    locked, installed = blocks(ROOT / "requirements.lock"), blocks(IMAGES / "requirements.lock")
    assert installed.items() < locked.items()
    assert {"torch", "transformers", "fastapi", "uvicorn", "setuptools"} <= installed.keys()
    of_trainings = {"datasets", "deepspeed", "wandb"}
    assert of_trainings < locked.keys()
    assert not of_trainings & installed.keys()


class Shell:
    """Runs the steps of a Dockerfile as they stand, with its folders below another root."""

    def __init__(self, root: Path, given: dict[str, str]) -> None:
        self.root, self.given = root, given
        # what an image of Python brings
        base = root / "usr" / "bin"
        base.mkdir(parents=True)
        (base / "python3").symlink_to(
            sys.executable
            if sys.prefix == sys.base_prefix
            else Path(sys.base_prefix, "bin", "python3")
        )
        kept = {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
        self.environment = {
            **kept,
            "PATH": f"{base}:{os.environ['PATH']}",
            "HOME": os.environ["HOME"],
            "PIP_NO_COMPILE": "1",  # of whole packages, of which the test imports a part
            # the compiler's environment, which a checkout has once it has made a wheel
            "WHEELS_VENV": str(ROOT / ".venv-wheels"),
        }
        self.place = root

    def below(self, text: str) -> str:
        """With the folders that the image makes below the root."""
        return re.sub(r"(?<![\w./])/(?=(?:opt|source|cache|tmp)\b)", f"{self.root}/", text)

    def step(self, name: str, argument: str) -> None:
        """Run one instruction."""
        if name == "ARG" and argument in self.given:
            self.environment[argument] = self.given[argument]
        elif name == "ENV":
            for pair in argument.split():
                variable, value = pair.split("=", 1)
                self.environment[variable] = self.below(value).replace("$PATH", "/usr/bin:/bin")
        elif name == "WORKDIR":
            self.place = Path(self.below(argument))
            self.place.mkdir(parents=True, exist_ok=True)
        elif name == "COPY":
            self.copy(argument.split())
        elif name == "RUN":
            done = run("/bin/sh", "-c", self.below(argument), cwd=self.place, env=self.environment)
            assert done.returncode == 0, f"{argument}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"

    def copy(self, arguments: list[str]) -> None:
        """From the repository, what .dockerignore leaves; from a stage, what lies there already."""
        *sources, target = [each for each in arguments if not each.startswith("--")]
        if "--from=build" in arguments:
            assert sources == [target]
            assert Path(self.below(target)).is_dir()
            return
        context = [
            line.removeprefix("!")
            for line in (ROOT / ".dockerignore").read_text().splitlines()
            if line.startswith("!")
        ]
        ignored = shutil.ignore_patterns("__pycache__", ".*")
        for name in context if sources == ["."] else sources:
            assert any(Path(name).is_relative_to(each) for each in context)
            to = self.place / (name if sources == ["."] else Path(name).name)
            to.parent.mkdir(parents=True, exist_ok=True)
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, to, ignore=ignored)
            else:
                shutil.copy(ROOT / name, to)


def is_for_cpus() -> bool:
    """Whether torch here is such a build, which PyPI does not have."""
    return torch.__version__.endswith("+cpu")


def index_with(folder: Path, version: str) -> str:
    """The URL of an index of packages that has torch alone."""
    wheels = folder / "torch"
    command = f"-m pip download --quiet --no-deps --dest {wheels} torch=={version}"
    done = run(sys.executable, *command.split())
    assert done.returncode == 0, done.stderr
    links = (f"<a href={quote(path.name)}>{path.name}</a>" for path in list(wheels.iterdir()))
    (wheels / "index.html").write_text("<!DOCTYPE html>" + "".join(links))
    return folder.as_uri()


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Shell:
    """What the steps of the CPU image make, with the kernels that every processor has."""
    given = {"POLYBASIC_ISA": "portable"}
    if is_for_cpus():
        given["TORCH_INDEX_URL"] = index_with(tmp_path_factory.mktemp("index"), torch.__version__)
    shell = Shell(tmp_path_factory.mktemp("image"), given)
    for name, argument in steps("Dockerfile.cpu"):
        shell.step(name, argument)
    return shell


@pytest.fixture(scope="module")
def container(
    image: Shell, byte_chain: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[int]:
    """The port at which the image's entry point serves a chain, with no compiler at hand."""
    [entry] = of("Dockerfile.cpu", "ENTRYPOINT")
    command = [str(byte_chain) if part == "/chain" else part for part in json.loads(entry)]
    environment = image.environment | {"PATH": str(image.root / "opt" / "polybasic" / "bin")}
    log = tmp_path_factory.mktemp("log") / "stderr"
    with log.open("w") as errors:
        process = subprocess.Popen(
            [image.root / "opt/polybasic/bin/polybasic", *command[1:], "--port", "0"],
            cwd=image.place,
            env=environment,
            stderr=errors,
        )
        try:
            while not (found := re.search(r"listening at http://[\d.]+:(\d+)", log.read_text())):
                assert process.poll() is None, log.read_text()
            yield int(found[1])
        finally:
            process.terminate()
            assert process.wait(60) == 0, log.read_text()


@pytest.mark.proof
def test_versions_are_those_that_were_tested(image: Shell) -> None:
    frozen = run(str(image.root / "opt/polybasic/bin/pip"), "freeze", env=image.environment).stdout
    installed = {line for line in frozen.splitlines() if not line.startswith("polybasic @")}
    pinned = set((ROOT / "constraints.txt").read_text().splitlines())
    assert {line.split("+")[0] for line in installed} - pinned == set()
    assert {"torch==2.13.0", "uvicorn==0.54.0"} <= {line.split("+")[0] for line in installed}
    if is_for_cpus():
        assert f"torch=={torch.__version__}" in installed
        assert not [line for line in installed if line.startswith(("nvidia", "cuda", "triton"))]


@pytest.mark.proof
def test_the_image_answers_and_is_healthy(image: Shell, container: int) -> None:
    asked = {"prompt": "what is it", "max_tokens": 4, "ignore_eos": True}
    request = urllib.request.Request(
        f"http://127.0.0.1:{container}/v1/completions",
        json.dumps(asked).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request) as response:
        assert json.load(response)["usage"]["completion_tokens"] == 4
    [check] = of("Dockerfile.cpu", "HEALTHCHECK")
    command = json.loads(check[check.index("[") :].replace(f":{PORT}/", f":{container}/"))
    python = str(image.root / "opt/polybasic/bin/python3")
    assert run(python, *command[1:]).returncode == 0
    elsewhere = [part.replace("/health", "/nowhere") for part in command[1:]]
    assert run(python, *elsewhere).returncode != 0
    doctor = run(str(image.root / "opt/polybasic/bin/polybasic"), "doctor", env=image.environment)
    assert "portable" in doctor.stdout
