"""What the files of `02-ddp-pytorch-ray/cluster` have to hold beyond a schema: our rules.

A rule takes a manifest and yields a sentence per fault. Only what would hurt somebody is
one: an open door, a lost run, a lesson that never arrives, a bill.
"""

import fnmatch
import functools
import json
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
# No commit can name itself, so the commands of the page put both in.
IMAGE = "registry.example.com/distributed-pytorch:COMMIT"
DASHBOARD, METRICS = 8265, {8080, 44227}
UNITS = {"M": 10**6, "G": 10**9, "Mi": 2**20, "Gi": 2**30}
SECRET = re.compile(r"TOKEN|PASSWORD|SECRET|KEY|CREDENTIAL", re.IGNORECASE)


def documents(path: Path) -> list[dict]:
    """Return all documents of a YAML file; there is one at least."""
    every = yaml.load_all(path.read_text(), yaml.CSafeLoader)  # ten times as fast
    found = [each for each in every if each]
    assert found, f"{path} is empty"
    return json.loads(json.dumps(found))  # without anchors: no two places share a map


def built(folder: Path) -> list[dict]:
    """Return what `kubectl kustomize` makes of a folder, of the few keys that ours use.

    A patch is a list of operations with a path each (RFC 6902). A key that is not known
    here raises; test_manifests.py compares with kubectl where that is installed.
    """
    (kustomization,) = documents(folder / "kustomization.yaml")
    names = ("namespace", "nameSuffix", "resources", "patches")
    namespace, suffix, resources, patches = (kustomization.pop(n, None) for n in names)
    assert set(kustomization) == {"apiVersion", "kind"}, f"{kustomization} of {folder}"
    found = []
    for name in resources:
        path = folder / name
        found += built(path) if path.is_dir() else documents(path)
    for each in found:
        for patch in patches or []:
            if patch["target"] == {"kind": each["kind"]}:
                for operation in yaml.safe_load(patch["patch"]):
                    apply(operation, each)
        if each["kind"] != "Namespace":
            each["metadata"]["name"] += suffix or ""
            if namespace:
                each["metadata"]["namespace"] = namespace
    return found


def apply(operation: dict, document: dict) -> None:
    """Carry out one "add" or "replace" on a key of a map, in place.

    Raises:
        KeyError, IndexError: the path does not lead there, or what to replace is not there.
    """
    words = [word.replace("~1", "/") for word in operation["path"].split("/")[1:]]
    steps = [int(word) if word.isdigit() else word for word in words]
    *way, last = steps
    there = functools.reduce(lambda part, step: part[step], way, document)
    if operation["op"] == "replace":
        there[last]
    else:
        assert operation["op"] == "add", operation
    there[last] = operation["value"]


def clusters() -> dict[str, dict]:
    """Return the specification of every Ray cluster, by the folder that it is built of."""
    found = {}
    for path in sorted(KUBERAY.glob("*/kustomization.yaml")):
        for each in built(path.parent):
            if each["kind"] == "RayCluster":
                found[path.parent.name] = each["spec"]
    return found


def pods(spec: dict) -> Iterator[tuple[str, dict]]:
    """Yield the pods of a Ray cluster: what each is, and its specification."""
    yield "head", spec["headGroupSpec"]["template"]["spec"]
    for group in spec["workerGroupSpecs"]:
        yield f"group {group['groupName']}", group["template"]["spec"]


def containers(spec: dict) -> Iterator[tuple[str, dict, dict]]:
    """Yield the container of Ray in every pod, with the pod."""
    for name, pod in pods(spec):
        yield name, pod, pod["containers"][0]


def environment(container: dict) -> dict:
    """Return the variables of a container by name: a text, or where the value is from."""
    variables = container.get("env", [])
    return {
        each["name"]: each.get("value", each.get("valueFrom")) for each in variables
    }


def quantity(text: str) -> float:
    """Return bytes of an amount of memory, as "8Gi"."""
    number, unit = re.fullmatch(r"(\d+)([MG]i?)", text).groups()
    return float(number) * UNITS[unit]


