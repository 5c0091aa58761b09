"""cluster/: every file fits its schema and our rules, and each rule sees a broken copy.

The schemas of KubeRay and of the chart jupyterhub are in the folders that
WORKSHOP_KUBERAY_SCHEMAS and WORKSHOP_HUB_SCHEMA name; else they are downloaded once, into
build/.
"""

import copy
import functools
import importlib.util
import itertools
import os
import re
import shlex
import shutil
import subprocess
import sys
import urllib.request
from pathlib import Path

import jsonschema
import kubernetes_validate
import pytest
import yaml

from tests import manifests
from tests.manifests import CLUSTER, KUBERAY, RAY, ROOT, built, documents
from tests.patience import PATIENCE
from utils import checkpoint_files

pytestmark = pytest.mark.part02
OPERATOR, CHART = "1.7.0", "4.4.0"
GITHUB = "https://raw.githubusercontent.com"
CRDS = f"{GITHUB}/ray-project/kuberay/v{OPERATOR}/helm-chart/kuberay-operator/crds"
HUB = f"{GITHUB}/jupyterhub/zero-to-jupyterhub-k8s/{CHART}/jupyterhub"
# By file: the variable that names a folder with it, and where it is else.
SCHEMAS = {
    "ray.io_rayclusters.yaml": ("WORKSHOP_KUBERAY_SCHEMAS", CRDS),
    "ray.io_rayjobs.yaml": ("WORKSHOP_KUBERAY_SCHEMAS", CRDS),
    "values.schema.yaml": ("WORKSHOP_HUB_SCHEMA", HUB),
    "values.yaml": ("WORKSHOP_HUB_SCHEMA", HUB),
}
KUBERNETES = "1.37"
ANYSCALE = "anyscale==0.26.112"
RAY_FILES = Path(importlib.util.find_spec("ray").origin).parent
PAGES = sorted(CLUSTER.rglob("*.md"))
FILES = sorted(p for p in CLUSTER.rglob("*") if p.is_file() and p.suffix != ".png")
FOLDERS = sorted(path.parent for path in KUBERAY.glob("*/kustomization.yaml"))
CLUSTERS = manifests.clusters()


@functools.cache  # where there is no network, it is waited for once
def schema(name: str) -> dict:
    """Return a schema, at the version that our pages name; skip where it cannot be had."""
    variable, address = SCHEMAS[name]
    folder = Path(os.environ.get(variable, ROOT / "build" / "schemas"))
    file = folder / name
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        try:
            with urllib.request.urlopen(
                f"{address}/{name}", timeout=PATIENCE
            ) as answer:
                content = answer.read()
        except OSError:
            pytest.skip("a chart's schema is not here and cannot be downloaded")
        with checkpoint_files.write_whole(file) as writing:
            writing.write(content)
    return yaml.load(file.read_text(), yaml.CSafeLoader)


def strict(schema):
    """Return a copy of a schema that refuses what it does not know, as `kubectl` does."""
    if isinstance(schema, list):
        return [strict(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: strict(value) for key, value in schema.items()}
    open_ended = schema.get("x-kubernetes-preserve-unknown-fields")
    if isinstance(schema.get("properties"), dict) and not open_ended:
        found.setdefault("additionalProperties", False)
    return found


@functools.cache
def validator(kind: str) -> jsonschema.Draft202012Validator:
    """Return that of KubeRay's two kinds, or of the values of the chart jupyterhub."""
    if kind == "hub":
        return jsonschema.Draft202012Validator(schema("values.schema.yaml"))
    definition = schema(f"ray.io_{kind.lower()}s.yaml")
    versions = {each["name"]: each for each in definition["spec"]["versions"]}
    return jsonschema.Draft202012Validator(
        strict(versions["v1"]["schema"]["openAPIV3Schema"])
    )


def schema_faults(kind: str, document: dict) -> list[str]:
    """Return what the schema of its kind says against a manifest, or values of the hub."""
    if kind == "hub":  # Helm asks the schema once ours are in the chart's
        document = merged(schema("values.yaml"), document)
    found = validator(kind).iter_errors(document)
    return [f"{'.'.join(map(str, error.path))}: {error.message}" for error in found]


def cluster(folder: str = "cluster") -> dict:
    (found,) = [d for d in built(KUBERAY / folder) if d["kind"] == "RayCluster"]
    return found


def head(spec):
    return next(manifests.containers(spec))[2]


def pod(spec):
    """Return the specification of the first worker's pod."""
    return list(manifests.pods(spec))[1][1]


def worker(spec):
    return pod(spec)["containers"][0]


def variable(container, name, value):
    """Set a variable of a container, or take it away."""
    container["env"] = [each for each in container["env"] if each["name"] != name]
    if value is not None:
        container["env"].append({"name": name, "value": value})


def set_in(*path_and_value):
    """Return a function that sets a value in the specification of a Ray cluster."""
    *path, last, value = path_and_value

    def breaks(spec):
        functools.reduce(lambda part, key: part[key], path, spec)[last] = value

    return breaks


def test_every_file_is_under_a_rule():
    assert len(FILES) > 15
    for path in FILES:
        assert manifests.rule_of(path), f"no rule for {path}: add it to COVERED"
    for pattern in manifests.COVERED:
        assert list(CLUSTER.glob(pattern)), f"{pattern} is the name of no file"
    assert manifests.rule_of(CLUSTER / "kuberay" / "surprise.yaml") is None


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.name)
def test_kubectl_builds_what_these_tests_look_at(folder):
    """kubectl has kustomize built in, and needs no cluster for that."""
    if not shutil.which("kubectl"):
        pytest.skip("kubectl is not installed here")
    text = subprocess.check_output(["kubectl", "kustomize", folder], timeout=PATIENCE)
    theirs = [each for each in yaml.safe_load_all(text) if each]

    def name(document):
        return document["kind"], document["metadata"]["name"]

    assert sorted(theirs, key=name) == sorted(built(folder), key=name)


