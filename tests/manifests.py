"""What the files of `02-ddp-pytorch-ray/cluster` have to hold beyond a schema: our rules.

A rule takes a manifest and yields a sentence per fault. `clusters` finds the Ray clusters:
those that are written out, and what Helm makes of the values.
"""

import copy
import fnmatch
import itertools
import re
from collections.abc import Iterator
from pathlib import Path

import yaml
from packaging.requirements import Requirement

from tests.tools.notebooks import ROOT
from tests.workflow import gate_python

CLUSTER = ROOT / "02-ddp-pytorch-ray" / "cluster"
KUBERAY = CLUSTER / "kuberay"
CONSTRAINTS = (ROOT / "constraints.txt").read_text()
RAY = re.search(r"^ray==(\S+)$", CONSTRAINTS, re.MULTILINE)[1]
HEAD_PORTS = {"gcs-server": 6379, "dashboard": 8265, "metrics": 8080}
HEAD_PORTS |= {"as-metrics": 44217, "dash-metrics": 44227}
WORKER_PORTS = {"metrics": 8080}
HEALTH = {"path": "/api/healthz", "port": 52365}
UNITS = {"Mi": 2**20, "Gi": 2**30}


def documents(path: Path) -> list[dict]:
    """All documents of a YAML file; there is one at least."""
    every = yaml.load_all(path.read_text(), yaml.CSafeLoader)  # ten times as fast
    found = [each for each in every if each]
    assert found, f"{path} is empty"
    return found


def merged(values: dict, more: dict) -> dict:
    """What Helm makes of two files of values: maps are merged, all else is replaced."""
    both = copy.deepcopy(values)
    for key, value in more.items():
        old = both.get(key)
        maps = isinstance(old, dict) and isinstance(value, dict)
        both[key] = merged(old, value) if maps else copy.deepcopy(value)
    return both


def from_helm(values: dict) -> dict:
    """The RayCluster that the chart ray-cluster 1.7.0 makes of these values.

    Written after its template, helm-chart/ray-cluster/templates/raycluster-cluster.yaml.
    """
    image = values["image"]

    def pod(name: str, part: dict) -> dict:
        env = values["common"]["containerEnv"] + part.get("containerEnv", [])
        container = {"name": name, "env": env, "imagePullPolicy": image["pullPolicy"]}
        container["image"] = f"{image['repository']}:{image['tag']}"
        for key in ("ports", "resources", "securityContext", "volumeMounts"):
            container[key] = part[key]
        spec = {"containers": [container], "volumes": part["volumes"]}
        spec["securityContext"] = part["podSecurityContext"]
        spec |= {k: part[k] for k in ("nodeSelector", "tolerations") if k in part}
        return {
            "rayStartParams": part.get("rayStartParams", {}),
            "template": {"spec": spec},
        }

    head, worker = values["head"], values["worker"]
    names = ("groupName", "replicas", "minReplicas", "maxReplicas")
    spec = {"headGroupSpec": pod("ray-head", head)}
    spec["headGroupSpec"]["serviceType"] = values["service"]["type"]
    for key in ("rayVersion", "enableInTreeAutoscaling", "autoscalerOptions"):
        spec[key] = head[key]
    group = {name: worker[name] for name in names} | pod("ray-worker", worker)
    metadata = {"name": values["fullnameOverride"]}
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayCluster",
        "metadata": metadata,
        "spec": spec | {"workerGroupSpecs": [group]},
    }


def clusters() -> dict[str, dict]:
    """By the name of its file, the specification of every Ray cluster."""
    found = {}
    for path in sorted(KUBERAY.glob("ray-*.yaml")):
        (document,) = documents(path)
        spec = document["spec"]
        found[path.name] = spec.get("rayClusterSpec", spec)
    (values,) = documents(KUBERAY / "helm-values.yaml")
    (more,) = documents(KUBERAY / "helm-values.gpu.yaml")
    found["helm-values.yaml"] = from_helm(values)["spec"]
    found["helm-values.gpu.yaml"] = from_helm(merged(values, more))["spec"]
    return found


