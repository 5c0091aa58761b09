"""cluster/: every file fits its schema and our rules, and each rule sees a broken copy.

KubeRay's schemas are in the folder that WORKSHOP_KUBERAY_SCHEMAS names; else they are
downloaded once, into build/.
"""

import copy
import functools
import importlib.util
import os
import re
import subprocess
import sys
import urllib.request
from pathlib import Path

import jsonschema
import kubernetes_validate
import pytest
import yaml

from tests import manifests
from tests.manifests import CLUSTER, KUBERAY, RAY, ROOT, documents
from tests.patience import PATIENCE
from utils import checkpoint_files

pytestmark = pytest.mark.part02
TAG = "v1.7.0"
CHART = f"https://raw.githubusercontent.com/ray-project/kuberay/{TAG}/helm-chart"
SCHEMAS = {  # the name of the file in our folder, and where it is in KubeRay's charts
    "ray.io_rayclusters.yaml": "kuberay-operator/crds/ray.io_rayclusters.yaml",
    "ray.io_rayjobs.yaml": "kuberay-operator/crds/ray.io_rayjobs.yaml",
    "ray-cluster.values.yaml": "ray-cluster/values.yaml",
}
KUBERNETES = "1.37"
ANYSCALE = "anyscale==0.26.112"
RAY_FILES = Path(importlib.util.find_spec("ray").origin).parent
PAGES = sorted(CLUSTER.rglob("*.md"))
FILES = sorted(p for p in CLUSTER.rglob("*") if p.is_file() and p.suffix != ".png")
CLUSTERS = manifests.clusters()


@functools.cache  # where there is no network, it is waited for once
def schemas() -> Path | None:
    """The folder with KubeRay's files, at the tag that our pages name."""
    if named := os.environ.get("WORKSHOP_KUBERAY_SCHEMAS"):
        return Path(named)
    folder = ROOT / "build" / f"kuberay-{TAG}"
    folder.mkdir(parents=True, exist_ok=True)
    for name in SCHEMAS:
        if not (folder / name).exists():
            try:
                with urllib.request.urlopen(
                    f"{CHART}/{SCHEMAS[name]}", timeout=PATIENCE
                ) as file:
                    content = file.read()
            except OSError:
                return None
            with checkpoint_files.write_whole(folder / name) as file:
                file.write(content)
    return folder


def schema_text(name: str) -> str:
    """A file of KubeRay; the test is skipped where it cannot be had."""
    if schemas() is None:
        pytest.skip("KubeRay's schemas are not here and cannot be downloaded")
    return (schemas() / name).read_text()


def strict(schema):
    """A copy of a schema that refuses what it does not know, as `kubectl apply` does."""
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
def kuberay_validator(kind: str) -> jsonschema.Draft202012Validator:
    name = {"RayCluster": "ray.io_rayclusters.yaml", "RayJob": "ray.io_rayjobs.yaml"}
    definition = yaml.load(schema_text(name[kind]), yaml.CSafeLoader)
    versions = {each["name"]: each for each in definition["spec"]["versions"]}
    schema = versions["v1"]["schema"]["openAPIV3Schema"]
    return jsonschema.Draft202012Validator(strict(schema))


def schema_faults(document: dict) -> list[str]:
    """What the schema of its kind says against a manifest."""
    assert document["apiVersion"] == "ray.io/v1"
    found = kuberay_validator(document["kind"]).iter_errors(document)
    return [f"{'.'.join(map(str, error.path))}: {error.message}" for error in found]


def helm_clusters() -> dict[str, dict]:
    (values,) = documents(KUBERAY / "helm-values.yaml")
    (more,) = documents(KUBERAY / "helm-values.gpu.yaml")
    both = manifests.merged(values, more)
    return {"cpu": manifests.from_helm(values), "gpu": manifests.from_helm(both)}


RAY_MANIFESTS = {path.name: documents(path)[0] for path in KUBERAY.glob("ray-*.yaml")}
RAY_MANIFESTS |= {f"helm {name}": each for name, each in helm_clusters().items()}