def test_a_patch_that_leads_nowhere_is_seen():
    for path in ("/spec/gone", "/spec/workerGroupSpecs/1/replicas"):
        with pytest.raises((KeyError, IndexError)):
            manifests.apply({"op": "replace", "path": path, "value": 1}, cluster())


@pytest.mark.parametrize("folder", CLUSTERS)
def test_kuberay_takes_a_cluster(folder):
    assert schema_faults("RayCluster", cluster(folder)) == []


def test_kuberay_takes_the_job():
    (job,) = documents(KUBERAY / "ray-job.yaml")
    assert schema_faults("RayJob", job) == []
    assert schema_faults("RayJob", job | {"spec": job["spec"] | {"entrypoints": "x"}})


BROKEN_FOR_KUBERAY = {
    "a word is misspelled": lambda spec: spec.update(rayVersoin=RAY),
    "a mode that is none": lambda spec: spec["authOptions"].update(mode="password"),
    "no head": lambda spec: spec.pop("headGroupSpec"),
    "a number for a text": set_in("headGroupSpec", "rayStartParams", {"num-cpus": 0}),
    "a key of a container that is none": lambda spec: head(spec).update(volumeMount=[]),
}


@pytest.mark.parametrize("fault", BROKEN_FOR_KUBERAY)
def test_kuberay_refuses(fault):
    broken = cluster()
    BROKEN_FOR_KUBERAY[fault](broken["spec"])
    assert schema_faults("RayCluster", broken)


def merged(values: dict, more: dict) -> dict:
    """Return what Helm makes of two files of values: maps are merged, the rest replaced."""
    both = copy.deepcopy(values)
    for key, value in more.items():
        old = both.get(key)
        maps = isinstance(old, dict) and isinstance(value, dict)
        both[key] = merged(old, value) if maps else copy.deepcopy(value)
    return both


def test_the_hub_takes_our_values():
    (values,) = documents(CLUSTER / "hub" / "values.yaml")
    (more,) = documents(CLUSTER / "hub" / "values.gpu.yaml")
    for each in (values, merged(values, more)):
        assert schema_faults("hub", each) == []


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (["singleuser", "memory", "limits"], "10G"),
        (["singleuser", "storage", "homeMount"], "/home/ray"),
        (["cull", "timeout"], "2h"),
        (["singleusers"], {}),
        (["singleuser", "networkPolicy", "egressAllowRules"], {"private": True}),
    ],
    ids=lambda value: ".".join(value) if isinstance(value, list) else "",
)
def test_the_hub_refuses(path, value):
    (values,) = documents(CLUSTER / "hub" / "values.yaml")
    set_in(*path, value)(values)
    assert schema_faults("hub", values)


def kubernetes_objects() -> dict[str, dict]:
    """Return what Kubernetes itself has a schema of: our objects, and the pods of Ray."""
    found = {}
    for folder in FOLDERS:
        for each in built(folder):
            if each["apiVersion"] != "ray.io/v1":
                found[f"{folder.name}, {each['kind']}"] = each
    start = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "ray"}}
    for folder, spec in CLUSTERS.items():
        for name, each in manifests.pods(spec):
            found[f"{folder}, {name}"] = start | {"spec": each}
    return found


OBJECTS = kubernetes_objects()


@pytest.mark.parametrize("name", OBJECTS)
def test_kubernetes_takes_it(name):
    kubernetes_validate.validate(OBJECTS[name], KUBERNETES, strict=True)


@pytest.mark.parametrize(
    ("name", "path", "value"),
    [
        ("room, PersistentVolumeClaim", ["spec", "accessMode"], ["ReadWriteMany"]),
        ("room, ResourceQuota", ["spec", "hard"], "all"),
        ("gpu, NetworkPolicy", ["spec", "ingress", 0, "form"], []),
        ("room, Namespace", ["metadata", "labels"], "restricted"),
        ("gpu, head", ["spec", "securityContext", "fsGroup"], "ray"),
        ("cluster, group workers", ["spec", "toleration"], []),
    ],
)
def test_kubernetes_refuses(name, path, value):
    broken = copy.deepcopy(OBJECTS[name])
    set_in(*path, value)(broken)
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(broken, KUBERNETES, strict=True)