def pods(spec: dict) -> Iterator[tuple[str, dict]]:
    """The pods of a Ray cluster: what each is, and its specification."""
    yield "head", spec["headGroupSpec"]["template"]["spec"]
    for group in spec["workerGroupSpecs"]:
        yield f"group {group['groupName']}", group["template"]["spec"]


def containers(spec: dict) -> Iterator[tuple[str, dict, dict]]:
    """The container of Ray in every pod, with the pod."""
    for name, pod in pods(spec):
        yield name, pod, pod["containers"][0]


def environment(container: dict) -> dict:
    """By name, the variables of a container: a text, or where the value comes from."""
    variables = container.get("env", [])
    return {
        each["name"]: each.get("value", each.get("valueFrom")) for each in variables
    }


def quantity(text: str) -> float:
    """Bytes of an amount of memory, as "8Gi"."""
    return float(text[:-2]) * UNITS[text[-2:]]


def image(spec: dict) -> Iterator[str]:
    """Images come from a registry that is named, at the pinned Ray."""
    found = [container["image"] for _, _, container in containers(spec)]
    if len(set(found)) > 1:
        yield f"pods run different images: {sorted(set(found))}"
    for name in found:
        host, _, rest = name.partition("/")
        if "." not in host or rest.partition(":")[2] != RAY:
            yield f"image {name}: name the registry, and the tag {RAY}"
    if spec.get("rayVersion") != RAY:
        yield f"rayVersion is {spec.get('rayVersion')}, and {RAY} is pinned"


def resources(spec: dict) -> Iterator[str]:
    """Requests equal limits, for CPU and memory at least."""
    all_of_them = [(name, container) for name, _, container in containers(spec)]
    for name, each in [*all_of_them, ("autoscaler", spec["autoscalerOptions"])]:
        asked = each.get("resources", {})
        if not {"cpu", "memory"} <= asked.get("limits", {}).keys():
            yield f"{name}: limit CPU and memory"
        if asked.get("requests") != asked.get("limits"):
            yield f"{name}: requests differ from limits"


def head_trains_nothing(spec: dict) -> Iterator[str]:
    """The head offers Ray no CPU and no GPU."""
    if spec["headGroupSpec"]["rayStartParams"].get("num-cpus") != "0":
        yield 'the head runs training: set num-cpus to "0"'
    (_, _, head), *_ = containers(spec)
    if "nvidia.com/gpu" in head["resources"]["limits"]:
        yield "the head takes a GPU"


def storage(spec: dict) -> Iterator[str]:
    """Scripts write to a claim that all pods mount."""
    (claim,) = documents(KUBERAY / "storage.yaml")
    for name, pod, container in containers(spec):
        claims = {
            volume["name"]
            for volume in pod["volumes"]
            if volume.get("persistentVolumeClaim", {}).get("claimName")
            == claim["metadata"]["name"]
        }
        mounts = {
            mount["mountPath"]
            for mount in container["volumeMounts"]
            if mount["name"] in claims and not mount.get("readOnly")
        }
        if environment(container).get("WORKSHOP_STORAGE") not in mounts:
            yield f"{name}: WORKSHOP_STORAGE is not on the shared volume"


def normal_user(spec: dict) -> Iterator[str]:
    """No pod runs as root, and the volume is made writable by its group."""
    for name, pod, container in containers(spec):
        user = pod.get("securityContext", {})
        if not user.get("runAsNonRoot") or not user.get("runAsUser"):
            yield f"{name}: runs as root"
        if not user.get("fsGroup"):
            yield f"{name}: fsGroup is missing, so the volume belongs to root"
        yield from locked_down(name, container)
    yield from locked_down("autoscaler", spec["autoscalerOptions"])


def locked_down(name: str, container: dict) -> Iterator[str]:
    context = container.get("securityContext", {})
    if context.get("allowPrivilegeEscalation") is not False or context.get(
        "privileged"
    ):
        yield f"{name}: may gain privileges"
    if context.get("capabilities", {}).get("drop") != ["ALL"]:
        yield f"{name}: keeps capabilities of root"


