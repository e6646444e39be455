"""The files in deploy/: configs load, the image's parts exist, Kubernetes accepts the manifests.

Manifests are checked against KubeRay's own schema (tests/data/kuberay-schema.json names its origin), and against the
rules that its webhook and controller enforce in code.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import tomllib
from collections.abc import Callable, Iterator
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from paths import ROOT

from pentad.orchestrator.config.config import RunConfig, load
from pentad.orchestrator.monitoring.metrics_server import HEALTH_PATH
from pentad.orchestrator.planning.planning import make_plan
from pentad.schedules.spec.mesh import hosts_of_size

jsonschema: Any = pytest.importorskip("jsonschema")

DEPLOY = ROOT / "deploy"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PINNED = dict(re.findall(r"^([\w.-]+)==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
IMAGE = f"pentad:{PROJECT['version']}"
MANIFESTS = ("kuberay/rayjob.yaml", "kuberay/raycluster.yaml", "kubernetes/job.yaml")
Manifest = dict[str, Any]


@pytest.mark.sampled(5)
@pytest.mark.parametrize("path", sorted((DEPLOY / "jobs").glob("*.yaml")), ids=lambda path: path.stem)
def test_a_job_config_loads_and_has_a_plan(path: Path) -> None:
    config = load(path, [])
    hosts = hosts_of_size(config.mesh.mesh, -(-config.mesh.size // 2))
    plan = make_plan(config, "cpu" if config.cluster.device == "cpu" else "cuda", hosts=hosts)
    assert plan.mesh == config.mesh.mesh and config.run.name == path.stem


# --- the image


def instructions() -> list[tuple[str, str]]:
    """(instruction, arguments) of the Dockerfile, with continued lines joined."""
    text = re.sub(r"^\s*#.*\n", "", (DEPLOY / "Dockerfile").read_text(), flags=re.MULTILINE)
    lines = re.sub(r"\\\n\s*", "", text).splitlines()
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in lines if line.strip())]


def test_the_image_has_pinned_bases_and_known_instructions() -> None:
    known = {"ARG", "FROM", "WORKDIR", "COPY", "RUN", "ENV", "USER", "ENTRYPOINT", "CMD"}
    assert {word for word, _ in instructions()} <= known
    bases = [rest.split()[0] for word, rest in instructions() if word == "FROM"]
    assert bases and all(":" in base and not base.endswith(":latest") for base in bases)


def test_the_image_has_every_package_and_only_allowed_files() -> None:
    rules = [r for r in (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines() if r and not r.startswith("#")]
    allowed = [rule[1:] for rule in rules if rule.startswith("!")]
    assert rules[0] == "*"
    copied = set()
    for word, rest in instructions():
        if word == "COPY" and not rest.startswith("--from"):
            for source in rest.split()[:-1]:
                assert (ROOT / source).exists(), source
                assert any(fnmatch(source.rstrip("/"), rule) for rule in allowed), source
                copied.add(source.rstrip("/"))
    assert copied == set(allowed)
    assert copied >= {"kernels", "orchestrator", "schedules", "workers", "pyproject.toml", "constraints.txt", "LICENSE"}


def test_the_image_runs_unprivileged_under_an_init_process() -> None:
    last = dict(instructions())
    assert last["USER"] == "1000"  # a number: Kubernetes cannot resolve names
    assert json.loads(last["ENTRYPOINT"])[0] == "tini" and " tini" in last["RUN"]
    assert not {"ADD", "VOLUME"} & set(last) and "[test]" not in last["RUN"]


def test_hadolint_finds_nothing() -> None:
    if (hadolint := shutil.which("hadolint")) is None:
        pytest.skip("no hadolint")
    found = subprocess.run([hadolint, DEPLOY / "Dockerfile"], capture_output=True, text=True, timeout=30)
    assert found.returncode == 0, found.stdout


# --- the manifests


def manifest(name: str) -> Manifest:
    return yaml.safe_load((DEPLOY / name).read_text())


@cache
def schema(kind: str) -> Any:
    whole = json.loads((ROOT / "tests" / "data" / "kuberay-schema.json").read_text())
    return jsonschema.Draft7Validator({**whole, "$ref": f"#/kinds/{kind}"})


def faults(document: Manifest) -> list[str]:
    """Violations of the schema of the manifest's kind, and of rules that the schema does not contain."""
    of_job = document["kind"] == "Job"
    kind, part = ("PodTemplate", document["spec"]["template"]) if of_job else (document["kind"], document)
    found = [f"{error.json_path}: {error.message}" for error in schema(kind).iter_errors(part)]
    return found or ([] if of_job else [*job_faults(document), *cluster_faults(document)])


