"""Files to deploy a server with: what they run works, and they agree with the server."""

import json
import os
import re
import shlex
import shutil
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
from tests.deploy.serve.images import IMAGES, PORT, compose, kubernetes, of, run, text_of

USER = 10001
SHUTDOWN_SECONDS = 30
"""What `polybasic serve` gives answers in flight by default."""


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
    [key] = [variable for variable in container["env"] if variable["name"] == "POLYBASIC_API_KEY"]
    assert set(key["valueFrom"]) == {"secretKeyRef"}
    assert unit()["EnvironmentFile"].startswith("/etc/")


def test_no_password_is_one_that_everybody_knows() -> None:
    for name, service in compose()["services"].items():
        for variable, value in service.get("environment", {}).items():
            if re.search("KEY|PASSWORD|TOKEN", variable):
                assert re.fullmatch(r"\$\{\w+:-\}", value), name
    entry = [part.replace("$$", "$") for part in compose()["services"]["grafana"]["entrypoint"]]
    for given, code, told in (("", 2, "set GRAFANA_PASSWORD\n"), ("s3cret", 127, "/run.sh")):
        ended = run(*entry, env={"PATH": os.environ["PATH"], "GF_SECURITY_ADMIN_PASSWORD": given})
        assert ended.returncode == code
        assert told in ended.stderr


def test_only_who_is_let_in_reaches_a_pod_and_no_pod_is_preferred() -> None:
    policy, pod = kubernetes("NetworkPolicy")["spec"], kubernetes("Deployment")["spec"]["template"]
    assert policy["podSelector"]["matchLabels"] == pod["metadata"]["labels"]
    assert (set(policy["policyTypes"]), policy["egress"]) == ({"Ingress", "Egress"}, [])
    [rule] = policy["ingress"]
    [port] = kubernetes("Service")["spec"]["ports"]
    assert rule["ports"] == [{"port": port["targetPort"], "protocol": "TCP"}]
    beside, *elsewhere = rule["from"]
    assert beside == {"podSelector": {}}
    assert all(peer["namespaceSelector"]["matchLabels"] for peer in elsewhere)
    assert "sessionAffinity" not in kubernetes("Service")["spec"]
    assert "affinity" not in pod["spec"]


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
    return {sample.name: set(sample.labels) for family in families for sample in family.samples}


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
