"""The files of deploy/: the programs that they are for read them, if installed, and everything that they name exists."""

import json
import re
import shlex
import socket
import ssl
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import httpx
import kubernetes_validate
import pytest
import typer
import yaml
from fa_serve.server.adapters import ADMINISTRATION
from fa_serve.server.observe.metrics import Metrics
from fa_serve.server.operation import operation
from fa_serve.server.routes import router
from fa_serve.server.settings import Settings, load
from fastapi.routing import APIRoute
from proxies import program, run, running_nginx, wait_for

from fa_serve.__main__ import app
from fa_serve.engine import EngineStats

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
DOCKERFILE = (ROOT / "Dockerfile").read_text()
DRAIN = Settings.model_fields["drain_timeout"].default
OF_OTHERS = ("HF_TOKEN", "TRITON_CACHE_DIR")  # variables of packages that the server uses


def read(path: str) -> dict:
    return yaml.safe_load((ROOT / path).read_text())


def known_settings(names) -> None:
    for name in names:
        assert name.removeprefix("FA_SERVE_").lower() in Settings.model_fields, name


def test_compose():
    compose = read("compose.yaml")
    gpu = read("deploy/compose.cuda.yaml")
    stages = set(re.findall(r"^FROM \S+ AS (\S+)$", DOCKERFILE, re.MULTILINE))
    service = compose["services"]
    ours = compose["services"]["fa-serve"]
    assert {ours["build"]["target"], gpu["services"]["fa-serve"]["build"]["target"]} == {"cpu", "cuda"} <= stages
    known_settings(name for name in ours["environment"] if name != "HF_TOKEN")
    for name in ("FA_SERVE_API_KEYS", "FA_SERVE_ADMIN_KEY", "HF_TOKEN"):
        assert ours["environment"][name] is None, "compose passes the shell's on, or leaves it unset"
    assert ours["env_file"] == [{"path": ".env", "required": False}], "any other setting"
    assert ".env" in (ROOT / ".gitignore").read_text().splitlines(), "it holds keys"
    assert int(ours["stop_grace_period"][:-1]) > DRAIN
    [scrape] = read("deploy/prometheus/prometheus.yml")["scrape_configs"]
    assert scrape["static_configs"][0]["targets"] == [f"fa-serve:{Settings.model_fields['port'].default}"]
    for name, entry in service.items():
        for volume in entry["volumes"]:
            source, _, target = volume.partition(":")
            assert source in compose["volumes"] or (ROOT / source).is_dir(), f"{name}: {source}"
            assert target.startswith("/")
        assert all(port.startswith("127.0.0.1:") for port in entry["ports"]), f"{name} listens on a public address"
        assert name == "fa-serve" or not entry["image"].endswith(":latest")
    [source] = read("deploy/grafana/provisioning/datasources/prometheus.yml")["datasources"]
    assert source["url"] == "http://prometheus:9090"
    [provider] = read("deploy/grafana/provisioning/dashboards/fa_serve.yml")["providers"]
    mounts = [volume.split(":")[:2] for volume in service["grafana"]["volumes"]]
    assert ["./deploy/grafana/dashboards", provider["options"]["path"]] in mounts
    assert ["./deploy/grafana/provisioning", "/etc/grafana/provisioning"] in mounts
    assert ["./deploy/prometheus", "/etc/prometheus"] in [volume.split(":")[:2] for volume in service["prometheus"]["volumes"]]


@pytest.mark.slow
def test_compose_files_pass_its_schema(tmp_path):
    files = ["compose.yaml", "deploy/compose.cuda.yaml", "deploy/ray/compose.yaml", "deploy/ray/compose.cuda.yaml"]
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text((ROOT / files[2]).read_text().replace("shm_size", "shm"))
    check = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec"]
    done = run(*check, *(str(ROOT / file) for file in files))
    assert done.returncode == 0, done.stdout
    assert "'shm' was unexpected" in run(*check, str(wrong)).stdout