def tag(spec: dict) -> Iterator[str]:
    """The image is that of a commit, pulled once, with the pinned Ray in it."""
    for name, _, container in containers(spec):
        if container["image"] != IMAGE:
            yield f"{name}: {container['image']} is not {IMAGE}, which the page replaces"
        if container.get("imagePullPolicy", "IfNotPresent") != "IfNotPresent":
            yield f"{name}: every start pulls 7 GB, though a commit does not change"
    if spec.get("upgradeStrategy") != {"type": "Recreate"}:
        yield "pods keep the image that they have: a mended lesson never arrives"
    if spec.get("rayVersion") != RAY:
        yield f"rayVersion is {spec.get('rayVersion')}, and {RAY} is pinned"


def token(spec: dict) -> Iterator[str]:
    """Ray asks for a token, which the operator makes."""
    if spec.get("authOptions", {}).get("mode") != "token":
        yield "Ray asks for no token: whoever reaches a port runs code"


def no_secret(spec: dict) -> Iterator[str]:
    """Nothing secret is typed into a manifest."""
    for name, _, container in containers(spec):
        for variable, value in environment(container).items():
            if SECRET.search(variable) and isinstance(value, str):
                yield f"{name}: {variable} is typed here: take it from a secret"


def no_rights(spec: dict) -> Iterator[str]:
    """What participants run has no rights in Kubernetes, and is no root."""
    if spec.get("enableInTreeAutoscaling"):
        yield "the autoscaler's account may change every pod of the namespace"
    for name, pod, container in containers(spec):
        if pod.get("automountServiceAccountToken") is not False:
            yield f"{name}: has a token of Kubernetes"
        user, own = pod.get("securityContext", {}), container.get("securityContext", {})
        if not user.get("runAsNonRoot") or not user.get("runAsUser"):
            yield f"{name}: runs as root"
        if own.get("allowPrivilegeEscalation") is not False or own.get("privileged"):
            yield f"{name}: may gain privileges"
        if own.get("capabilities", {}).get("drop") != ["ALL"]:
            yield f"{name}: keeps capabilities of root"


def closed(spec: dict) -> Iterator[str]:
    """The head's service is for the inside of the cluster, and has no Ray Client."""
    head = spec["headGroupSpec"]
    own = head.get("headService", {}).get("spec", {}).get("type", "ClusterIP")
    if {head.get("serviceType", "ClusterIP"), own} != {"ClusterIP"}:
        yield "the head's service can be reached from outside"
    if head.get("enableIngress"):
        yield "the head has an ingress"
    for name, _, container in containers(spec):
        found = {port["containerPort"] for port in container.get("ports", [])}
        if not found or found - {
            6379,
            DASHBOARD,
            *METRICS,
        }:  # none: KubeRay opens 10001
            yield f"{name}: opens {sorted(found) or 'what KubeRay opens by default'}"


def storage(spec: dict) -> Iterator[str]:
    """Runs are written to a claim that all pods mount, and that they may write to."""
    (claim,) = documents(KUBERAY / "room" / "storage.yaml")
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
        if not pod.get("securityContext", {}).get("fsGroup"):
            yield f"{name}: fsGroup is missing, so the volume belongs to root"


def shared_memory(spec: dict) -> Iterator[str]:
    """/dev/shm is in memory, and holds the 30% that Ray takes for objects."""
    for name, pod, container in containers(spec):
        shared = mounted(pod, container, "/dev/shm")
        limit = quantity(container["resources"]["limits"]["memory"])
        size = quantity(shared.get("sizeLimit", "0Gi"))
        if shared.get("medium") != "Memory" or not 0.3 * limit <= size <= 0.5 * limit:
            yield f"{name}: /dev/shm is not 30% to 50% of its memory"


def mounted(pod: dict, container: dict, path: str) -> dict:
    """Return the empty folder that a container has at a path; {} if there is none."""
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    names = [m["name"] for m in container["volumeMounts"] if m["mountPath"] == path]
    return volumes[names[0]].get("emptyDir", {}) if names else {}


def bounds(spec: dict) -> Iterator[str]:
    """CPU, memory and disk of every pod have a limit: logs and spilled objects, too."""
    for name, pod, container in containers(spec):
        if not {"cpu", "memory"} <= container["resources"].get("limits", {}).keys():
            yield f"{name}: limit CPU and memory"
        if not mounted(pod, container, "/tmp/ray").get("sizeLimit"):
            yield f"{name}: one dataset that spills fills the node's disk"