@pytest.mark.parametrize("folder", CLUSTERS)
def test_a_ray_cluster_is_under_our_rules(folder):
    assert manifests.faults(CLUSTERS[folder]) == []


POD = ("workerGroupSpecs", 0, "template", "spec")
BOX = (*POD, "containers", 0)
HEAD = ("headGroupSpec", "template", "spec")
DRAIN = "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"
BROKEN = [
    ("tag", "of Ray", set_in(*BOX, "image", f"registry.example.com/ray:{RAY}")),
    ("tag", "pulled each time", set_in(*BOX, "imagePullPolicy", "Always")),
    ("tag", "another Ray", set_in("rayVersion", "2.59.0")),
    ("tag", "pods that stay", set_in("upgradeStrategy", {"type": "None"})),
    ("token", "switched off", set_in("authOptions", {"mode": "disabled"})),
    ("token", "not said", lambda spec: spec.pop("authOptions")),
    ("no_secret", "typed", lambda spec: variable(head(spec), "AWS_SECRET_KEY", "abc")),
    ("no_rights", "autoscaler", set_in("enableInTreeAutoscaling", True)),
    (
        "no_rights",
        "a token",
        lambda spec: pod(spec).pop("automountServiceAccountToken"),
    ),
    ("no_rights", "root", set_in(*POD, "securityContext", "runAsUser", 0)),
    (
        "no_rights",
        "may be root",
        set_in(*POD, "securityContext", "runAsNonRoot", False),
    ),
    ("no_rights", "privileged", set_in(*BOX, "securityContext", "privileged", True)),
    ("no_rights", "capable", set_in(*BOX, "securityContext", "capabilities", {})),
    ("closed", "public", set_in("headGroupSpec", "serviceType", "LoadBalancer")),
    (
        "closed",
        "own service",
        set_in("headGroupSpec", "headService", {"spec": {"type": "NodePort"}}),
    ),
    ("closed", "ingress", set_in("headGroupSpec", "enableIngress", True)),
    ("closed", "client", set_in(*BOX, "ports", 0, "containerPort", 10001)),
    ("closed", "default ports", set_in(*HEAD, "containers", 0, "ports", [])),
    ("storage", "not mounted", lambda spec: worker(spec)["volumeMounts"].pop(0)),
    ("storage", "read only", set_in(*BOX, "volumeMounts", 0, "readOnly", True)),
    (
        "storage",
        "elsewhere",
        lambda spec: variable(worker(spec), "WORKSHOP_STORAGE", "/tmp/results"),
    ),
    (
        "storage",
        "another claim",
        set_in(*POD, "volumes", 0, "persistentVolumeClaim", "claimName", "other"),
    ),
    ("storage", "of root", lambda spec: pod(spec)["securityContext"].pop("fsGroup")),
    ("shared_memory", "no limit", set_in(*POD, "volumes", 1, "emptyDir", {})),
    (
        "shared_memory",
        "on disk",
        set_in(*POD, "volumes", 1, "emptyDir", {"sizeLimit": "10Gi"}),
    ),
    (
        "shared_memory",
        "too small",
        set_in(*POD, "volumes", 1, "emptyDir", "sizeLimit", "1Gi"),
    ),
    ("bounds", "no CPU", lambda spec: worker(spec)["resources"]["limits"].pop("cpu")),
    ("bounds", "no disk", set_in(*POD, "volumes", 2, "emptyDir", {})),
    ("head", "two CPUs", set_in("headGroupSpec", "rayStartParams", {"num-cpus": "2"})),
    ("head", "all CPUs", set_in("headGroupSpec", "rayStartParams", {})),
    (
        "head",
        "a GPU",
        set_in(*HEAD, "containers", 0, "resources", "limits", "nvidia.com/gpu", "1"),
    ),
    (
        "grace",
        "Kubernetes'",
        lambda spec: pod(spec).pop("terminationGracePeriodSeconds"),
    ),
    ("grace", "Ray's", lambda spec: variable(worker(spec), DRAIN, None)),
    ("grace", "equal", lambda spec: variable(worker(spec), DRAIN, "120")),
    (
        "gpus",
        "a label",
        set_in(*POD, "nodeSelector", {"nvidia.com/gpu.present": "true"}),
    ),
    ("gpus", "not tolerated", set_in(*POD, "tolerations", [])),
    ("gpus", "CPU mode", lambda spec: variable(head(spec), "WORKSHOP_MODE", "smoke")),
]


@pytest.mark.parametrize(
    ("rule", "breaks"),
    [(rule, breaks) for rule, _, breaks in BROKEN],
    ids=[f"{rule}-{what}" for rule, what, _ in BROKEN],
)
def test_a_rule_sees_a_broken_cluster(rule, breaks):
    broken = copy.deepcopy(CLUSTERS["gpu"])
    breaks(broken)
    assert rule in {fault.partition(":")[0] for fault in manifests.faults(broken)}


