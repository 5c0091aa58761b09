"""Rules for the files of `02-ddp-pytorch-ray/cluster`, beyond their schemas.

Only what would hurt somebody is a rule: an open port, a lost run, a node that one person
fills, a bill. Most are values that have to stand in a place: `MUST`. The others are
functions that take a document and yield a sentence per fault: `RULES`.
"""

import functools
import json
import re
from collections.abc import Callable, Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import yaml

from tests.scripts import ROOT

CLUSTER = ROOT / "02-ddp-pytorch-ray" / "cluster"
KUBERAY = CLUSTER / "kuberay"
GCS, DASHBOARD, METRICS = 6379, 8265, {8080, 44227}
PRIVATE = {"10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10"}
PRIVATE |= {"169.254.0.0/16"}  # a cloud's metadata, with the rights of the node
GPU = "nvidia.com/gpu"
UNITS = {"M": 10**6, "G": 10**9, "Mi": 2**20, "Gi": 2**30}
SECRET = re.compile(r"TOKEN|PASSWORD|SECRET|KEY|CREDENTIAL", re.IGNORECASE)
Rule = Callable[[dict], Iterator[str]]
RULES: dict[str, tuple[str, Rule]] = {}  # by name: which documents, and the function
ABSENT = None
# The shared Ray's dashboard is the one thing inside that a seat may reach.
TO_THE_HEAD = {
    "to": [
        {
            "namespaceSelector": {
                "matchLabels": {"kubernetes.io/metadata.name": "workshop"}
            },
            "podSelector": {"matchLabels": {"ray.io/node-type": "head"}},
        }
    ],
    "ports": [{"port": DASHBOARD, "protocol": "TCP"}],
}
# Of which documents (their names in `everything`), where in them: what has to stand there,
# and what happens else.
MUST: dict[str, dict[str, tuple[object, str]]] = {
    "*/RayCluster": {
        "spec authOptions mode": ("token", "whoever reaches a port runs code"),
        "spec headGroupSpec rayStartParams num-cpus": (
            "0",
            "training can kill the head",
        ),
        "spec headGroupSpec serviceType": (ABSENT, "reached from outside"),
        "spec headGroupSpec headService": (ABSENT, "reached from outside"),
        "spec headGroupSpec enableIngress": (ABSENT, "reached from outside"),
        "spec enableInTreeAutoscaling": (ABSENT, "the head may change all pods there"),
    },
    "*/pod *": {
        "spec automountServiceAccountToken": (False, "it has rights in Kubernetes"),
        "spec securityContext runAsNonRoot": (True, "it runs as root"),
        "spec securityContext fsGroup": (1000, "the shared volume belongs to root"),
        "spec containers 0 securityContext allowPrivilegeEscalation": (
            False,
            "it may become root",
        ),
    },
    "*/Namespace": {
        "metadata labels pod-security.kubernetes.io/enforce": (
            "restricted",
            "pods run as root",
        ),
    },
    "*/ResourceQuota": {
        "spec hard services.loadbalancers": (
            "0",
            "somebody opens a port to the internet",
        ),
        "spec hard services.nodeports": ("0", "somebody opens a port of all nodes"),
    },
    "room/ResourceQuota": {
        "spec hard requests.nvidia.com/gpu": ("2", "a typing error orders many GPUs"),
    },
    "room/PersistentVolumeClaim": {
        "spec accessModes": (["ReadWriteMany"], "one node alone has the runs"),
    },
    "*/NetworkPolicy": {
        "spec policyTypes": (["Ingress", "Egress"], "one direction is open to all"),
    },
    "kuberay/ray-job.yaml": {
        "spec entrypointNumCpus": (1, "the driver is one more process of the head"),
    },
    "hub/values.yaml": {
        "hub config JupyterHub authenticator_class": (
            "shared-password",
            "anybody comes",
        ),
        "hub config JupyterHub admin_access": (
            ABSENT,
            "it looks as if it bound admins",
        ),
        "hub config Authenticator allow_all": (ABSENT, "one takes any number of seats"),
        "hub config SharedPasswordAuthenticator": (ABSENT, "the password is published"),
        "proxy service type": ("ClusterIP", "passwords travel without encryption"),
        "singleuser storage homeMountPath": ("/home/ray", "the home hides the lessons"),
        "singleuser storage type": (ABSENT, "a home does not last"),
        "singleuser networkPolicy enabled": (ABSENT, "seats reach all that is private"),
        "singleuser networkPolicy egressAllowRules": (ABSENT, "seats reach more"),
        "singleuser networkPolicy egress": ([TO_THE_HEAD], "seats join the shared Ray"),
        "cull enabled": (ABSENT, "seats cost money all night"),
        "cull maxAge": (43200, "a seat with a busy kernel costs money all night"),
    },
    "monitoring/prometheus-stack-values.yaml": {
        "grafana grafana.ini auth.anonymous org_role": (
            "Viewer",
            "readers change things",
        ),
    },
    "anyscale/compute.*.yaml": {
        "head_node resources": ({"CPU": 0, "GPU": 0}, "training can kill the head"),
        "worker_nodes 0 max_nodes": (2, "anybody's code orders machines"),
    },
    "anyscale/workspace.yaml": {
        "idle_termination_minutes": (120, "it ends at lunch, or costs money all night"),
    },
    "anyscale/job.yaml": {
        "timeout_s": (3600, "a job that hangs costs money until somebody looks"),
    },
}