def job_faults(document: Manifest) -> Iterator[str]:
    longest = 47 if document["kind"] == "RayJob" else 53  # the operator appends to it, and the limit is 63
    if not re.fullmatch(rf"[a-z]([-a-z0-9]{{0,{longest - 2}}}[a-z0-9])?", document["metadata"]["name"]):
        yield "metadata.name is not a DNS label, or too long"
    if document["kind"] != "RayJob":
        return
    spec = document["spec"]
    if spec.get("ttlSecondsAfterFinished", 0) and not spec.get("shutdownAfterJobFinishes"):
        yield "ttlSecondsAfterFinished requires shutdownAfterJobFinishes"
    if strategy := spec.get("deletionStrategy"):
        legacy = {"onSuccess", "onFailure"} & set(strategy)
        if bool(legacy) == bool(strategy.get("deletionRules")) or len(legacy) == 1:
            yield "deletionStrategy requires either both onSuccess and onFailure, or deletionRules"
        if spec.get("shutdownAfterJobFinishes") and strategy.get("deletionRules"):
            yield "deletionRules exclude shutdownAfterJobFinishes"
    if spec.get("managedBy", "ray.io/kuberay-operator") not in ("ray.io/kuberay-operator", "kueue.x-k8s.io/multikueue"):
        yield "managedBy is not a known manager"
    yaml.safe_load(spec.get("runtimeEnvYAML", ""))


def cluster_faults(document: Manifest) -> Iterator[str]:
    spec = cluster_of(document)
    if spec.get("authOptions", {}).get("mode") == "token":
        version = tuple(map(int, spec.get("rayVersion", "0.0").split(".")[:2]))
        if version < (2, 52):
            yield "authOptions.mode token requires rayVersion 2.52 or later"
    for group in spec["workerGroupSpecs"]:
        if not {"minReplicas", "maxReplicas"} <= set(group):
            yield f"{group['groupName']} lacks minReplicas or maxReplicas, and there is no autoscaler"
        elif not 0 <= group["minReplicas"] <= group.get("replicas", group["minReplicas"]) <= group["maxReplicas"]:
            yield f"{group['groupName']} has replicas outside minReplicas and maxReplicas"
    for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
        given = {"num-cpus", "num-gpus", "memory", "resources"} & set(group.get("rayStartParams", {}))
        if given and group.get("resources"):
            yield "resources are given in rayStartParams and in resources"
        if not group["template"]["spec"]["containers"]:
            yield "a group has no container"


def cluster_of(document: Manifest) -> Manifest:
    return document["spec"].get("rayClusterSpec", document["spec"])


def pods(document: Manifest) -> list[Manifest]:
    if document["kind"] == "Job":
        return [document["spec"]["template"]["spec"]]
    cluster = cluster_of(document)
    return [group["template"]["spec"] for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])]


def gpus(pod: Manifest) -> int:
    return int(pod["containers"][0]["resources"]["limits"].get("nvidia.com/gpu", 0))


def run_of(document: Manifest) -> RunConfig:
    """The configuration that a manifest starts."""
    spec = document["spec"]
    words = shlex.split(spec["entrypoint"])[1:] if "entrypoint" in spec else pods(document)[0]["containers"][0]["args"]
    pentad, train, path, *overrides = words
    assert (pentad, train) == ("pentad", "train")
    return load(ROOT / Path(path).relative_to("/opt/pentad"), overrides)


@pytest.mark.parametrize("name", MANIFESTS)
def test_the_operator_accepts_a_manifest(name: str) -> None:
    assert faults(manifest(name)) == []


def remove(path: str, document: Manifest) -> None:
    *parents, last = path.split(".")
    for part in parents:
        document = document[int(part) if part.isdigit() else part]  # type: ignore[index]
    del document[last]


def put(path: str, value: Any, document: Manifest) -> None:
    *parents, last = path.split(".")
    for part in parents:
        document = document[int(part) if part.isdigit() else part]  # type: ignore[index]
    document[last] = value


def worker(path: str) -> str:
    return f"spec.rayClusterSpec.workerGroupSpecs.0.{path}"