def test_every_file_is_under_a_rule():
    assert len(FILES) > 15
    for path in FILES:
        assert manifests.rule_of(path), f"no rule for {path}: add it to COVERED"
    for pattern in manifests.COVERED:
        assert list(CLUSTER.glob(pattern)), f"{pattern} is the name of no file"
    assert manifests.rule_of(CLUSTER / "kuberay" / "surprise.yaml") is None


@pytest.mark.parametrize("name", RAY_MANIFESTS)
def test_kuberay_takes_it(name):
    assert schema_faults(RAY_MANIFESTS[name]) == []


BROKEN_FOR_KUBERAY = {
    "a word is misspelled": lambda spec: spec.update(rayVersoin=RAY),
    "a mode that is none": lambda spec: spec["authOptions"].update(mode="password"),
    "no head": lambda spec: spec.pop("headGroupSpec"),
    "a number for a text": lambda spec: spec["headGroupSpec"]["rayStartParams"].update(
        {"num-cpus": 0}
    ),
    "a key of a container that is none": lambda spec: pod(spec)["containers"][0].update(
        volumeMount=[]
    ),
}


def pod(spec: dict, number: int = 0) -> dict:
    """The specification of the head's pod, or of a group's."""
    return list(manifests.pods(spec))[number][1]


@pytest.mark.parametrize("fault", BROKEN_FOR_KUBERAY)
@pytest.mark.parametrize("name", ["ray-cluster.cpu.yaml", "ray-job.gpu.yaml"])
def test_kuberay_refuses(name, fault):
    broken = copy.deepcopy(RAY_MANIFESTS[name])
    BROKEN_FOR_KUBERAY[fault](broken["spec"].get("rayClusterSpec", broken["spec"]))
    assert schema_faults(broken)


def kubernetes_objects() -> dict[str, dict]:
    """What Kubernetes itself has a schema of: our objects, and the pods of Ray."""
    found = {}
    for name in ("namespace", "storage", "network-policy"):
        (found[name],) = documents(KUBERAY / f"{name}.yaml")
    for file, spec in CLUSTERS.items():
        for name, each in manifests.pods(spec):
            found[f"{file}, {name}"] = each
    for path in KUBERAY.glob("ray-job.*"):
        template = documents(path)[0]["spec"]["submitterPodTemplate"]
        found[f"{path.name}, submitter"] = template["spec"]
    head = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "ray"}}
    return {n: d if "kind" in d else head | {"spec": d} for n, d in found.items()}


OBJECTS = kubernetes_objects()


@pytest.mark.parametrize("name", OBJECTS)
def test_kubernetes_takes_it(name):
    kubernetes_validate.validate(OBJECTS[name], KUBERNETES, strict=True)


@pytest.mark.parametrize(
    ("name", "path", "value"),
    [
        ("storage", ["spec", "accessMode"], ["ReadWriteMany"]),
        ("network-policy", ["spec", "ingress", 0, "form"], []),
        ("namespace", ["metadata", "labels"], "restricted"),
        ("ray-cluster.cpu.yaml, head", ["spec", "securityContext", "fsGroup"], "ray"),
        ("helm-values.gpu.yaml, group gpu", ["spec", "toleration"], []),
    ],
)
def test_kubernetes_refuses(name, path, value):
    broken = copy.deepcopy(OBJECTS[name])
    *way, last = path
    functools.reduce(lambda part, key: part[key], way, broken)[last] = value
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(broken, KUBERNETES, strict=True)


def chart_keys() -> set[str]:
    """The keys of the chart, as "head.ports": in values.yaml many are commented out."""
    found, top = set(), None
    for line in schema_text("ray-cluster.values.yaml").splitlines():
        if match := re.match(r"(\w+):", line):
            top = match[1]
            found.add(top)
        elif match := re.match(r"  (?:# )?(\w+):(?: \S*)?$", line):
            found.add(f"{top}.{match[1]}")
    return found


def unknown_keys(values: dict) -> set[str]:
    used = {
        f"{top}.{key}"
        for top, part in values.items()
        if isinstance(part, dict)
        for key in part
    }
    return {*values, *used} - chart_keys()