def test_every_rule_is_seen_to_fail():
    assert {rule for rule, _, _ in BROKEN} == {
        rule.__name__ for rule in manifests.RULES
    }
    broken = {manifests.rule_of(CLUSTER / name) for name, _, _ in BROKEN_FILES}
    assert broken == {rule for rule in manifests.COVERED.values() if callable(rule)}


def test_the_quota_holds_what_the_page_says():
    """The cluster with 16 workers, and that of GPUs with two; and for 51 what it needs."""
    (bounds,) = [d for d in built(KUBERAY / "room") if d["kind"] == "ResourceQuota"]

    def needed(most: int) -> tuple[int, int, int]:
        """Return pods, CPUs and bytes of `most` workers, two with a GPU, and two heads."""
        pods = cpus = memory = 0
        for folder, workers in (("cluster", most), ("gpu", 2)):
            for number, (_, _, box) in zip(
                (1, workers), manifests.containers(CLUSTERS[folder])
            ):
                limits = box["resources"]["limits"]
                pods += number
                cpus += number * int(limits["cpu"])
                memory += number * manifests.quantity(limits["memory"])
        return pods, cpus, memory

    page = (CLUSTER / "README.md").read_text()
    says = r"(\d+) workers need (\d+) pods, (\d+) CPUs and (\d+Gi)"
    more, pods, cpus, memory = re.findall(says, page)[0]
    found = int(pods), int(cpus), manifests.quantity(memory)
    assert found == needed(int(more))
    assert int(more) <= CLUSTERS["cluster"]["workerGroupSpecs"][0]["maxReplicas"]
    pods, cpus, memory = needed(16)
    assert pods <= int(bounds["spec"]["hard"]["pods"])
    assert cpus <= int(bounds["spec"]["hard"]["limits.cpu"]) < cpus + 8
    most = manifests.quantity(bounds["spec"]["hard"]["limits.memory"])
    assert memory <= most < memory + 40 * 2**30


def test_the_policy_of_the_gpu_cluster_is_its_own():
    for folder, name in (("cluster", "workshop"), ("gpu", "workshop-gpu")):
        (policy,) = [d for d in built(KUBERAY / folder) if d["kind"] == "NetworkPolicy"]
        assert list(manifests.policy_faults(policy)) == []
        named = re.findall(r"ray.io/cluster': '([\w-]+)'", str(policy))
        assert named == [name] * 3 and policy["metadata"]["name"] == name


def read(path: Path) -> list:
    """Return what the rule of a file looks at: its documents, or its text."""
    return (
        documents(path)
        if path.suffix == ".yaml" or path.suffix == ".yml"
        else [path.read_text()]
    )


def file_faults(path: Path, contents: list) -> list[str]:
    rule = manifests.rule_of(path)
    return [fault for content in contents for fault in rule(content)]


RULED = [path for path in FILES if callable(manifests.rule_of(path))]


@pytest.mark.parametrize("path", RULED, ids=lambda path: path.name)
def test_a_file_is_under_its_rule(path):
    assert file_faults(path, read(path)) == []