def documents(path: Path) -> list[dict]:
    """Return all documents of a YAML file; there is one at least."""
    every = yaml.load_all(path.read_text(), yaml.CSafeLoader)  # ten times as fast
    found = [each for each in every if each]
    assert found, f"{path} is empty"
    return json.loads(json.dumps(found))  # without anchors: no two places share a map


def built(folder: Path) -> list[dict]:
    """Return what `kubectl kustomize` makes of a folder, of the few keys that ours use.

    A patch is a list of "add" and "replace" with a path each (RFC 6902). A key that is not
    known here raises; test_manifests.py compares with kubectl where that is installed.
    """
    (kustomization,) = documents(folder / "kustomization.yaml")
    names = ("namespace", "nameSuffix", "resources", "patches")
    namespace, suffix, resources, patches = (kustomization.pop(n, None) for n in names)
    assert set(kustomization) == {"apiVersion", "kind"}, f"{kustomization} of {folder}"
    found = []
    for path in (folder / name for name in resources):
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
    *way, last = [int(word) if word.isdigit() else word for word in words]
    there = functools.reduce(lambda part, step: part[step], way, document)
    if operation["op"] == "replace":
        there[last]
    else:
        assert operation["op"] == "add", operation
    there[last] = operation["value"]


def everything() -> dict[str, dict]:
    """Return all documents: of Kubernetes by folder and kind, others by their file.

    The pods of a Ray cluster stand beside it, as objects of Kubernetes.
    """
    found = {}
    for folder in sorted(path.parent for path in KUBERAY.glob("*/kustomization.yaml")):
        for each in built(folder):
            found[f"{folder.name}/{each['kind']}"] = each
            if each["kind"] == "RayCluster":
                for group in (
                    each["spec"]["headGroupSpec"],
                    *each["spec"]["workerGroupSpecs"],
                ):
                    pod = {
                        "apiVersion": "v1",
                        "kind": "Pod",
                        "metadata": {"name": "ray"},
                    }
                    pod["spec"] = group["template"]["spec"]
                    found[f"{folder.name}/pod {group.get('groupName', 'head')}"] = pod
    for path in sorted({*CLUSTER.rglob("*.yaml")} - {*KUBERAY.glob("*/*.yaml")}):
        for number, each in enumerate(documents(path)):
            name = path.relative_to(CLUSTER).as_posix()
            found[f"{name} {number}" if number else name] = each
    return found


def at(document: dict, path: str) -> object:
    """Return what stands at a path of keys, as "spec hard pods"; else ABSENT."""
    there: Any = document
    for key in path.split():
        try:
            there = there[int(key) if key.isdigit() else key]
        except (KeyError, IndexError):
            return ABSENT
    return there


def faults(name: str, document: dict) -> list[str]:
    """Return what is wrong with a document, each after its place or its rule's name."""
    found = []
    for pattern, places in MUST.items():
        for path, (value, why) in places.items():
            if fnmatch(name, pattern) and at(document, path) != value:
                found.append(f"{path}: {at(document, path)}, so {why}")
    for pattern, rule in RULES.values():
        if fnmatch(name, pattern):
            found += [f"{rule.__name__}: {fault}" for fault in rule(document)]
    return found


def rule(pattern: str) -> Callable[[Rule], Rule]:
    """Make a function a rule for all documents whose name fits the pattern."""

    def add(function: Rule) -> Rule:
        RULES[function.__name__] = pattern, function
        return function

    return add


def quantity(text: str) -> float:
    """Return bytes of an amount of memory, as "8Gi"."""
    number, unit = re.fullmatch(r"(\d+)([MG]i?)", text).groups()
    return float(number) * UNITS[unit]


def environment(pod: dict) -> dict:
    """Return the variables of a pod by name: a text, or where the value is from."""
    every = pod["spec"]["containers"][0].get("env", [])
    return {each["name"]: each.get("value", each.get("valueFrom")) for each in every}