@pytest.mark.parametrize(
    "path", sorted(KUBERAY.glob("helm-values*.yaml")), ids=lambda p: p.name
)
def test_the_chart_knows_our_values(path):
    (values,) = documents(path)
    assert unknown_keys(values) == set()
    broken = values | {"heads": {}, "worker": values["worker"] | {"maxReplica": 3}}
    broken["worker"]["livenessProbe"] = {}
    assert unknown_keys(broken) == {
        "heads",
        "worker.maxReplica",
        "worker.livenessProbe",
    }


@pytest.mark.parametrize("name", CLUSTERS)
def test_a_ray_cluster_is_under_our_rules(name):
    assert manifests.faults(name, CLUSTERS[name]) == []


def head(spec):
    return pod(spec)["containers"][0]


def worker(spec):
    return pod(spec, 1)["containers"][0]


def variable(container, name, value):
    """Set a variable of a container, or take it away."""
    container["env"] = [each for each in container["env"] if each["name"] != name]
    if value is not None:
        container["env"].append({"name": name, "value": value})


def set_in(*path_and_value):
    """A function that sets a value in the specification of a Ray cluster."""
    *path, last, value = path_and_value

    def breaks(spec):
        functools.reduce(lambda part, key: part[key], path, spec)[last] = value

    return breaks


HEAD_POD = ("headGroupSpec", "template", "spec")
POD = ("workerGroupSpecs", 0, "template", "spec")
BOX = (*POD, "containers", 0)
BROKEN = [
    ("image", "the newest", set_in(*BOX, "image", "registry.example.com/ray:latest")),
    ("image", "no tag", set_in(*BOX, "image", "registry.example.com/ray")),
    ("image", "no registry", set_in(*BOX, "image", f"ray:{RAY}")),
    ("image", "another Ray", set_in("rayVersion", "2.59.0")),
    ("resources", "no limits", set_in(*BOX, "resources", "limits", {"memory": "8Gi"})),
    ("resources", "less asked", set_in(*BOX, "resources", "requests", "cpu", "1")),
    ("resources", "autoscaler", set_in("autoscalerOptions", "resources", {})),
    (
        "head_trains_nothing",
        "two CPUs",
        set_in("headGroupSpec", "rayStartParams", {"num-cpus": "2"}),
    ),
    ("head_trains_nothing", "all CPUs", set_in("headGroupSpec", "rayStartParams", {})),
    (
        "head_trains_nothing",
        "a GPU",
        lambda spec: head(spec)["resources"]["limits"].update({"nvidia.com/gpu": "1"}),
    ),
    ("storage", "not mounted", lambda spec: worker(spec)["volumeMounts"].pop(0)),
    (
        "storage",
        "read only",
        lambda spec: worker(spec)["volumeMounts"][0].update(readOnly=True),
    ),
    (
        "storage",
        "written elsewhere",
        lambda spec: variable(worker(spec), "WORKSHOP_STORAGE", "/tmp/results"),
    ),
    (
        "storage",
        "another claim",
        set_in(*POD, "volumes", 0, "persistentVolumeClaim", "claimName", "other"),
    ),
    ("normal_user", "root", set_in(*POD, "securityContext", "runAsUser", 0)),
    ("normal_user", "root may", set_in(*POD, "securityContext", "runAsNonRoot", False)),
    (
        "normal_user",
        "volume of root",
        lambda spec: pod(spec)["securityContext"].pop("fsGroup"),
    ),
    ("normal_user", "privileged", set_in(*BOX, "securityContext", "privileged", True)),
    (
        "normal_user",
        "capabilities",
        set_in(*BOX, "securityContext", "capabilities", {}),
    ),
    ("shared_memory", "on disk", set_in(*POD, "volumes", 1, "emptyDir", {})),
    (
        "shared_memory",
        "too small",
        set_in(*POD, "volumes", 1, "emptyDir", "sizeLimit", "1Gi"),
    ),
    (
        "shared_memory",
        "all of it",
        set_in(*POD, "volumes", 1, "emptyDir", "sizeLimit", "64Gi"),
    ),
    (
        "ports",
        "Ray Client",
        lambda spec: head(spec)["ports"].append(
            {"name": "client", "containerPort": 10001}
        ),
    ),
    (
        "ports",
        "a name of ours",
        lambda spec: worker(spec)["ports"][0].update(name="numbers"),
    ),
    ("probes", "none", lambda spec: worker(spec).pop("livenessProbe")),
    (
        "probes",
        "another port",
        set_in(*BOX, "readinessProbe", "httpGet", "port", 8265),
    ),
    (
        "no_secret",
        "a token",
        lambda spec: variable(worker(spec), "RAY_AUTH_TOKEN", "secret"),
    ),
    (
        "no_secret",
        "a key",
        lambda spec: variable(head(spec), "AWS_SECRET_ACCESS_KEY", "secret"),
    ),
    ("not_public", "public", set_in("headGroupSpec", "serviceType", "LoadBalancer")),
    ("not_public", "on nodes", set_in("headGroupSpec", "serviceType", "NodePort")),
    (
        "not_public",
        "own service",
        set_in("headGroupSpec", "headService", {"spec": {"type": "LoadBalancer"}}),
    ),
    ("not_public", "ingress", set_in("headGroupSpec", "enableIngress", True)),
    ("token", "switched off", set_in("authOptions", {"mode": "disabled"})),
    ("token", "not said", lambda spec: spec.pop("authOptions")),
    ("autoscaling", "switched off", set_in("enableInTreeAutoscaling", False)),
    (
        "autoscaling",
        "no bound",
        lambda spec: spec["workerGroupSpecs"][0].pop("maxReplicas"),
    ),
    ("autoscaling", "upside down", set_in("workerGroupSpecs", 0, "minReplicas", 5)),
    ("autoscaling", "a thousand", set_in("workerGroupSpecs", 0, "maxReplicas", 1000)),
    ("autoscaling", "for ever", set_in("autoscalerOptions", "idleTimeoutSeconds", 0)),
    (
        "autoscaling",
        "a secret",
        lambda spec: variable(head(spec), "WORKSHOP_AUTOSCALING", None),
    ),
    ("gpus", "CPU mode", lambda spec: variable(head(spec), "WORKSHOP_MODE", "auto")),
    ("gpus", "no label", lambda spec: pod(spec, 1).update(nodeSelector={"gpu": "yes"})),
    (
        "gpus",
        "not tolerated",
        lambda spec: pod(spec, 1).update(tolerations=[{"key": "gpu"}]),
    ),
    (
        "gpus",
        "two",
        lambda spec: worker(spec)["resources"]["limits"].update(
            {"nvidia.com/gpu": "2"}
        ),
    ),
    (
        "dashboards",
        "nowhere",
        lambda spec: variable(head(spec), "RAY_GRAFANA_HOST", None),
    ),
    (
        "dashboards",
        "not here",
        lambda spec: variable(
            head(spec), "RAY_GRAFANA_IFRAME_HOST", "http://grafana.example.com"
        ),
    ),
]