def shared_memory(spec: dict) -> Iterator[str]:
    """/dev/shm is in memory, and holds the 30% that Ray takes for objects."""
    for name, pod, container in containers(spec):
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        mounts = {m["mountPath"]: volumes[m["name"]] for m in container["volumeMounts"]}
        shared = mounts.get("/dev/shm", {}).get("emptyDir", {})
        limit = quantity(container["resources"]["limits"]["memory"])
        size = quantity(shared.get("sizeLimit", "0Gi"))
        if shared.get("medium") != "Memory" or not 0.3 * limit <= size <= 0.5 * limit:
            yield f"{name}: /dev/shm is not 30% to 50% of its memory"


def ports(spec: dict) -> Iterator[str]:
    """Ports are Ray's, no others, by the names that KubeRay and the monitors look for."""
    for name, _, container in containers(spec):
        found = {port["name"]: port["containerPort"] for port in container["ports"]}
        wanted = HEAD_PORTS if name == "head" else WORKER_PORTS
        if found != wanted:
            yield f"{name}: ports are {found}, not {wanted}"


def probes(spec: dict) -> Iterator[str]:
    """Kubernetes asks Ray for its health, at the address that needs no token."""
    for name, _, container in containers(spec):
        for probe in ("livenessProbe", "readinessProbe"):
            if container.get(probe, {}).get("httpGet") != HEALTH:
                yield f"{name}: {probe} does not ask {HEALTH}"


def no_secret(spec: dict) -> Iterator[str]:
    """Nothing secret is typed into a manifest."""
    found = [environment(container) for _, _, container in containers(spec)]
    for variables in [*found, environment(spec["autoscalerOptions"])]:
        for name, value in variables.items():
            secret = re.search(r"TOKEN|PASSWORD|SECRET|KEY|CREDENTIAL", name)
            if secret and isinstance(value, str):
                yield f"{name} is typed into the manifest: take it from a secret"


def not_public(spec: dict) -> Iterator[str]:
    """The service of the head is for the inside of the cluster."""
    head = spec["headGroupSpec"]
    own = head.get("headService", {}).get("spec", {}).get("type", "ClusterIP")
    if {head.get("serviceType", "ClusterIP"), own} != {"ClusterIP"}:
        yield "the head's service can be reached from outside"
    if head.get("enableIngress"):
        yield "the head has an ingress"


def token(spec: dict) -> Iterator[str]:
    """Ray asks for a token: KubeRay makes it, or all containers get one from a secret."""
    if spec.get("authOptions", {}).get("mode") == "token":
        return
    found = [(name, container) for name, _, container in containers(spec)]
    for name, each in [*found, ("autoscaler", spec["autoscalerOptions"])]:
        variables = environment(each)
        source = variables.get("RAY_AUTH_TOKEN")
        from_secret = isinstance(source, dict) and "secretKeyRef" in source
        if variables.get("RAY_AUTH_MODE") != "token" or not from_secret:
            yield f"{name}: asks for no token"


def autoscaling(spec: dict) -> Iterator[str]:
    """Groups have bounds, and scripts know that the cluster grows."""
    if not spec.get("enableInTreeAutoscaling"):
        yield "the cluster does not grow"
    if not spec["autoscalerOptions"].get("idleTimeoutSeconds"):
        yield "idle pods are never given back"
    for group in spec["workerGroupSpecs"]:
        sizes = [group.get(n, -1) for n in ("minReplicas", "replicas", "maxReplicas")]
        if sizes != sorted(sizes) or sizes[0] < 0 or not 2 <= sizes[2] <= 16:
            yield f"group {group['groupName']}: bounds are {sizes}"
    for name, _, container in containers(spec):
        if environment(container).get("WORKSHOP_AUTOSCALING") != "1":
            yield f"{name}: WORKSHOP_AUTOSCALING is not 1"