def head(spec: dict) -> Iterator[str]:
    """The head offers Ray no CPU and no GPU: training there would take all runs along."""
    (_, _, container), *_ = containers(spec)
    if spec["headGroupSpec"]["rayStartParams"].get("num-cpus") != "0":
        yield 'the head runs training: set num-cpus to "0"'
    if "nvidia.com/gpu" in container["resources"]["limits"]:
        yield "the head takes a GPU"


def grace(spec: dict) -> Iterator[str]:
    """A pod that is told to end has the time that Ray announces, and some more."""
    _, *workers = containers(spec)
    for name, pod, container in workers:
        drain = environment(container).get(
            "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S", "30"
        )
        if pod.get("terminationGracePeriodSeconds", 30) < float(drain) + 15:
            yield f"{name}: SIGKILL comes before Ray's deadline of {drain} s has passed"
        if float(drain) < 60:
            yield f"{name}: {drain} s are too short for a last checkpoint"


def gpus(spec: dict) -> Iterator[str]:
    """Full mode where workers have GPUs; they find a node also if none is alive."""
    every = list(containers(spec))
    _, *workers = every
    for name, pod, container in workers:
        has_gpu = "nvidia.com/gpu" in container["resources"]["limits"]
        modes = {environment(each).get("WORKSHOP_MODE") for _, _, each in every}
        if modes != {"full" if has_gpu else "smoke"}:
            yield f"{name}: WORKSHOP_MODE is {modes}"
        tolerated = [each["key"] for each in pod.get("tolerations", [])]
        if has_gpu != ("nvidia.com/gpu" in tolerated):
            yield f"{name}: nodes with GPUs are not tolerated, or others are"
        if pod.get("nodeSelector"):
            yield f"{name}: an empty pool has no node with a label, so it never starts"


RULES = (tag, token, no_secret, no_rights, closed, storage, shared_memory, bounds)
RULES += (head, grace, gpus)


def faults(spec: dict) -> list[str]:
    """What the rules find in a Ray cluster, each after its rule's name."""
    return [f"{rule.__name__}: {fault}" for rule in RULES for fault in rule(spec)]


def room_faults(document: dict) -> Iterator[str]:
    """The namespace refuses root, has bounds, and all nodes mount its volume."""
    kind, spec = document["kind"], document.get("spec", {})
    if kind == "Namespace":
        labels = document["metadata"].get("labels", {})
        if labels.get("pod-security.kubernetes.io/enforce") != "restricted":
            yield "the namespace lets pods run as root"
    elif kind == "ResourceQuota":
        wanted = {"pods", "limits.cpu", "limits.memory", "requests.nvidia.com/gpu"}
        if missing := wanted - spec["hard"].keys():
            yield f"nothing bounds {sorted(missing)}"
        if spec["hard"].get("services.loadbalancers") != "0":
            yield "somebody may open a door to the internet"
    elif kind == "PersistentVolumeClaim" and (
        spec["accessModes"] != ["ReadWriteMany"] or not spec.get("storageClassName")
    ):
        yield "the volume cannot be mounted by all nodes"


def _has_a_name(peer: dict) -> bool:
    """Return whether a policy says who it is: an empty selector is everybody."""
    return any(each.get("matchLabels") for each in peer.values())


def policy_faults(document: dict) -> Iterator[str]:
    """Every way in has a name, all ports are for the cluster, and no way goes inside."""
    spec = document["spec"]
    own = [{"podSelector": spec["podSelector"]}]
    if not spec["podSelector"].get("matchLabels", {}).get("ray.io/cluster"):
        yield "pods of other clusters come in: select by ray.io/cluster"
    if set(spec.get("policyTypes", [])) != {"Ingress", "Egress"}:
        yield "one of the two directions is open to all"
    for way in spec.get("ingress", []):
        if not way.get("from") or not all(map(_has_a_name, way["from"])):
            yield "somebody without a name may come in"
        if not way.get("ports") and way.get("from") != own:
            yield "somebody who is not of this cluster has all ports"
        numbers = {each["port"] for each in way.get("ports", [])}
        if not numbers <= {DASHBOARD, *METRICS}:
            yield f"ports {sorted(numbers)} are let through"
    for way in spec.get("egress", []):
        numbers = {each["port"] for each in way.get("ports", [])}
        whom = way.get("to", [])
        named = ("ipBlock" in peer or _has_a_name(peer) for peer in whom)
        if not all(named) or (not whom and numbers != {53}):
            yield "what participants run reaches everybody"
        for block in [each["ipBlock"] for each in whom if "ipBlock" in each]:
            private = {
                "10.0.0.0/8",
                "172.16.0.0/12",
                "192.168.0.0/16",
                "169.254.0.0/16",
                "100.64.0.0/10",
            }
            if private - set(block.get("except", [])):
                yield "what participants run reaches private addresses"