BROKEN_FILES = [
    ("Containerfile", "USER 1000", "USER root"),
    ("Containerfile", "python:3.11-slim", "python:latest"),
    ("Containerfile", "-r requirements.txt", "ray torch"),
    ("Containerfile", "COPY --chown=ray:ray . .", "COPY . ."),
    ("Containerfile", "hub/requirements.txt", "requirements.txt"),
    ("anyscale/Containerfile", "torch==2", "torch==1"),
    (
        "kuberay/cluster/network-policy.yaml",
        "    - ports: # names",
        "    - {}\n    - ports: # names",
    ),
    (
        "kuberay/cluster/network-policy.yaml",
        "        - namespaceSelector:\n            matchLabels:\n"
        "              kubernetes.io/metadata.name: kuberay-system",
        "        - namespaceSelector: {}",
    ),
    ("kuberay/cluster/network-policy.yaml", "100.64.0.0/10, ", ""),
    (
        "kuberay/cluster/network-policy.yaml",
        "    - from: # Prometheus\n",
        "    - from: [{ipBlock: {cidr: 0.0.0.0/0}}]\n      ports: [{port: 8265}]\n"
        "    - from: # Prometheus\n",
    ),
    (
        "kuberay/cluster/network-policy.yaml",
        "    - from: # Prometheus\n",
        "    - ports: [{port: 8265}]\n    - from: # Prometheus\n",
    ),
    (
        "kuberay/cluster/network-policy.yaml",
        "    - ports: # names",
        "    - to: [{namespaceSelector: {}}]\n    - ports: # names",
    ),
    ("anyscale/Containerfile", f"ray:{RAY}", "ray:latest"),
    ("anyscale/compute.cpu.yaml", "max_nodes: 2", "max_nodes: 10"),
    ("anyscale/compute.gpu.yaml", "CPU: 0", "CPU: 4"),
    ("anyscale/workspace.yaml", "idle_termination_minutes: 60", "tags: {}"),
    ("anyscale/workspace.yaml", "pytorch-cpu", "pytorch-tpu"),
    ("anyscale/job.yaml", "timeout_s: 3600", "timeout_s: 360000"),
    ("anyscale/job.yaml", "train_ray_ddp.py", "train_ray.py"),
    ("anyscale/job.yaml", "image/distributed-pytorch:1", "ray:2.60.0"),
    ("anyscale/job.yaml", ".venv, ", ""),
    ("hub/values.yaml", "tag: COMMIT", f"tag: {RAY}"),
    ("hub/values.yaml", "tag: COMMIT", "tag: COMMIT\n    pullPolicy: Always"),
    ("hub/values.yaml", "    limit: 2\n", ""),
    ("hub/values.yaml", "    limit: 10G\n", ""),
    ("hub/values.yaml", "limits:\n      ephemeral-storage", "limits:\n      other"),
    ("hub/values.yaml", "sizeLimit: 4Gi", "sizeLimit: 1Gi"),
    ("hub/values.yaml", "mountPath: /dev/shm", "mountPath: /dev/shared"),
    ("hub/values.yaml", "homeMountPath: /home/ray", "homeMountPath: /opt"),
    ("hub/values.yaml", "blockWithIptables: false", "blockWithIptables: true"),
    ("hub/values.yaml", "port: 8265", "port: 6379"),
    ("hub/values.yaml", "    egress:\n", "    enabled: false\n    egress:\n"),
    (
        "hub/values.yaml",
        "    egress:\n",
        "    egressAllowRules: {privateIPs: true}\n    egress:\n",
    ),
    ("hub/values.yaml", "shared-password #", "dummy #"),
    ("hub/values.yaml", "admin_access: false", "admin_access: true"),
    ("hub/values.yaml", "allowed_users:", "allow_all: true\n      allowed_users:"),
    ("hub/values.yaml", "allowed_users:", "blocked_users:"),
    ("hub/values.yaml", "notebook_dir: /home", "password: /home"),
    ("hub/values.yaml", "type: ClusterIP", "type: LoadBalancer"),
    ("hub/values.yaml", "maxAge: 43200", "maxAge: 0"),
    ("hub/values.yaml", "maxAge: 43200", "maxAge: 43200\n  enabled: false"),
    ("hub/values.yaml", "\ncull:", "\nprePuller:\n  hook:\n    enabled: false\ncull:"),
    ("hub/values.yaml", "enabled: true # a person", "enabled: false # a person"),
    ("hub/values.yaml", "    capacity: 10Gi", "    capacity: 10Gi\n    type: none"),
    ("hub/values.yaml", "ray.io/node-type: head", "app: anything"),
    ("hub/values.gpu.yaml", "      default: true\n", "      default: false\n"),
    ("hub/values.gpu.yaml", "extraTolerations:", "extraNodeAffinity:"),
    (
        "hub/values.gpu.yaml",
        "limits:\n          ephemeral-storage",
        "limits:\n          x",
    ),
    ("kuberay/room/namespace.yaml", "restricted", "privileged"),
    ("kuberay/room/bounds.yaml", "limits.cpu", "cpu"),
    ("kuberay/room/bounds.yaml", 'loadbalancers: "0"', 'loadbalancers: "9"'),
    ("kuberay/room/storage.yaml", "ReadWriteMany", "ReadWriteOnce"),
    ("kuberay/room/storage.yaml", "storageClassName: shared-files", "volumeName: one"),
    ("kuberay/cluster/network-policy.yaml", "ray.io/cluster: workshop", "app: ray"),
    ("kuberay/cluster/network-policy.yaml", "port: 44227", "port: 10001"),
    ("kuberay/cluster/network-policy.yaml", "        - port: 8265\n", "        []\n"),
    ("kuberay/cluster/network-policy.yaml", "[Ingress, Egress]", "[Egress]"),
    ("kuberay/cluster/network-policy.yaml", "169.254.0.0/16", "169.254.0.0/32"),
    ("kuberay/ray-job.yaml", "generateName: train-", "name: train"),
    ("kuberay/ray-job.yaml", "cluster: workshop", "cluster: other"),
    ("kuberay/ray-job.yaml", "entrypointNumCpus: 1", "entrypointNumCpus: 0"),
    ("kuberay/ray-job.yaml", "train_ray_ddp.py", "train_ray.py"),
    ("monitoring/pod-monitor.yaml", "release: prometheus", "release: mine"),
    ("monitoring/pod-monitor.yaml", "[workshop]", "[default]"),
    ("monitoring/pod-monitor.yaml", "port: dash-metrics", "port: autoscaler"),
    ("monitoring/pod-monitor.yaml", "ray_io_cluster", "cluster"),
    ("monitoring/prometheus-stack-values.yaml", "Viewer", "Admin"),
    ("monitoring/prometheus-stack-values.yaml", "ClusterIP", "LoadBalancer"),
    ("monitoring/prometheus-stack-values.yaml", "allow_embedding: true", "x: true"),
    ("monitoring/prometheus-stack-values.yaml", "label: grafana_dash", "label: mine"),
    ("monitoring/prometheus.yml", "/tmp/ray/prom", "/tmp/prom"),
]