def mounted(volumes: list[dict], mounts: list[dict], path: str) -> dict:
    """Return the volume that is mounted at a path to be written to; {} if there is none."""
    by_name = {volume["name"]: volume for volume in volumes}
    for mount in mounts:
        if mount["mountPath"] == path and not mount.get("readOnly"):
            return by_name[mount["name"]]
    return {}


def mounted_in(pod: dict, path: str) -> dict:
    mounts = pod["spec"]["containers"][0]["volumeMounts"]
    return mounted(pod["spec"]["volumes"], mounts, path)


@rule("*/pod *")
def no_secret(pod: dict) -> Iterator[str]:
    """Nothing secret is typed into a manifest."""
    for variable, value in environment(pod).items():
        if SECRET.search(variable) and isinstance(value, str):
            yield f"{variable} is typed here: take it from a secret"


@rule("*/pod *")
def open_ports(pod: dict) -> Iterator[str]:
    """Ray Client's is none of them."""
    found = {each["containerPort"] for each in pod["spec"]["containers"][0]["ports"]}
    if not found:
        yield "KubeRay opens its own choice, Ray Client's port too"
    if found - {GCS, DASHBOARD, *METRICS}:
        yield f"it opens {sorted(found)}"


@rule("*/pod *")
def storage(pod: dict) -> Iterator[str]:
    """Runs are written to the claim that all pods mount."""
    (claim,) = documents(KUBERAY / "room" / "storage.yaml")
    volume = mounted_in(pod, environment(pod).get("WORKSHOP_STORAGE"))
    name = volume.get("persistentVolumeClaim", {}).get("claimName")
    if name != claim["metadata"]["name"]:
        yield "WORKSHOP_STORAGE is not on the shared volume: runs go with the pod"


@rule("*/pod *")
def shared_memory(pod: dict) -> Iterator[str]:
    """/dev/shm is in memory, and holds the 30% that Ray takes for objects."""
    shared = mounted_in(pod, "/dev/shm").get("emptyDir", {})
    limit = quantity(pod["spec"]["containers"][0]["resources"]["limits"]["memory"])
    size = quantity(shared.get("sizeLimit", "0Gi"))
    if shared.get("medium") != "Memory" or not 0.3 * limit <= size <= 0.5 * limit:
        yield "/dev/shm is not 30% to 50% of its memory"


@rule("*/pod *")
def limits(pod: dict) -> Iterator[str]:
    """CPU, memory and disk have a limit: logs and spilled objects, too."""
    for what in ("requests", "limits"):
        named = pod["spec"]["containers"][0]["resources"].get(what, {})
        if not {"cpu", "memory"} <= named.keys():
            yield f"name CPU and memory in its {what}"
    if not mounted_in(pod, "/tmp/ray").get("emptyDir", {}).get("sizeLimit"):
        yield "one dataset that spills fills the node's disk"


@rule("*/pod workers")
def last_checkpoint(pod: dict) -> Iterator[str]:
    """A worker that is told to end has the time that Ray announces, and some more."""
    variables = environment(pod)
    announced = float(variables.get("RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S", 30))
    if announced < 60:
        yield f"{announced} s are too short for a last checkpoint"
    if pod["spec"].get("terminationGracePeriodSeconds", 30) < announced + 15:
        yield f"SIGKILL comes before Ray's deadline of {announced} s"


@rule("*/pod workers")
def gpus_are_used(pod: dict) -> Iterator[str]:
    """Who pays for GPUs trains on them, and no other pod sits on their nodes."""
    has_gpu = GPU in pod["spec"]["containers"][0]["resources"]["limits"]
    if environment(pod).get("WORKSHOP_MODE") != ("full" if has_gpu else "smoke"):
        yield f"WORKSHOP_MODE is {environment(pod).get('WORKSHOP_MODE')}"
    tolerated = {each["key"] for each in pod["spec"].get("tolerations", [])}
    if has_gpu != (GPU in tolerated):
        yield "nodes with GPUs are not tolerated, or others are"


def is_named(peer: dict) -> bool:
    """Return whether a policy says who it is: an empty selector is everybody."""
    return any(each.get("matchLabels") for each in peer.values())


def ports(way: dict) -> set[int]:
    return {each["port"] for each in way.get("ports", [])}


def offered(gib: float) -> float:
    """Return the bytes that a node of so many GiB gives to pods, its own ones included.

    As GKE reserves: 25% of the first 4 GiB, 20% of the next 4, 10% of the next 8, 6% of the
    next 112, and 100 MiB.
    """
    steps = ((4, 0.25), (4, 0.2), (8, 0.1), (112, 0.06))
    left, kept = gib, 100 / 1024
    for size, share in steps:
        kept += min(left, size) * share
        left = max(left - size, 0)
    return (gib - kept) * 2**30