def ray_commands(text: str) -> None:
    """The commands of a shell's line, as their programs read them."""
    scripts = pytest.importorskip("ray.scripts.scripts", reason="the ray extra is not installed")
    for command in re.split(r"&&|;", text.replace("${REPLICAS:-2}", "2")):
        words = [word for word in shlex.split(command) if word not in ("exec", "until", "do", "done")]
        if words[:1] == ["ray"]:
            scripts.cli.get_command(None, words[1]).make_context(words[1], words[2:])
        elif words[:2] == ["fa-serve", "ray"]:
            typer.main.get_command(app).get_command(None, "ray").make_context("ray", words[2:])
        else:
            assert words in ([], ["sleep", "1"])


def test_compose_of_a_ray_cluster():
    compose, gpu = (read(f"deploy/ray/{name}")["services"] for name in ("compose.yaml", "compose.cuda.yaml"))
    server = compose["fa-serve"]
    engine = compose["engine"]
    for service in (server, engine, gpu["engine"]):
        ray_commands(service["command"][0])
    assert server["environment"] == engine["environment"]
    assert server["environment"]["RAY_AUTH_MODE"] == "token"
    assert server["environment"]["RAY_AUTH_TOKEN"].startswith("${RAY_AUTH_TOKEN:?"), "no cluster without a secret"
    assert DRAIN < int(engine["environment"]["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"]) < int(engine["stop_grace_period"][:-1])
    assert server["build"]["args"] == {"RAY": "1"}
    assert server["depends_on"] == ["engine"], "compose stops the server first, which drains"
    assert "--port 6379 --num-cpus 0 --num-gpus 0" in server["command"][0], "no engine runs beside the server"
    assert gpu["engine"]["command"][0] == engine["command"][0].replace(" --num-cpus 1", "")
    assert gpu["fa-serve"]["environment"] == {"FA_SERVE_DEVICE": "cuda"}, "the GPUs may join after the server has started"