@pytest.mark.parametrize(("name", "right", "wrong"), BROKEN_FILES)
def test_a_rule_sees_a_broken_file(name, right, wrong, tmp_path):
    path = CLUSTER / name
    assert right in path.read_text()
    broken = tmp_path / path.name
    broken.write_text(path.read_text().replace(right, wrong))
    assert file_faults(path, read(broken))


# What stands in no file, wherever.
NOWHERE = {
    "the newest of an image": r"image: .*:latest|^FROM .*:latest|^FROM [^:\s]+$",
    "rights for everybody": r"chmod\s+-?\w*\s*777",
    "a public service": r"type: *(LoadBalancer|NodePort)|serviceType: *(Load|Node)",
    "a secret": r"(?i)(auth_token|password|secret_access_key) *[:=] *['\"]?\w{8}",
}


@pytest.mark.parametrize("what", NOWHERE)
def test_no_file_has(what):
    broken = {
        "the newest of an image": "    image: ray:latest",
        "rights for everybody": "RUN chmod -R 777 /mnt",
        "a public service": "  type: LoadBalancer",
        "a secret": "  auth_token: abcdefgh123",
    }
    assert re.search(NOWHERE[what], broken[what], re.MULTILINE)
    for path in FILES:
        if path.suffix != ".md":
            assert not re.search(NOWHERE[what], path.read_text(), re.MULTILINE), path