@pytest.mark.parametrize(
    ("rule", "breaks"),
    [(rule, breaks) for rule, _, breaks in BROKEN],
    ids=[f"{rule}-{what}" for rule, what, _ in BROKEN],
)
def test_a_rule_sees_a_broken_cluster(rule, breaks):
    broken = copy.deepcopy(CLUSTERS["ray-cluster.gpu.yaml"])
    breaks(broken)
    found = manifests.faults("ray-cluster.gpu.yaml", broken)
    assert rule in {fault.partition(":")[0] for fault in found}


def test_a_gpu_in_a_cluster_of_cpus_is_seen():
    broken = copy.deepcopy(CLUSTERS["ray-cluster.cpu.yaml"])
    worker(broken)["resources"]["limits"]["nvidia.com/gpu"] = "1"
    assert len(list(manifests.gpus(broken))) == 1


def test_a_helm_cluster_without_its_token_is_seen():
    """In all three kinds of containers, as the chart knows no `authOptions`."""
    for number in range(3):
        broken = copy.deepcopy(CLUSTERS["helm-values.yaml"])
        boxes = [head(broken), worker(broken), broken["autoscalerOptions"]]
        variable(boxes[number], "RAY_AUTH_TOKEN", None)
        assert len(list(manifests.token(broken))) == 1