def test_kubernetes_with_ray():
    documents = list(yaml.safe_load_all((DEPLOY / "ray" / "kubernetes.yaml").read_text()))
    for document in documents:
        kubernetes_validate.validate(document, "1.34", strict=True)
    server, engines, service, head, budget, policy, door = documents
    pods = [workload["spec"]["template"] for workload in (server, engines)]
    for workload, pod in zip((server, engines), pods, strict=True):
        [container] = pod["spec"]["containers"]
        ray_commands(container["args"][0])
        assert workload["spec"]["selector"]["matchLabels"] == pod["metadata"]["labels"]
        claims = {claim["metadata"]["name"] for claim in workload["spec"].get("volumeClaimTemplates", ())}
        names = claims | {volume["name"] for volume in pod["spec"]["volumes"]}
        assert {mount["name"] for mount in container["volumeMounts"]} == names
        assert policy["spec"]["podSelector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    (ours,), (theirs,) = (pod["spec"]["containers"] for pod in pods)
    known_settings(entry["name"] for entry in ours["env"] if not entry["name"].startswith(("RAY_", *OF_OTHERS)))
    *same, drain = theirs["env"]
    assert all(entry in ours["env"] for entry in same), "one token for all"
    assert drain["name"] == "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"
    assert DRAIN < int(drain["value"]) < pods[1]["spec"]["terminationGracePeriodSeconds"]
    assert f"--replicas {engines['spec']['replicas']} --device cuda" in ours["args"][0], "the GPUs may join after the server"
    before = int(ours["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pods[0]["spec"]["terminationGracePeriodSeconds"] > before + DRAIN
    for selector in (service["spec"]["selector"], head["spec"]["selector"], door["spec"]["podSelector"]["matchLabels"]):
        assert selector == pods[0]["metadata"]["labels"]
    assert budget["spec"]["selector"]["matchLabels"] == pods[1]["metadata"]["labels"]
    address = f"{head['metadata']['name']}:{head['spec']['ports'][0]['port']}"
    assert theirs["args"][0].count(f"--address {address} ") + theirs["args"][0].count(f"--address {address};") == 2
    assert head["spec"]["publishNotReadyAddresses"], "the server is not ready before its engines are"
    liveness = ours["livenessProbe"]
    assert liveness["periodSeconds"] * liveness["failureThreshold"] >= 1800, "a new head would restart every engine"


def test_what_compose_leaves_empty_is_not_set(monkeypatch):
    monkeypatch.setenv("FA_SERVE_MODEL", "")
    monkeypatch.setenv("FA_SERVE_DTYPE", "")
    settings = load({})
    assert (settings.model, settings.all_keys) == (None, ())


def test_prometheus():
    done = run(program("promtool"), "check", "config", "prometheus.yml", cwd=DEPLOY / "prometheus")
    assert done.returncode == 0, done.stderr


def test_alerts_of_an_engine(tmp_path):
    """One that is away for a minute, and one that was replaced in time."""

    def alert(minute, name, instance, severity):
        labels = {"instance": instance, "severity": severity}
        return {"eval_time": minute, "alertname": name, "exp_alerts": [{"exp_labels": labels}] if severity else []}

    groups = yaml.safe_load((DEPLOY / "prometheus" / "alerts.yml").read_text())
    for rule in groups["groups"][0]["rules"]:
        rule["annotations"] = {}
    (tmp_path / "alerts.yml").write_text(yaml.safe_dump(groups))
    series = {
        'fa_serve:engine_up{instance="gone"}': "1 0x4",
        'fa_serve:engine_restarts_total{instance="gone"}': "0x5",
        'fa_serve:engine_up{instance="back"}': "1 0 1x3",
        'fa_serve:engine_restarts_total{instance="back"}': "0 1x4",
    }
    expected = [
        alert("1m", "FaServeEngineDead", "gone", None),
        alert("3m", "FaServeEngineDead", "gone", "critical"),
        alert("3m", "FaServeEngineRestarts", "back", "warning"),
    ]
    inputs = [{"series": name, "values": values} for name, values in series.items()]
    tests = [{"interval": "1m", "input_series": inputs, "alert_rule_test": expected}]
    (tmp_path / "tests.yml").write_text(yaml.safe_dump({"rule_files": ["alerts.yml"], "tests": tests}))
    done = run(program("promtool"), "test", "rules", "tests.yml", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


def test_kubernetes():
    documents = list(yaml.safe_load_all((DEPLOY / "kubernetes" / "fa-serve.yaml").read_text()))
    for document in documents:
        kubernetes_validate.validate(document, "1.34", strict=True)
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(documents[0] | {"spec": {"acessModes": []}}, "1.34", strict=True)
    workload, service, names, budget, policy = documents
    pod = workload["spec"]["template"]["spec"]
    [container] = pod["containers"]
    flags = [argument for argument in container["args"] if argument.startswith("--")]
    known_settings(flag[2:].replace("-", "_") for flag in flags)
    known_settings(entry["name"] for entry in container["env"] if entry["name"] not in OF_OTHERS)
    kernels = next(entry["value"] for entry in container["env"] if entry["name"] == "TRITON_CACHE_DIR")
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert kernels.startswith(f"{mounts['weights']}/"), "a pod that is replaced compiles nothing again"
    probes = {name: container[f"{name}Probe"]["httpGet"]["path"] for name in ("startup", "readiness", "liveness")}
    assert probes == {"startup": "/ready", "readiness": "/ready", "liveness": "/health"}
    before = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod["terminationGracePeriodSeconds"] > before + DRAIN
    labels = workload["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"] == names["spec"]["selector"] == labels
    assert all(document["spec"]["selector"]["matchLabels"] == labels for document in (workload, budget))
    assert policy["spec"]["podSelector"]["matchLabels"] == labels
    claims = {claim["metadata"]["name"] for claim in workload["spec"]["volumeClaimTemplates"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == claims | {volume["name"] for volume in pod["volumes"]}
    assert (workload["spec"]["serviceName"], names["spec"]["clusterIP"]) == (names["metadata"]["name"], "None")


def test_the_autoscaler_reads_a_metric_that_the_server_has():
    text = (DEPLOY / "kubernetes" / "autoscaler.yaml").read_text()
    autoscaler = yaml.safe_load(text)
    kubernetes_validate.validate(autoscaler, "1.34", strict=True)
    workload = next(yaml.safe_load_all((DEPLOY / "kubernetes" / "fa-serve.yaml").read_text()))
    target = autoscaler["spec"]["scaleTargetRef"]
    assert target == {key: workload[key] for key in ("apiVersion", "kind")} | {"name": workload["metadata"]["name"]}
    [rule] = yaml.safe_load("\n".join(re.findall(r"^#   (.*)$", text, re.MULTILINE)))["rules"]
    [series] = re.findall(r"^fa_serve:\w+", rule["seriesQuery"])
    metrics = Metrics(lambda: ({None: EngineStats(0, 3, 8, 0, 0, 0, 0, 0, 0)}, "model"))
    assert f'{series}{{model_name="model"}} 3.0' in metrics.text().decode()
    [metric] = autoscaler["spec"]["metrics"]
    assert metric["pods"]["metric"]["name"] == rule["name"]["as"]


def test_systemd(tmp_path):
    text = (DEPLOY / "systemd" / "fa-serve.service").read_text()
    assert int(re.search(r"^TimeoutStopSec=(\d+)$", text, re.MULTILINE)[1]) > DRAIN
    unit = tmp_path / "fa-serve.service"
    unit.write_text(text.replace("/opt/fa-serve/bin/fa-serve", sys.executable))
    done = run(program("systemd-analyze"), "verify", "--man=no", str(unit))
    assert (done.returncode, [line for line in done.stderr.splitlines() if "fa-serve" in line]) == (0, [])
    unit.write_text(unit.read_text().replace("KillMode", "KilMode"))
    assert "KilMode" in run(program("systemd-analyze"), "verify", "--man=no", str(unit)).stderr


def healthcheck() -> list[str]:
    [command] = re.findall(r"^HEALTHCHECK .* CMD (\[.*\])$", DOCKERFILE.replace("\\\n", ""), re.MULTILINE)
    return [sys.executable, *json.loads(command)[1:]]


def test_the_image_knows_its_health(served):
    port = served.url.rpartition(":")[2]
    assert run(*healthcheck(), env={"FA_SERVE_PORT": port}).returncode == 0
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.close()
        assert run(*healthcheck(), env={"FA_SERVE_PORT": str(silent)}).returncode != 0


def test_the_image_does_not_run_as_root():
    lines = [line for line in DOCKERFILE.splitlines() if line and not line.startswith("#")]
    stages = "\n".join(lines).split("\nFROM ")
    for name in ("cuda", "cpu"):
        [stage] = [stage for stage in stages if stage.startswith(f"runtime AS {name}\n")]
        assert stage.endswith("\nUSER 1000"), name
    assert stages[-1].startswith("runtime AS cpu"), "docker build makes the last stage by default"


@pytest.mark.parametrize("name", ["Caddyfile", "Caddyfile.replicas"])
def test_caddy(name):
    done = run(program("caddy"), "validate", "--adapter", "caddyfile", "--config", str(DEPLOY / "caddy" / name))
    assert done.returncode == 0, done.stderr


def administrators_routes() -> set[str]:
    """The paths of the routes that take the administrator's key alone."""
    routes = [route for route in (*router.routes, *operation.routes) if isinstance(route, APIRoute)]
    return {route.path for route in routes if ADMINISTRATION in route.tags}


def test_proxies_close_the_administrators_routes():
    closed = administrators_routes()
    assert {"/update_weights", "/v1/load_lora_adapter"} <= closed
    [pattern] = re.findall(r"location ~ (\S+) \{ deny all; \}", (DEPLOY / "nginx" / "fa-serve.conf").read_text())
    assert all(re.search(pattern, path) and re.search(pattern, f"{path}/") for path in closed)
    assert not [path for path in ("/v1/models", "/health", "/pauses", "/x/pause") if re.search(pattern, path)]
    for name in ("Caddyfile", "Caddyfile.replicas"):
        [paths] = re.findall(r"@administrator path (.+)", (DEPLOY / "caddy" / name).read_text())
        assert set(paths.split()) == closed
        assert "error @administrator 403" in (DEPLOY / "caddy" / name).read_text()


class Named(BaseHTTPRequestHandler):
    """A replica that answers with its port."""

    def do_POST(self) -> None:
        text = str(self.server.server_address[1]).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: object) -> None: ...


@pytest.mark.slow
def test_a_session_stays_at_one_replica(tmp_path):
    """By nginx: of many sessions each stays where it is, and only those of a lost replica move."""
    nginx = program("nginx")
    replicas = [ThreadingHTTPServer(("127.0.0.1", 0), Named) for _ in range(2)]
    for replica in replicas:
        threading.Thread(target=replica.serve_forever, daemon=True).start()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    text = (DEPLOY / "nginx" / "replicas.conf").read_text()
    for old, replica in zip(("127.0.0.1:8000", "127.0.0.1:8001"), replicas, strict=True):
        assert old in text
        text = text.replace(old, f"127.0.0.1:{replica.server_port}")
    folders = "".join(f"{kind}_temp_path {tmp_path}/{kind};" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi"))
    site = f"server {{ listen 127.0.0.1:{port}; location / {{ proxy_pass http://fa_serve; }} }}"
    config = tmp_path / "nginx.conf"
    http = f"http {{ access_log off; {folders}\n{text}\n{site} }}"
    config.write_text(f"daemon off; pid {tmp_path}/pid; error_log stderr crit; events {{}}\n{http}\n")
    process = subprocess.Popen([nginx, "-p", str(tmp_path), "-c", str(config)], stderr=subprocess.DEVNULL)
    try:
        transport = httpx.HTTPTransport(retries=20)  # until nginx listens
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", transport=transport, timeout=20) as client:

            def places(name: str) -> list[str]:
                return [client.post("/", headers={name: f"session-{number}"}).text for number in range(40)]

            first = places("x-session-id")
            assert sorted(set(first)) == sorted(str(replica.server_port) for replica in replicas)
            assert places("x-session-id") == first
            assert len(set(places("authorization"))) == 2, "without a session, the key decides"
            assert len({client.post("/").text for _ in range(5)}) == 1, "without a key, the address decides"
            lost = replicas.pop()
            lost.shutdown()
            lost.server_close()
            assert set(places("x-session-id")) == {str(replicas[0].server_port)}
    finally:
        for replica in replicas:
            replica.shutdown()
            replica.server_close()
        process.terminate()
        process.wait()


class Draining(BaseHTTPRequestHandler):
    """A server that refuses every request, as a draining server does, and keeps their paths."""

    asked: ClassVar[list[str]] = []

    def do_POST(self) -> None:
        self.asked.append(self.path)
        self.send_error(503)

    do_GET = do_POST

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def proxied(served, tmp_path):
    """The server behind the nginx configuration, with the certificate, the ports and the folders of this test."""
    nginx = program("nginx")
    openssl = program("openssl")
    key = tmp_path / "privkey.pem"
    certificate = tmp_path / "fullchain.pem"
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    run(openssl, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-keyout", key, "-out", certificate, *subject)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    text = (DEPLOY / "nginx" / "fa-serve.conf").read_text()
    other = ThreadingHTTPServer(("127.0.0.1", 0), Draining)
    threading.Thread(target=other.serve_forever, daemon=True).start()
    ours = served.url.removeprefix("http://")
    others = f"127.0.0.1:{other.server_port}"
    changes = {
        "server 127.0.0.1:8000;": f"server {others} max_fails=0; server {ours};",
        "listen 443": f"listen 127.0.0.1:{port}",
        "    listen [::]:443 ssl;\n": "",
        "/etc/ssl/fa-serve/": f"{tmp_path}/",
    }
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    context = ssl.create_default_context(cafile=str(certificate))
    try:
        with (
            running_nginx(nginx, tmp_path, text),
            httpx.Client(base_url=f"https://localhost:{port}", verify=context, timeout=60) as client,
        ):
            wait_for(client, "/ready")
            yield client
    finally:
        other.shutdown()
        other.server_close()


@pytest.mark.slow
def test_streams_pass_nginx_unbuffered(proxied):
    body = {"model": "fa-serve-demo", "prompt": "import os\n", "max_tokens": 64, "ignore_eos": True, "stream": True}
    with proxied.stream("POST", "/v1/completions", json=body, headers={"x-request-id": "mine"}) as response:
        assert response.status_code == 200
        assert response.headers["x-request-id"] == "mine"
        pieces = [piece for piece in response.iter_raw() if piece]
    assert b"".join(pieces).endswith(b"data: [DONE]\n\n")
    assert len(pieces) > 16, "the stream was buffered"
    assert proxied.get("/metrics").status_code == 403
    for path in administrators_routes():
        refused = proxied.post(path, json={})
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "forbidden"), path
        assert "proxy" in refused.json()["error"]["message"], path
    body = {"model": "fa-serve-demo", "prompt": "import os\n", "max_tokens": 1}
    assert [proxied.post("/v1/completions", json=body).status_code for _ in range(4)] == [200] * 4
    assert "/v1/completions" in Draining.asked, "nginx asked the draining server first and then the other one"