DAMAGES: dict[str, Callable[[Manifest], None]] = {
    "an unknown field": lambda d: put("spec.entryPoint", "pentad train", d),
    "an unknown field of a pod": lambda d: put(worker("template.spec.terminationGraceSeconds"), 5, d),
    "an unknown field of a volume": lambda d: put(worker("template.spec.volumes.0.pvc"), {}, d),
    "an unknown field of a probe": lambda d: put(
        worker("template.spec.containers.0.livenessProbe"), {"grpc": {"port": 9465, "name": ""}}, d
    ),
    "a wrong type": lambda d: put("spec.backoffLimit", "3", d),
    "a number among the parameters of ray start": lambda d: put(worker("rayStartParams.num-gpus"), 4, d),
    "a wrong quantity": lambda d: put(worker("template.spec.containers.0.resources.limits.memory"), "128 GB", d),
    "a wrong mode": lambda d: put("spec.rayClusterSpec.authOptions.mode", "password", d),
    "no head": lambda d: remove("spec.rayClusterSpec.headGroupSpec", d),
    "an older version of the interface": lambda d: put("apiVersion", "ray.io/v1alpha1", d),
    "a time to live without deletion": lambda d: put("spec.shutdownAfterJobFinishes", False, d),
    "an empty deletion strategy": lambda d: put("spec.deletionStrategy", {"onSuccess": {"policy": "DeleteSelf"}}, d),
    "an unknown manager": lambda d: put("spec.managedBy", "somebody", d),
    "a name that becomes too long": lambda d: put("metadata.name", "l" * 48, d),
    "a Ray without tokens": lambda d: put("spec.rayClusterSpec.rayVersion", "2.51.2", d),
    "too many replicas": lambda d: put(worker("replicas"), 3, d),
    "no limit of replicas": lambda d: remove(worker("maxReplicas"), d),
    "resources given twice": lambda d: put("spec.rayClusterSpec.headGroupSpec.resources", {"CPU": "1"}, d),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_manifest_is_refused(damage: str) -> None:
    document = manifest("kuberay/rayjob.yaml")
    DAMAGES[damage](document)
    assert faults(document)


@pytest.mark.parametrize("name", MANIFESTS)
def test_pods_are_unprivileged_and_their_mounts_exist(name: str) -> None:
    claim = manifest("kuberay/runs.yaml")
    assert claim["kind"] == "PersistentVolumeClaim" and claim["spec"]["accessModes"] == ["ReadWriteMany"]
    for pod in pods(manifest(name)):
        (container,) = pod["containers"]
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in container["volumeMounts"]}
        assert mounts["/runs"]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
        assert mounts["/dev/shm"]["emptyDir"]["medium"] == "Memory"
        assert container["image"] == IMAGE
        assert pod["securityContext"]["runAsNonRoot"] and pod["securityContext"]["runAsUser"] == 1000
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
        assert pod.get("shareProcessNamespace") or "command" not in container  # something reaps orphans
        requests, limits = container["resources"]["requests"], container["resources"]["limits"]
        assert requests.get("nvidia.com/gpu") == limits.get("nvidia.com/gpu")


@pytest.mark.parametrize("name", ["kuberay/rayjob.yaml", "kuberay/raycluster.yaml"])
def test_the_head_runs_drivers_only_and_workers_have_the_gpus(name: str) -> None:
    cluster = cluster_of(manifest(name))
    head, worker = pods(manifest(name))
    start = cluster["headGroupSpec"]["rayStartParams"]
    assert (start["num-cpus"], start["num-gpus"], gpus(head)) == ("0", "0", 0)
    assert cluster["rayVersion"] == PINNED["ray"] and cluster["authOptions"]["mode"] == "token"
    config = load(DEPLOY / "jobs" / "llama-1b-elastic.yaml", [])
    replicas = cluster["workerGroupSpecs"][0]["replicas"]
    assert replicas * gpus(worker) == config.mesh.dp * config.mesh.pp
    assert (replicas - 1) * gpus(worker) >= (config.elastic.min_ranks or 0)


@pytest.mark.parametrize("name", ["kuberay/rayjob.yaml", "kubernetes/job.yaml"])
def test_a_run_has_time_to_stop_and_the_declared_ports(name: str) -> None:
    document = manifest(name)
    config, pod = run_of(document), pods(document)[0]
    for each in pods(document):
        assert each["terminationGracePeriodSeconds"] > config.cluster.stop_timeout_seconds
    ports = {port["name"]: port["containerPort"] for port in pod["containers"][0]["ports"]}
    assert (ports["metrics"], ports["control"]) == (config.metrics.port, config.metrics.control_port)
    assert config.metrics.host == "0.0.0.0" and config.run.folder == "/runs"


def test_a_stopped_ray_job_has_the_time_in_its_config() -> None:
    document = manifest("kuberay/rayjob.yaml")
    given = yaml.safe_load(document["spec"]["runtimeEnvYAML"])["env_vars"]["RAY_JOB_STOP_WAIT_TIME_S"]
    assert float(given) == run_of(document).cluster.stop_timeout_seconds
    assert document["spec"]["entrypoint"].startswith("exec ")
    folder = Path(run_of(document).run.folder) / run_of(document).run.name
    assert document["spec"]["metadata"] == {"pentad/run": folder.name, "pentad/folder": str(folder)}


def test_probes_ask_the_exporter_and_outlast_a_recovery() -> None:
    document = manifest("kubernetes/job.yaml")
    config, (container,) = run_of(document), pods(document)[0]["containers"]
    for probe in (container["startupProbe"], container["livenessProbe"]):
        assert probe["httpGet"] == {"path": HEALTH_PATH, "port": config.metrics.port}
    patience = container["livenessProbe"]["periodSeconds"] * container["livenessProbe"]["failureThreshold"]
    assert patience > config.elastic.wait_seconds + config.cluster.start_timeout_seconds
    assert gpus(pods(document)[0]) >= config.mesh.dp * config.mesh.pp and config.cluster.address == "local"