def job_faults(document: dict) -> Iterator[str]:
    """A job can be created twice, runs a script that is there, and not on the head."""
    spec, metadata = document["spec"], document["metadata"]
    if "name" in metadata or not metadata.get("generateName"):
        yield "a second run has the name of the first, and never starts"
    (cluster,) = [d for d in built(KUBERAY / "cluster") if d["kind"] == "RayCluster"]
    if spec.get("clusterSelector") != {"ray.io/cluster": cluster["metadata"]["name"]}:
        yield "the job is not for the standing cluster"
    if not spec.get("entrypointNumCpus"):
        yield "the driver runs on the head"
    script = re.search(r"/opt/workshop/(\S+\.py)", spec["entrypoint"])
    if not script or not (ROOT / script[1]).exists():
        yield f"{spec['entrypoint']!r} runs no script of ours"


# The shared Ray's head, the one thing inside that a seat may reach.
HEAD = {
    "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "workshop"}},
    "podSelector": {"matchLabels": {"ray.io/node-type": "head"}},
}


def seat_faults(values: dict) -> Iterator[str]:
    """A seat has bounds, a home that hides no lesson, and reaches only Ray inside."""
    seat = values["singleuser"]
    name = f"{seat['image']['name']}:{seat['image']['tag']}"
    if name != IMAGE or seat["image"].get("pullPolicy", "IfNotPresent") == "Always":
        yield f"{name} is not {IMAGE}, which the page replaces"
    for what in ("cpu", "memory"):
        if not seat.get(what, {}).get("limit"):
            yield f"one person may take all {what} of a node"
    if not seat.get("extraResource", {}).get("limits", {}).get("ephemeral-storage"):
        yield "one person may fill a node's disk"
    room = seat["storage"]
    volumes, mounts = room.get("extraVolumes", {}), room.get("extraVolumeMounts", {})
    shared = [m["name"] for m in mounts.values() if m["mountPath"] == "/dev/shm"]
    memory = volumes.get(shared[0], {}).get("emptyDir", {}) if shared else {}
    if memory.get("medium") != "Memory" or quantity(memory["sizeLimit"]) < 4 * 2**30:
        yield "/dev/shm is less than the 4 GiB that Ray asks for"
    if "/opt/workshop".startswith(room["homeMountPath"]):
        yield "the home hides the lessons of the image"
    if seat.get("cloudMetadata", {}).get("blockWithIptables") is not False:
        yield "a container of root is put before every seat"
    network = seat.get("networkPolicy", {})
    if not network.get("enabled", True) or network.get("egressAllowRules"):
        yield "seats reach more than the chart lets them"
    for way in network.get("egress", []):
        numbers = [each["port"] for each in way.get("ports", [])]
        if numbers != [DASHBOARD] or way.get("to") != [HEAD]:
            yield f"seats reach {numbers or 'all ports'} of {way.get('to', 'everybody')}"
    if room.get("type", "dynamic") == "none":
        yield "a home does not last"


def hub_faults(values: dict) -> Iterator[str]:
    """No password stands here, nobody opens another's seat, and the night is free."""
    config = values["hub"]["config"]
    if any(SECRET.search(key) for part in config.values() for key in part):
        yield "a password is typed here: give it on the command line"
    if config["JupyterHub"]["authenticator_class"] == "dummy":
        yield "anybody may log in with any name"
    if config["JupyterHub"].get("admin_access") is not False:
        yield "an administrator's password opens all seats"
    if config["Authenticator"].get("allow_all"):
        yield "whoever has the password may take any number of seats"
    if not config["Authenticator"].get("allowed_users"):
        yield "nobody may log in"
    if values["proxy"]["service"]["type"] != "ClusterIP":
        yield "the password goes over the network without encryption"
    if not values["cull"].get("enabled", True) or not values["cull"].get("maxAge"):
        yield "a seat with a busy kernel runs all night"
    if not values.get("prePuller", {}).get("hook", {}).get("enabled", True):
        yield "people wait for the image"
    if not values["scheduling"]["podPriority"].get("enabled"):
        yield "a placeholder does not give way to a person"
    yield from seat_faults(values)