def gpus(spec: dict) -> Iterator[str]:
    """Full mode where workers have GPUs, on nodes that have some; smoke elsewhere."""
    _, *workers = containers(spec)
    has_gpus = "gpu" in spec["workerGroupSpecs"][0]["groupName"]
    mode = "full" if has_gpus else "smoke"
    for name, _, container in containers(spec):
        if environment(container).get("WORKSHOP_MODE") != mode:
            yield f"{name}: WORKSHOP_MODE is not {mode}"
    for name, pod, container in workers:
        limit = container["resources"]["limits"].get("nvidia.com/gpu")
        label = pod.get("nodeSelector", {}).get("nvidia.com/gpu.present")
        tolerated = [each["key"] for each in pod.get("tolerations", [])]
        wanted = ("1", "true", ["nvidia.com/gpu"]) if has_gpus else (None, None, [])
        if (limit, label, tolerated) != wanted:
            yield f"{name}: GPUs, the nodes' label and toleration do not go together"


def dashboards(spec: dict) -> Iterator[str]:
    """Ray's dashboard knows where Prometheus and Grafana are."""
    (_, _, head), *_ = containers(spec)
    variables = environment(head)
    for name in ("RAY_PROMETHEUS_HOST", "RAY_GRAFANA_HOST"):
        if ".prometheus-system.svc:" not in str(variables.get(name)):
            yield f"{name} names no service in prometheus-system"
    if not str(variables.get("RAY_GRAFANA_IFRAME_HOST")).startswith(
        "http://127.0.0.1:"
    ):
        yield "RAY_GRAFANA_IFRAME_HOST is not what is forwarded to this machine"


RULES = (image, resources, head_trains_nothing, storage, normal_user, shared_memory)
RULES += (ports, probes, no_secret, not_public, token, autoscaling, gpus, dashboards)


def faults(name: str, spec: dict) -> list[str]:
    """What the rules find in the Ray cluster of a file, each after its rule's name."""
    rules = [rule for rule in RULES if rule is not probes or "helm" not in name]
    return [f"{rule.__name__}: {fault}" for rule in rules for fault in rule(spec)]


def claim_faults(document: dict) -> Iterator[str]:
    """The volume is one that many nodes may write to."""
    spec = document["spec"]
    if spec["accessModes"] != ["ReadWriteMany"] or not spec.get("storageClassName"):
        yield "the volume cannot be mounted by all nodes"
    if not spec["resources"]["requests"].get("storage"):
        yield "the volume has no size"


def namespace_faults(document: dict) -> Iterator[str]:
    """Kubernetes refuses pods of root here."""
    labels = document["metadata"].get("labels", {})
    if labels.get("pod-security.kubernetes.io/enforce") != "restricted":
        yield "the namespace lets pods run as root"


def policy_faults(document: dict) -> Iterator[str]:
    """Every way in is from somewhere that is named, and only Ray pods have all ports."""
    spec = document["spec"]
    if spec["podSelector"].get("matchLabels") != {"ray.io/is-ray-node": "yes"}:
        yield "the policy is not that of Ray pods"
    if spec.get("policyTypes") != ["Ingress"] or not spec.get("ingress"):
        yield "the policy lets everybody in, or nobody"
    for way in spec.get("ingress", []):
        labels = [
            selector.get("matchLabels")
            for each in way.get("from", [])
            for selector in each.values()
        ]
        among_rays = labels == [{"ray.io/is-ray-node": "yes"}]
        if not labels or not all(labels):
            yield "somebody without a name may come in"
        if not way.get("ports") and not among_rays:
            yield "somebody who is not Ray has all ports"
        numbers = {each["port"] for each in way.get("ports", [])}
        if not numbers <= {*HEAD_PORTS.values()} - {6379}:
            yield f"ports {sorted(numbers)} are let through"