def test_every_rule_is_seen_to_fail():
    assert {rule for rule, _, _ in BROKEN} == {
        rule.__name__ for rule in manifests.RULES
    }
    broken = {manifests.rule_of(CLUSTER / name) for name, _, _ in BROKEN_FILES}
    assert broken == {rule for rule in manifests.COVERED.values() if callable(rule)}


def read(path: Path) -> list:
    """What the rule of a file looks at: its documents, or its text."""
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
    ("anyscale/Containerfile", "torch==2", "torch==1"),
    ("anyscale/Containerfile", f"ray:{RAY}", "ray:latest"),
    ("anyscale/compute.cpu.yaml", "max_nodes: 2", "max_nodes: 10"),
    ("anyscale/compute.gpu.yaml", "CPU: 0", "CPU: 4"),
    ("anyscale/workspace.yaml", "idle_termination_minutes: 60", "tags: {}"),
    ("anyscale/workspace.yaml", "pytorch-cpu", "pytorch-tpu"),
    ("anyscale/job.yaml", "timeout_s: 3600", "timeout_s: 360000"),
    ("anyscale/job.yaml", "train_ray_ddp.py", "train_ray.py"),
    ("anyscale/job.yaml", "image/distributed-pytorch:1", "ray:2.60.0"),
    ("anyscale/job.yaml", ".venv, ", ""),
    ("kuberay/namespace.yaml", "restricted", "privileged"),
    ("kuberay/network-policy.yaml", 'ray.io/is-ray-node: "yes"', "app: ray"),
    ("kuberay/network-policy.yaml", "port: 44217", "port: 10001"),
    ("kuberay/network-policy.yaml", "        - port: 8265\n", "        []\n"),
    ("kuberay/network-policy.yaml", "policyTypes: [Ingress]", "policyTypes: [Egress]"),
    ("kuberay/pod-monitor.yaml", "release: prometheus", "release: mine"),
    ("kuberay/pod-monitor.yaml", "[workshop]", "[default]"),
    ("kuberay/pod-monitor.yaml", "port: as-metrics", "port: autoscaler"),
    ("kuberay/pod-monitor.yaml", "ray_io_cluster", "cluster"),
    ("kuberay/prometheus-stack-values.yaml", "Viewer", "Admin"),
    ("kuberay/prometheus-stack-values.yaml", "ClusterIP", "LoadBalancer"),
    ("kuberay/prometheus-stack-values.yaml", "allow_embedding: true", "x: true"),
    ("kuberay/prometheus-stack-values.yaml", "label: grafana_dashboard", "label: mine"),
    ("kuberay/ray-job.cpu.yaml", "train_ray_ddp.py", "train_ray.py"),
    ("kuberay/ray-job.cpu.yaml", "shutdownAfterJobFinishes: true", "suspend: false"),
    ("kuberay/ray-job.cpu.yaml", "maxReplicas: 4", "maxReplicas: 8"),
    ("kuberay/ray-job.gpu.yaml", "component: submitter", "component: other"),
    ("kuberay/storage.yaml", "ReadWriteMany", "ReadWriteOnce"),
    ("kuberay/storage.yaml", "storageClassName: shared-files", "volumeName: one"),
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
    """The files that the commands of a page name, from the root of the repository."""
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
    used = {ROOT / name for name in named_files(text)}
    assert {path for path in FILES if path.suffix != ".md"} <= used
    assert set(re.findall(r"--version (1\.\d+\.\d+)", text)) == {TAG.removeprefix("v")}
    assert set(re.findall(r"pytorch:(\d+\.\S+)", text)) == {RAY}


def test_what_ray_is_said_to_do_it_does():
    """Ports, the health address, the list for Prometheus, the share of memory."""
    proportion = 'RAY_DEFAULT_OBJECT_STORE_MEMORY_PROPORTION",\n    0.3,'
    facts = {
        "_private/ray_constants.py": [
            '"prom_metrics_service_discovery.json"',
            "52365",
            proportion,
        ],
        "dashboard/consts.py": ["44227"],
        "dashboard/http_server_agent.py": [f'"{manifests.HEALTH["path"]}"'],
        "autoscaler/_private/constants.py": ["44217"],
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
def test_anyscale_takes_its_files(tmp_path):
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