def fits_a_gpu_node(cpus: float, memory: float) -> bool:
    """Return whether a machine of 8 CPUs and 32 GiB has that, beside its own pods."""
    return cpus <= 7 and memory + 2 * 2**30 <= offered(32)


@rule("gpu/pod workers")
def fits_its_node(pod: dict) -> Iterator[str]:
    """Usual machines with one GPU have 32 GiB, and give less."""
    most = pod["spec"]["containers"][0]["resources"]["limits"]
    if not fits_a_gpu_node(float(most.get("cpu", 0)), quantity(most["memory"])):
        yield "no machine with one GPU and 32 GiB has room: it stays Pending"


@rule("*/NetworkPolicy")
def policy_of_one_cluster(policy: dict) -> Iterator[str]:
    """It is for the pods of the cluster that has its name, and not for those of others."""
    chosen = re.findall(r"ray.io/cluster': '([\w-]+)'", str(policy["spec"]))
    if chosen != [policy["metadata"]["name"]] * 3:
        yield f"it lets pods of {chosen} talk to each other"


@rule("*/NetworkPolicy")
def policy_inwards(policy: dict) -> Iterator[str]:
    """Who comes in has a name; all ports are for the cluster's own pods."""
    own = [{"podSelector": policy["spec"]["podSelector"]}]
    for way in policy["spec"].get("ingress", []):
        if not way.get("from") or not all(map(is_named, way["from"])):
            yield "somebody without a name may come in"
        if not way.get("ports") and way.get("from") != own:
            yield "somebody who is not of this cluster has all ports"
        if ports(way) - {DASHBOARD, *METRICS}:
            yield f"ports {sorted(ports(way))} are let through"


@rule("*/NetworkPolicy")
def policy_outwards(policy: dict) -> Iterator[str]:
    """What participants run reaches nothing private but what has a name."""
    for way in policy["spec"].get("egress", []):
        if not way.get("to") and ports(way) != {53}:
            yield "what participants run reaches everybody"
        for peer in way.get("to", []):
            excepted = peer.get("ipBlock", {}).get("except", [])
            if not is_named(peer) and PRIVATE - set(excepted):
                yield "what participants run reaches private addresses"


@rule("hub/values.yaml")
def seat_limits(values: dict) -> Iterator[str]:
    """A seat has its share of a node, with shared memory, and no more."""
    seat = values["singleuser"]
    for what in ("cpu", "memory"):
        if not {"limit", "guarantee"} <= seat.get(what, {}).keys():
            yield f"one person may take all {what} of a node"
    if not seat.get("extraResource", {}).get("limits", {}).get("ephemeral-storage"):
        yield "one person may fill a node's disk"
    own = (
        seat["storage"][key].values() for key in ("extraVolumes", "extraVolumeMounts")
    )
    memory = mounted(*own, "/dev/shm").get("emptyDir", {})
    if memory.get("medium") != "Memory" or quantity(memory["sizeLimit"]) < 4 * 2**30:
        yield "/dev/shm is less than the 4 GiB that Ray asks for"


@rule("hub/values.yaml")
def helpers_have_seats(values: dict) -> Iterator[str]:
    """Thirty participants, and six who can restart a stuck seat, with another password."""
    people = values["hub"]["config"]["Authenticator"]
    helpers, all_others = people.get("admin_users", []), people["allowed_users"]
    if len(set(all_others)) != 30 or len(set(helpers) - set(all_others)) != 6:
        yield f"{len(all_others)} participants and {len(helpers)} helpers have seats"


@rule("hub/values.gpu.yaml")
def seat_with_a_gpu(values: dict) -> Iterator[str]:
    """It has room for a lesson in full mode, on a usual node."""
    for each in values["singleuser"]["profileList"]:
        own = each.get("kubespawner_override", {})
        disk = own.get("extra_resource_limits", {}).get("ephemeral-storage", "0Gi")
        if not own:
            continue
        if not fits_a_gpu_node(own["cpu_guarantee"], quantity(own["mem_guarantee"])):
            yield "no machine with one GPU and 32 GiB has room: it stays Pending"
        if quantity(own["mem_limit"]) < 20e9:
            yield "03/03 takes 9 GB in one kernel, and Ray is beside it"
        if not own["environment"].get("WORKSHOP_STORAGE", "").startswith("/tmp/"):
            yield "02/03 fills the home"
        if not 20 * 2**30 <= quantity(disk) <= 50 * 2**30:
            yield "02/03 has no room, or one person may fill a node's disk"