def monitor_faults(document: dict) -> Iterator[str]:
    """A monitor looks at the ports of our pods, and is one that Prometheus looks at."""
    if document["metadata"].get("labels") != {"release": "prometheus"}:
        yield "Prometheus does not look at this monitor"
    (namespace,) = documents(KUBERAY / "namespace.yaml")
    spec = document["spec"]
    if spec["namespaceSelector"] != {"matchNames": [namespace["metadata"]["name"]]}:
        yield "the monitor looks into another namespace"
    node = spec["selector"]["matchLabels"].get("ray.io/node-type")
    wanted = {"head": HEAD_PORTS, "worker": WORKER_PORTS}.get(node, {})
    wanted = {port for port in wanted if port.endswith("metrics")}
    endpoints = spec["podMetricsEndpoints"]
    if not wanted or {each["port"] for each in endpoints} != wanted:
        yield f"the monitor of {node} does not look at {sorted(wanted)}"
    for each in endpoints:
        labels = [relabel["targetLabel"] for relabel in each.get("relabelings", [])]
        if labels != ["ray_io_cluster"]:
            yield "Ray's dashboards cannot tell clusters apart"


def job_faults(document: dict) -> Iterator[str]:
    """A job runs a script that is there, ends, and has the cluster of its variant."""
    spec = document["spec"]
    script = re.search(r"/home/ray/workshop/(\S+\.py)", spec["entrypoint"])
    if not script or not (ROOT / script[1]).exists():
        yield f"{spec['entrypoint']!r} runs no script of ours"
    if not spec.get("shutdownAfterJobFinishes") or not spec.get(
        "activeDeadlineSeconds"
    ):
        yield "the job's cluster stays"
    group = spec["rayClusterSpec"]["workerGroupSpecs"][0]["groupName"]
    (cluster,) = documents(KUBERAY / f"ray-cluster.{group}.yaml")
    if spec["rayClusterSpec"] != cluster["spec"]:
        yield f"the job's cluster differs from that of ray-cluster.{group}.yaml"
    submitter = spec["submitterPodTemplate"]
    (container,) = submitter["spec"]["containers"]
    (_, _, head), *_ = containers(spec["rayClusterSpec"])
    if container["image"] != head["image"]:
        yield "the submitter has another image"
    if container["resources"]["requests"] != container["resources"]["limits"]:
        yield "submitter: requests differ from limits"
    if not submitter["spec"]["securityContext"].get("runAsNonRoot"):
        yield "submitter: runs as root"
    yield from locked_down("submitter", container)
    (policy,) = documents(KUBERAY / "network-policy.yaml")
    let_in = [each["from"] for each in policy["spec"]["ingress"]]
    labels = {"matchLabels": submitter["metadata"]["labels"]}
    if {"podSelector": labels} not in itertools.chain(*let_in):
        yield "the network policy does not let the submitter in"


def stack_faults(document: dict) -> Iterator[str]:
    """Grafana may stand in Ray's dashboard, finds dashboards, and is not public."""
    grafana = document["grafana"]
    settings = grafana["grafana.ini"]
    if not settings["security"].get("allow_embedding"):
        yield "Grafana refuses to stand in Ray's dashboard"
    if settings["auth.anonymous"].get("org_role") != "Viewer":
        yield "readers without a password may do more than read"
    if grafana["sidecar"]["dashboards"].get("label") != "grafana_dashboard":
        yield "Grafana does not look for dashboards"
    for name in ("grafana", "prometheus"):
        if document[name]["service"]["type"] != "ClusterIP":
            yield f"{name} can be reached from outside"


def prometheus_faults(document: dict) -> Iterator[str]:
    """Prometheus asks what Ray lists."""
    (scrape,) = document["scrape_configs"]
    files = [file for each in scrape["file_sd_configs"] for file in each["files"]]
    if files != ["/tmp/ray/prom_metrics_service_discovery.json"]:
        yield "Prometheus does not read Ray's list of addresses"
    if scrape.get("static_configs"):
        yield "addresses are typed that Ray chooses"