def gpu_seat_faults(values: dict) -> Iterator[str]:
    """A seat with a GPU is chosen on purpose, and keeps the other bounds."""
    profiles = values["singleuser"]["profileList"]
    pulls = values.get("prePuller", {}).get("extraTolerations", [])
    for each in profiles:
        wanted = each.get("kubespawner_override", {}).get("tolerations", [])
        if any(toleration not in pulls for toleration in wanted):
            yield f"{each['display_name']}: the image is not pulled before people come"
    defaults = [each for each in profiles if each.get("default")]
    if len(defaults) != 1 or "kubespawner_override" in defaults[0]:
        yield "who chooses nothing may get a GPU"
    for each in profiles:
        override = each.get("kubespawner_override", {})
        limits = override.get("extra_resource_limits", {})
        if override and not {"nvidia.com/gpu", "ephemeral-storage"} <= limits.keys():
            yield f"{each['display_name']}: a limit is lost, as the whole map is replaced"


def monitor_faults(document: dict) -> Iterator[str]:
    """A monitor looks at ports that are there, and is one that Prometheus looks at."""
    if document["metadata"].get("labels") != {"release": "prometheus"}:
        yield "Prometheus does not look at this monitor"
    spec = document["spec"]
    if spec["namespaceSelector"] != {"matchNames": ["workshop"]}:
        yield "the monitor looks into another namespace"
    node = spec["selector"]["matchLabels"].get("ray.io/node-type", "worker")
    there = {n.partition(" ")[0]: c for n, _, c in containers(clusters()["cluster"])}
    container = there["head" if node == "head" else "group"]
    wanted = {p["name"] for p in container["ports"] if p["name"].endswith("metrics")}
    if {each["port"] for each in spec["podMetricsEndpoints"]} != wanted:
        yield f"the monitor of {node} does not look at {sorted(wanted)}"
    for each in spec["podMetricsEndpoints"]:
        labels = [relabel["targetLabel"] for relabel in each.get("relabelings", [])]
        if labels != ["ray_io_cluster"]:
            yield "Ray's dashboards cannot tell clusters apart"


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
    if "-r requirements.txt" not in text:
        yield "the image does not hold what is pinned"
    if "COPY --chown=ray:ray . ." not in text:
        yield "the lessons belong to root, and the pod runs as 1000"
    hub = re.search(r"^jupyterhub==", (CLUSTER / "hub/requirements.txt").read_text())
    if not hub or "hub/requirements.txt" not in text:
        yield "the image is no seat: it lacks what the hub starts"
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


def workspace_faults(document: dict) -> Iterator[str]:
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
    "anyscale/workspace.yaml": workspace_faults,
    "anyscale/job.yaml": workspace_faults,
    "hub/requirements.txt": "page",  # its one version stands there, too
    "hub/values.yaml": hub_faults,
    "hub/values.gpu.yaml": gpu_seat_faults,
    "kuberay/*/kustomization.yaml": "cluster",
    "kuberay/cluster/network-policy.yaml": policy_faults,
    "kuberay/cluster/ray-cluster.yaml": "cluster",
    "kuberay/ray-job.yaml": job_faults,
    "kuberay/room/*.yaml": room_faults,
    "monitoring/README.md": "page",
    "monitoring/pod-monitor.yaml": monitor_faults,
    "monitoring/produce.py": "program",  # under the linter
    "monitoring/prometheus-stack-values.yaml": stack_faults,
    "monitoring/prometheus.yml": prometheus_faults,
    "one-machine/jupyterhub_config.py": "program",  # tests/test_one_machine.py starts it
    "one-machine/requirements.txt": "page",
}


def rule_of(path: Path):
    """Return the rule that a file of cluster/ is under, None if there is none."""
    name = path.relative_to(CLUSTER).as_posix()
    found = [
        rule for pattern, rule in COVERED.items() if fnmatch.fnmatch(name, pattern)
    ]
    return found[0] if found else None