def named_files(text: str) -> list[str]:
    """Return the files that the commands of a page name, from the repository's root."""
    return re.findall(
        r"(?:(?<=[\s'\"`=])|(?<=\"/)|(?<=workshop/))(0\d-[\w./*-]+)", text
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_a_page_names_what_is_there(page):
    text = page.read_text()
    for name in named_files(text):
        assert list(ROOT.glob(name)), f"{page} names {name}"
    for link in re.findall(r"\]\((?!https?:)([^)#]+)\)", text):
        assert (page.parent / link).exists(), f"{page} links to {link}"


def test_a_page_that_names_what_is_not_there_is_seen():
    text = "```bash\nkubectl apply -f 02-ddp-pytorch-ray/cluster/kuberay/gone.yaml\n```"
    assert named_files(text) == ["02-ddp-pytorch-ray/cluster/kuberay/gone.yaml"]
    assert not list(ROOT.glob(named_files(text)[0]))


def test_the_pages_use_every_file_and_one_version():
    text = "".join(page.read_text() for page in PAGES)
    used = {ROOT / name for name in named_files(text)}  # folders of kustomize, too
    for page in PAGES:
        links = re.findall(r"\]\((?!https?:)([^)#]+)\)", page.read_text())
        used |= {(page.parent / link).resolve() for link in links}
    files = [path for path in FILES if path.suffix != ".md"]
    assert [path for path in files if not {path, path.parent} & used] == []
    charts = set(re.findall(r"([\w-]+/[\w-]+) --version (\S+)", text))
    ours = {("kuberay/kuberay-operator", OPERATOR), ("jupyterhub/jupyterhub", CHART)}
    ((stack, version),) = charts - ours
    assert ours <= charts and stack == "prometheus-community/kube-prometheus-stack"
    assert re.fullmatch(r"[\d.]+", version)
    assert len(re.findall(r"helm (?:upgrade|install)", text)) == text.count(
        "--version "
    )


def test_the_table_of_seats_is_what_the_files_add_up_to():
    """For 10, 30 and 100 people; nodes of 16 cores and 64 GiB hold 7 seats or 6 pods.

    GKE keeps 5.6 of the 64 GiB, and a head and six workers want 60. Of a disk it keeps 10%
    and 6 GiB + 35%, so of 200 it gives 93 to pods:
    https://cloud.google.com/kubernetes-engine/docs/concepts/plan-node-sizes
    """
    (values,) = documents(CLUSTER / "hub" / "values.yaml")
    seat, boxes = values["singleuser"], list(manifests.containers(CLUSTERS["cluster"]))
    memory = manifests.quantity(seat["memory"]["guarantee"]) / 10**9
    scratch = seat["extraResource"]["limits"]["ephemeral-storage"]
    disk = [
        manifests.quantity(q) / 2**30 for q in (scratch, seat["storage"]["capacity"])
    ]
    limits = [box["resources"]["limits"] for _, _, box in boxes]
    cpus = [int(each["cpu"]) for each in limits]
    gib = [manifests.quantity(each["memory"]) / 2**30 for each in limits]
    room = [manifests.quantity(each["ephemeral-storage"]) / 2**30 for each in limits]
    (machine,) = documents(CLUSTER / "anyscale" / "compute.cpu.yaml")
    machines = 1 + machine["worker_nodes"][0]["max_nodes"]
    page = (CLUSTER / "README.md").read_text()
    measured = r"Memory decides: ([\d.]+) GB for each person .*, and ([\d.]+) for all"
    each, all_of_them = re.findall(measured, page)[0]
    rows = page.split("| people |")[1].split("\n\n")[0]
    rows = [line.strip("|").split("|") for line in rows.splitlines()]
    table = {row[0].strip().split(",")[0]: list(map(int, row[-3:])) for row in rows[2:]}
    for column, people in enumerate((10, 30, 100)):
        workers = people // 2 + 1
        nodes = -(-people // 7) + -(-(workers + 1) // 6)
        wanted = {
            "cores of their seats": people * seat["cpu"]["guarantee"],
            "memory guaranteed": people * memory,
            "disk": people * sum(disk),
            "workers of the shared Ray": workers,
            "cores of the shared Ray": cpus[0] + workers * cpus[1],
            "memory of the shared Ray": gib[0] + workers * gib[1],
            "disk of the shared Ray": room[0] + workers * room[1],
            "Kubernetes: nodes of 16 cores": nodes,
            "Kubernetes: image pulled": 7 * nodes,
            "Anyscale: machines of 4 vCPUs": machines * people,
            "Anyscale: image": 7 * machines * people,
            "Codespaces: packages": 7 * people,
            "one shared machine: packages": 7,
            "Codespaces: machines of 2 cores and 8 GB": people,
            "[one shared machine](#one-shared-machine): memory for lesson 02/02": round(
                float(all_of_them) + people * float(each)
            ),
            "laptops over the room's network: packages in the first ten minutes": 7
            * people,
            "laptops from sticks: GB over the network": 0,
        }
        assert {name: row[column] for name, row in table.items()} == wanted
    gives = (
        r"least (\d+) cores .*, (\d+) GiB of memory \((\d+)Ki\) and (\d+) GiB of disk"
    )
    cores, most, in_ki, space = map(int, re.findall(gives, page)[0])
    assert most * 2**20 == in_ki and f"({space * 2**30})" in page
    pods = cpus[0] + 5 * cpus[1], gib[0] + 5 * gib[1], room[0] + 5 * room[1]
    seats = 7 * seat["cpu"]["guarantee"], 7 * memory * 10**9 / 2**30, 7 * disk[0]
    for pod, seat, there, offer in zip(pods, seats, (cores, most, space), (16, 58, 93)):
        assert max(pod, seat) <= there <= offer


# What of the page kind.yml leaves out or does in another way, by a piece of the command.
NOT_ON_KIND = {
    "export REGISTRY": "the workflow's `env` has the names",
    "docker push": "there is no registry: `kind load` puts the image on the node",
    "docker-registry pull": "there is no registry",
    "serviceaccount default": "there is no registry",
    "kuberay/room |": "kuberay/kind holds it, with a volume for one node",
    "kuberay/cluster |": "kuberay/kind holds it, smaller",
    "kuberay/gpu |": "no GPU",
    "workshop-gpu": "no GPU",
    '"value": 16': "the machine has four cores",
    "prometheus-grafana": "nobody looks at Grafana",
    "RAY_AUTH_TOKEN_PATH": "tests/tools/hub.py sets it in a seat",
    "http://workshop-head-svc": "tests/tools/hub.py asks from a seat for the list of jobs",
    "kill $(jobs -p)": "the machine ends",
}
SMALLER = {  # what the workflow adds to a command of the page, or changes in it
    " --build-arg TORCH_BACKEND=cpu": "",
    " --set singleuser.cpu.guarantee=0.5 --set singleuser.memory.guarantee=3G": "",
    "Placeholder.replicas=1 ": "Placeholder.replicas=30 ",
}


def steps_of_the_page(text: str) -> dict[str, str]:
    """Return the numbered steps of Kubernetes and the hub: names, and all commands."""
    text = text[text.index("## Kubernetes\n") : text.index("## Anyscale\n")]
    found = re.findall(r"^\*\*\d+\. (.+?)[.,:]?\*\*|^### (Who .+)$", text, re.MULTILINE)
    names = [numbered or heading for numbered, heading in found]
    blocks = re.findall(r"^```bash\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return dict.fromkeys(names, "") | {"": "".join(blocks)}


def test_kind_goes_through_the_steps_of_the_page():
    page = steps_of_the_page((CLUSTER / "README.md").read_text())
    workflow = yaml.safe_load((ROOT / ".github/workflows/kind.yml").read_text())
    assert workflow["permissions"] == {"contents": "read"}
    (job,) = workflow["jobs"].values()
    assert job["timeout-minutes"]
    done = {step["name"]: step["run"] for step in job["steps"] if "run" in step}
    uses = [step["uses"] for step in job["steps"] if "uses" in step]
    assert all(re.search(r"@[0-9a-f]{40}$", each) for each in uses)
    assert page.keys() - {"", "GPUs", "The door"} <= done.keys()
    run = "\n".join(done.values())
    for ours, theirs in SMALLER.items():
        assert ours in run
        run = run.replace(ours, theirs)
    lines = [line.strip() for line in page[""].splitlines()]
    assert len(lines) > 40
    for line in lines:
        left_out = [piece for piece in NOT_ON_KIND if piece in line]
        assert left_out or line in run, f"kind.yml does not run {line!r}"
    for piece in NOT_ON_KIND:
        assert any(piece in line for line in lines), f"no command has {piece!r}"
    # bash -e goes on after `! command`, whatever that does
    assert not re.search(r"^\s*!", run, re.M)


def test_every_job_that_the_page_submits_asks_for_a_cpu():
    """Else its driver runs on the head."""
    text = (CLUSTER / "README.md").read_text().partition("## Kubernetes\n")[2]
    lines = re.findall(r"^ray job submit .*$", text, re.MULTILINE)
    assert len(lines) >= 2
    assert [line for line in lines if "--entrypoint-num-cpus=1 " not in line] == []


def test_a_correction_comes_beside_what_somebody_has_edited(tmp_path):
    """By the hub's own lines, at each start of a seat."""
    (values,) = documents(CLUSTER / "hub" / "values.yaml")
    hooks = values["singleuser"]["lifecycleHooks"]
    *shell, script = hooks["postStart"]["exec"]["command"]
    (lessons := tmp_path / "opt").mkdir()
    script = script.replace("/opt/workshop", str(lessons))
    for commit, text in (("friday", "1"), ("friday", "2"), ("sunday", "3")):
        (lessons / "lesson").write_text(text)
        own = {"HOME": str(tmp_path), "WORKSHOP_COMMIT": commit}
        own["PATH"] = os.environ["PATH"]
        subprocess.run([*shell, script], env=own, check=True, timeout=PATIENCE)
        (tmp_path / "workshop-friday" / "lesson").write_text("mine")
    found = {p.parent.name: p.read_text() for p in tmp_path.glob("workshop-*/lesson")}
    assert found == {"workshop-friday": "mine", "workshop-sunday": "3"}


def test_the_door_of_github_is_no_second_door():
    """The chart's schema knows the page's values, and no list of names is left in force."""
    door = re.findall(
        r"^```yaml\n(hub:.*?)^```", (CLUSTER / "README.md").read_text(), re.M | re.S
    )
    (values,) = map(yaml.safe_load, door)
    assert schema_faults("hub", values) == []
    assert values["hub"]["config"]["Authenticator"] == {"allowed_users": []}


def test_what_ray_is_said_to_do_it_does():
    """Ports, the list for Prometheus, the share of memory, the time of a drain."""
    proportion = 'RAY_DEFAULT_OBJECT_STORE_MEMORY_PROPORTION",\n    0.3,'
    facts = {
        "_private/ray_constants.py": [
            '"prom_metrics_service_discovery.json"',
            '"RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S", 30.0',
            proportion,
        ],
        "dashboard/consts.py": ["44227"],
    }
    for name, texts in facts.items():
        for text in texts:
            assert text in (RAY_FILES / name).read_text(), f"{name}: {text}"


def test_every_metric_of_the_page_is_one_of_ray():
    """Ray's own dashboards ask for it."""
    text = (CLUSTER / "monitoring" / "README.md").read_text()
    names = set(re.findall(r"\b(?:ray|autoscaler)_\w+", text)) - {
        "ray_train",
        "ray_io_cluster",
    }
    folder = RAY_FILES / "dashboard" / "modules" / "metrics" / "dashboards"
    known = "".join(path.read_text() for path in folder.glob("*.py"))
    assert len(names) >= 5
    for name in names | {"ray_data_surprise"}:
        asked = re.search(rf"\b{name}\b", known)
        assert bool(asked) == (name != "ray_data_surprise"), name


LOAD = """
import sys, yaml
from anyscale.compute_config.models import ComputeConfig
from anyscale.job.models import JobConfig
from anyscale.workspace.models import WorkspaceConfig

kinds = {"compute": ComputeConfig, "job": JobConfig, "workspace": WorkspaceConfig}
for path in sys.argv[1:]:
    with open(path) as file:
        document = yaml.safe_load(file)
    kinds[path.rpartition("/")[2].partition(".")[0]].from_dict(document)
"""


@pytest.mark.weekly
def test_anyscale_takes_its_files_and_commands(tmp_path):
    """In an environment of its own: it wants another dateutil than the pinned one."""
    folder = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", folder], check=True, timeout=PATIENCE)
    python = folder / "bin" / "python"
    install = [python, "-m", "pip", "install", "--quiet", ANYSCALE]
    subprocess.run(install, check=True, timeout=PATIENCE)
    paths = sorted((CLUSTER / "anyscale").glob("*.yaml"))
    assert len(paths) == 4
    subprocess.run([python, "-c", LOAD, *paths], check=True, timeout=PATIENCE)
    for path in paths:
        wrong = tmp_path / path.name
        wrong.write_text(path.read_text() + "surprise: 1\n")
        load = [python, "-c", LOAD, wrong]
        assert subprocess.run(load, capture_output=True, timeout=PATIENCE).returncode, (
            path
        )
    page = (CLUSTER / "README.md").read_text().partition("## Anyscale\n")[2]
    commands = re.findall(r"anyscale (?:[a-z][\w-]+ )+--[^;\n`]+", page)
    assert len(commands) >= 9
    for line in commands:
        words = shlex.split(line)
        command = list(itertools.takewhile(lambda word: word[0] != "-", words))
        ask = [folder / "bin" / command[0], *command[1:], "--help"]
        said = subprocess.check_output(ask, text=True, timeout=PATIENCE)
        assert all(word in said for word in words if word.startswith("--")), line