def containerfile_faults(text: str) -> Iterator[str]:
    """An image holds the pins on the Python of CI, and ends as a normal user."""
    lines = [line.split(maxsplit=1) for line in text.splitlines() if line.strip()]
    steps = [(line[0], line[1]) for line in lines if line[0].isupper()]
    bases = [value for name, value in steps if name == "FROM"]
    python = gate_python()
    if bases != [f"python:{python}-slim-bookworm"]:
        yield f"the image is built on {bases}, not on Python {python}"
    installs = [value for name, value in steps if "pip install" in value]
    if not any("-r requirements.txt" in value for value in installs):
        yield "the image does not hold what is pinned"
    if [value for name, value in steps if name == "USER"][-1:] != ["1000"]:
        yield "the image runs as root"


def anyscale_image_faults(text: str) -> Iterator[str]:
    """The pins stand in this file as in requirements.txt: Ray's is that of the base."""
    base = f"FROM anyscale/ray:{RAY}-slim-py{gate_python().replace('.', '')}"
    if base not in text.splitlines():
        yield f"the image is not built {base}"
    found = {
        line.strip(' "\\') for line in text.partition("pip install")[2].splitlines()
    }
    wanted = set()
    for line in (ROOT / "requirements.txt").read_text().splitlines():
        line = line.partition("#")[0].strip()
        if (
            line
            and not line.startswith("-")
            and (each := Requirement(line)).name != "ray"
        ):
            pin = re.search(rf"^{each.name}==[^\s;]+", CONSTRAINTS, re.MULTILINE)
            wanted.add(line if "<" in line else pin[0])
    if missing := wanted - found:
        yield f"pins are missing or others: {sorted(missing)}"


def compute_faults(document: dict) -> Iterator[str]:
    """A seat has a fixed number of workers, and a head that trains nothing."""
    if document["head_node"].get("resources") != {"CPU": 0, "GPU": 0}:
        yield "the head runs training"
    for group in document["worker_nodes"]:
        if not 2 <= group["min_nodes"] == group["max_nodes"] <= 16:
            yield f"group {group['name']}: the number of workers is not fixed"


def seat_faults(document: dict) -> Iterator[str]:
    """A workspace or job stops by itself, and names files and configurations of ours."""
    ends = document.get("idle_termination_minutes") or document.get("timeout_s")
    if not ends or ends > 3600:
        yield "it never stops by itself"
    if not re.fullmatch(
        r"anyscale/image/distributed-pytorch:\d+", document["image_uri"]
    ):
        yield f"{document['image_uri']} is not the image that the page builds"
    name = document["compute_config"].removeprefix("distributed-pytorch-")
    if not (CLUSTER / "anyscale" / f"compute.{name}.yaml").exists():
        yield f"{document['compute_config']} is made of no file here"
    script = document.get("entrypoint", "python README.md").split()[1]
    if not (ROOT / script).exists():
        yield f"{script} is not there"
    if script.endswith(".py") and ".venv" not in document.get("excludes", []):
        yield "the environment is sent along"


# Which rules a file is under; "cluster" are the RULES above.
COVERED = {
    "Containerfile": containerfile_faults,
    "README.md": "page",
    "SECURITY.md": "page",
    "anyscale/Containerfile": anyscale_image_faults,
    "anyscale/compute.*.yaml": compute_faults,
    "anyscale/workspace.yaml": seat_faults,
    "anyscale/job.yaml": seat_faults,
    "kuberay/helm-values*.yaml": "cluster",
    "kuberay/namespace.yaml": namespace_faults,
    "kuberay/network-policy.yaml": policy_faults,
    "kuberay/pod-monitor.yaml": monitor_faults,
    "kuberay/prometheus-stack-values.yaml": stack_faults,
    "kuberay/ray-cluster.*.yaml": "cluster",
    "kuberay/ray-job.*.yaml": job_faults,  # and "cluster", see `clusters`
    "kuberay/storage.yaml": claim_faults,
    "monitoring/README.md": "page",
    "monitoring/produce.py": "program",  # under the linter
    "monitoring/prometheus.yml": prometheus_faults,
}


def rule_of(path: Path):
    """The rule that a file of cluster/ is under, None if there is none."""
    name = path.relative_to(CLUSTER).as_posix()
    found = [
        rule for pattern, rule in COVERED.items() if fnmatch.fnmatch(name, pattern)
    ]
    return found[0] if found else None
