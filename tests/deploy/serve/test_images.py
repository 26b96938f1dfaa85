"""Files to deploy a server with: what they run works, and they agree with the server."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from fastapi import FastAPI
from fastapi.testclient import TestClient
from prometheus_client.parser import text_string_to_metric_families

from polybasic.deploy import Chain
from polybasic.deploy.serve.app import create_app
from polybasic.deploy.serve.settings import ServeSettings

ROOT = Path(__file__).resolve().parents[3]
IMAGES = ROOT / "deploy" / "images"
PORT = 8000
USER = 10001
SHUTDOWN_SECONDS = 30
"""What `polybasic serve` gives answers in flight by default."""


def text_of(name: str) -> str:
    return (IMAGES / name).read_text()


def steps(dockerfile: str) -> list[tuple[str, str]]:
    """Instructions and their arguments, continued lines joined and comments left out."""
    lines = [line for line in text_of(dockerfile).splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [tuple(line.split(maxsplit=1)) for line in joined.splitlines() if line]  # type: ignore[misc]


def of(dockerfile: str, instruction: str) -> list[str]:
    return [argument for name, argument in steps(dockerfile) if name == instruction]


def kubernetes(kind: str) -> dict[str, Any]:
    [found] = [
        each for each in yaml.safe_load_all(text_of("kubernetes.yaml")) if each["kind"] == kind
    ]
    return found


def compose() -> dict[str, Any]:
    return yaml.safe_load(text_of("compose.yaml"))


def unit() -> dict[str, str]:
    """Settings of the systemd unit; of one that is given twice, the last."""
    joined = text_of("polybasic.service").replace("\\\n", " ")
    return dict(line.split("=", 1) for line in joined.splitlines() if re.match(r"\w+=", line))


@pytest.fixture(scope="module")
def app(chain: Chain) -> FastAPI:
    return create_app(chain, ServeSettings(model_names=("tiny",), sequences=4))


def paths(app: FastAPI) -> set[str]:
    return {getattr(route, "path", "") for route in app.routes}


# What is run with which flags


def commands() -> dict[str, list[str]]:
    """Where `polybasic serve` is run, and with which arguments."""
    cpu, cuda = (
        json.loads(of(name, "ENTRYPOINT")[0]) for name in ("Dockerfile.cpu", "Dockerfile.cuda")
    )
    services = compose()["services"]
    [container] = kubernetes("Deployment")["spec"]["template"]["spec"]["containers"]
    return {
        "compose cpu": [*cpu, *services["cpu"]["command"]],
        "compose cuda": [*cuda, *services["cuda"]["command"]],
        "kubernetes": [*cpu, *container["args"]],
        "systemd": shlex.split(unit()["ExecStart"]),
    }


@pytest.mark.parametrize("where", sorted(commands()))
def test_flags_exist_and_values_fit(where: str) -> None:
    import typer.main

    from polybasic.recipes.cli.main import app as command_line

    program, name, *arguments = commands()[where]
    assert (Path(program).name, name) == ("polybasic", "serve")
    serve = typer.main.get_command(command_line).commands["serve"]  # type: ignore[attr-defined]
    given = [re.sub(r"\$\{\w+:-(\w+)\}", r"\1", argument) for argument in arguments]
    parsed = serve.make_context("serve", given, resilient_parsing=False).params
    assert parsed["port"] == PORT
    with pytest.raises(Exception, match="No such option"):
        serve.make_context("serve", [*given, "--no-such-flag"])


def test_ports_agree() -> None:
    for name in ("Dockerfile.cpu", "Dockerfile.cuda"):
        assert of(name, "EXPOSE") == [str(PORT)]
        assert f":{PORT}/health" in of(name, "HEALTHCHECK")[0]
    for service in (compose()["services"][name] for name in ("cpu", "cuda")):
        assert [published.rsplit(":", 1)[1] for published in service["ports"]] == [str(PORT)]
    [container] = kubernetes("Deployment")["spec"]["template"]["spec"]["containers"]
    assert container["ports"] == [{"name": "http", "containerPort": PORT}]
    [port] = kubernetes("Service")["spec"]["ports"]
    assert port["targetPort"] == container["ports"][0]["name"]
    [[target]] = [each["targets"] for each in scraped()["static_configs"]]
    alias, port = target.split(":")
    assert port == str(PORT)
    for service in (compose()["services"][name] for name in ("cpu", "cuda")):
        assert alias in service["networks"]["default"]["aliases"]


def scraped() -> dict[str, Any]:
    [job] = yaml.safe_load(text_of("prometheus.yml"))["scrape_configs"]
    return job


def test_what_is_probed_and_scraped_exists(app: FastAPI) -> None:
    [container] = kubernetes("Deployment")["spec"]["template"]["spec"]["containers"]
    probes = [container[f"{name}Probe"]["httpGet"] for name in ("startup", "readiness", "liveness")]
    asked = [probe["path"] for probe in probes]
    asked += re.findall(rf":{PORT}(/\w+)", "".join(of("Dockerfile.cpu", "HEALTHCHECK")))
    asked.append(scraped()["metrics_path"])
    assert asked == ["/health", "/ready", "/health", "/health", "/metrics"]
    assert set(asked) < paths(app)
    assert {probe["port"] for probe in probes} == {container["ports"][0]["name"]}


def test_answers_in_flight_end_before_the_process_is_killed() -> None:
    assert seconds(unit()["TimeoutStopSec"]) > SHUTDOWN_SECONDS
    for name in ("cpu", "cuda"):
        assert seconds(compose()["services"][name]["stop_grace_period"]) > SHUTDOWN_SECONDS
    pod = kubernetes("Deployment")["spec"]["template"]["spec"]
    [waiting] = [each["lifecycle"]["preStop"]["exec"]["command"] for each in pod["containers"]]
    assert waiting[0] == "sleep"
    assert pod["terminationGracePeriodSeconds"] > SHUTDOWN_SECONDS + seconds(waiting[1])


def seconds(text: str) -> float:
    return float(text.removesuffix("s"))


# What a server may do there


def test_no_server_is_root_or_can_become_it() -> None:
    for name in ("Dockerfile.cpu", "Dockerfile.cuda"):
        assert of(name, "USER") == [f"{USER}:{USER}"]
        assert [
            each for each in of(name, "COPY") if "/cache" in each and f"--chown={USER}:" in each
        ]
    for name in ("cpu", "cuda"):
        service = compose()["services"][name]
        assert service["read_only"]
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert "memory" in service["deploy"]["resources"]["limits"]
    pod = kubernetes("Deployment")["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"]
    assert pod["securityContext"]["runAsUser"] == USER
    [container] = pod["containers"]
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert unit()["DynamicUser"] == unit()["NoNewPrivileges"] == "yes"


def test_what_is_written_has_a_place() -> None:
    """The root file system is read-only: caches and temporary files lie in volumes."""
    for name in ("Dockerfile.cpu", "Dockerfile.cuda"):
        said = dict(pair.split("=", 1) for line in of(name, "ENV") for pair in line.split())
        written = [said[each] for each in ("POLYBASIC_CACHE", "HOME")] + of(name, "WORKDIR")[1:]
        [container] = kubernetes("Deployment")["spec"]["template"]["spec"]["containers"]
        mounted = {
            mount["mountPath"]
            for mount in container["volumeMounts"]
            if not mount.get("readOnly", False)
        }
        service = compose()["services"]["cpu"]
        volumes = [each for each in service["volumes"] if isinstance(each, str)]
        assert set(written) == mounted
        assert set(written) == {*service["tmpfs"], *(each.split(":")[1] for each in volumes)}


def test_keys_come_from_outside() -> None:
    assert not re.search(r"(?i)(key|token|password)=", "".join(of("Dockerfile.cpu", "ENV")))
    assert compose()["services"]["cpu"]["environment"]["POLYBASIC_API_KEY"].startswith("${")
    [container] = kubernetes("Deployment")["spec"]["template"]["spec"]["containers"]
    [key] = [one for one in container["env"] if one["name"] == "POLYBASIC_API_KEY"]
    assert set(key["valueFrom"]) == {"secretKeyRef"}
    assert unit()["EnvironmentFile"].startswith("/etc/")


def test_labels_and_volumes_of_kubernetes_find_each_other() -> None:
    deployment = kubernetes("Deployment")["spec"]
    labels = deployment["template"]["metadata"]["labels"]
    assert deployment["selector"]["matchLabels"] == labels
    assert kubernetes("Service")["spec"]["selector"] == labels
    assert kubernetes("PodDisruptionBudget")["spec"]["selector"]["matchLabels"] == labels
    assert kubernetes("PodDisruptionBudget")["spec"]["minAvailable"] < deployment["replicas"]
    pod = deployment["template"]["spec"]
    [container] = pod["containers"]
    named = {volume["name"] for volume in pod["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == named


def test_what_compose_names_exists() -> None:
    described = compose()
    for name in ("cpu", "cuda"):
        build = described["services"][name]["build"]
        assert (IMAGES / build["context"] / build["dockerfile"]).is_file()
    for service in described["services"].values():
        for volume in service.get("volumes", []):
            source = volume["source"] if isinstance(volume, dict) else volume.split(":")[0]
            exists = (IMAGES / source).is_file() if source.startswith("./") else False
            assert exists or source in described["volumes"] or source.startswith("${CHAIN:?")
        for config in service.get("configs", []):
            assert config["source"] in described["configs"]
    for config in described["configs"].values():
        yaml.safe_load(config["content"])


# What is looked at


def expressions() -> list[str]:
    dashboard = json.loads(text_of("grafana.json"))
    return [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]


def exposed(app: FastAPI) -> dict[str, set[str]]:
    """The samples that a server exposes once it has answered, with the labels of each."""
    with TestClient(app) as client:
        asked = {"prompt": "what is it", "max_tokens": 20, "ignore_eos": True}
        assert client.post("/v1/completions", json=asked).status_code == 200
        app.state.service.metrics.refused("queue_full")
        families = text_string_to_metric_families(client.get("/metrics").text)
    return {sample.name: set(sample.labels) for one in families for sample in one.samples}


def test_the_dashboard_asks_for_what_is_exposed(app: FastAPI) -> None:
    known = exposed(app)
    assert "polybasic:spec_decode_num_drafts_total" in known
    for expression in expressions():
        asked = re.findall(r"polybasic:\w+", expression)
        assert asked
        for name in asked:
            assert name in known, expression
        labels = {
            label.strip()
            for group in re.findall(r"(?:by|on) \(([^)]*)\)", expression)
            for label in group.split(",")
        }
        for name in asked[:1]:
            assert labels <= known[name], expression


def test_panels_do_not_overlap() -> None:
    places = [panel["gridPos"] for panel in json.loads(text_of("grafana.json"))["panels"]]
    cells = [
        (x, y)
        for place in places
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24


def test_prometheus_understands_its_file_and_the_dashboards_expressions(tmp_path: Path) -> None:
    if (promtool := shutil.which("promtool")) is None:
        pytest.skip("promtool is not installed; Debian's package prometheus has it")
    shutil.copy(IMAGES / "prometheus.yml", tmp_path)
    (tmp_path / "api-key").write_text("key")
    assert run(promtool, "check", "config", str(tmp_path / "prometheus.yml")).returncode == 0
    rules = tmp_path / "rules.yml"

    def checked(expression: str) -> int:
        plain = expression.replace("$__rate_interval", "1m")
        rule = {"record": "panel", "expr": plain}
        rules.write_text(yaml.safe_dump({"groups": [{"name": "panel", "rules": [rule]}]}))
        return run(promtool, "check", "rules", str(rules)).returncode

    for expression in expressions():
        assert checked(expression) == 0, expression
    assert checked(expressions()[0] + " by") != 0


def test_systemd_understands_the_unit(tmp_path: Path) -> None:
    if (analyze := shutil.which("systemd-analyze")) is None:
        pytest.skip("systemd-analyze is not installed; Debian's package systemd has it")
    # its program exists where the unit is installed
    text = text_of("polybasic.service").replace("/opt/polybasic/bin/polybasic", "/bin/true")
    for name, content, is_right in (
        ("right", text, True),
        ("wrong", text.replace("ExecStart=", "ExecStrat="), False),
    ):
        (tmp_path / f"{name}.service").write_text(content)
        verified = run(analyze, "verify", str(tmp_path / f"{name}.service"))
        assert (f"{name}.service" not in verified.stderr) == is_right, verified.stderr


def run(*command: str, **settings: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False, **settings)


# What an image is built from


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
            assert name in context
            to = self.place / name
            to.parent.mkdir(parents=True, exist_ok=True)
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, to, ignore=ignored)
            else:
                shutil.copy(ROOT / name, to)


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Shell:
    """What the steps of the CPU image make, with the kernels that every processor has."""
    shell = Shell(tmp_path_factory.mktemp("image"), {"POLYBASIC_ISA": "portable"})
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
