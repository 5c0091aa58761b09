"""cluster/: every file fits its schema and our rules, and each rule refuses a broken copy.

The schemas of KubeRay and of the chart jupyterhub are in the folder that WORKSHOP_SCHEMAS
names; else they are downloaded once, into build/.
"""

import copy
import functools
import itertools
import os
import re
import shlex
import shutil
import subprocess
import sys
from fnmatch import fnmatch

import jsonschema
import kubernetes_validate
import pytest
import requests
import yaml
from packaging.requirements import Requirement

from tests import manifests
from tests.manifests import ABSENT, CLUSTER, KUBERAY, MUST, ROOT, RULES, built
from tests.tools import hub
from tests.waiting import TIMEOUT_S

OPERATOR, CHART, KUBERNETES = "1.7.0", "4.4.0", "1.37"
GITHUB = "https://raw.githubusercontent.com"
CRDS = f"{GITHUB}/ray-project/kuberay/v{OPERATOR}/helm-chart/kuberay-operator/crds"
HUB = f"{GITHUB}/jupyterhub/zero-to-jupyterhub-k8s/{CHART}/jupyterhub"
# By file: its folder in WORKSHOP_SCHEMAS, and where it is else.
SCHEMAS = {
    "ray.io_rayclusters.yaml": (f"kuberay-{OPERATOR}", CRDS),
    "ray.io_rayjobs.yaml": (f"kuberay-{OPERATOR}", CRDS),
    "values.schema.yaml": (f"z2jh-{CHART}", HUB),
    "values.yaml": (f"z2jh-{CHART}", HUB),
}
EVERYTHING = manifests.everything()
PAGE = (CLUSTER / "README.md").read_text()
ANYSCALE = (CLUSTER / "anyscale" / "README.md").read_text()
WEEKLY = ROOT / ".venv-weekly" / "bin"


@functools.cache  # where there is no network, it is waited for once
def schema(name: str) -> dict:
    """Return a schema, at the version that our pages name; skip where it cannot be had."""
    folder, address = SCHEMAS[name]
    file = ROOT / os.environ.get("WORKSHOP_SCHEMAS", "build/schemas") / folder / name
    if not file.exists():
        file = ROOT / "build" / "schemas" / folder / name
    if not file.exists():
        try:
            answer = requests.get(f"{address}/{name}", timeout=TIMEOUT_S)
            answer.raise_for_status()
        except requests.RequestException:
            pytest.skip("a chart's schema is not here and cannot be downloaded")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(answer.text)
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
def kuberay(kind: str) -> jsonschema.Draft202012Validator:
    definition = schema(f"ray.io_{kind.lower()}s.yaml")
    versions = {each["name"]: each for each in definition["spec"]["versions"]}
    ours = versions["v1"]["schema"]["openAPIV3Schema"]
    return jsonschema.Draft202012Validator(strict(ours))


def merged(values: dict, more: dict) -> dict:
    """Return what Helm makes of two files of values: maps are merged, the rest replaced."""
    both = copy.deepcopy(values)
    for key, value in more.items():
        old = both.get(key)
        maps = isinstance(old, dict) and isinstance(value, dict)
        both[key] = merged(old, value) if maps else copy.deepcopy(value)
    return both


def validate(name: str, document: dict) -> None:
    """Ask the schema of a document.

    Raises:
        ValidationError (of jsonschema or kubernetes_validate): it does not fit.
    """
    if name.startswith("hub/"):  # Helm asks once ours are in the chart's
        chart = jsonschema.Draft202012Validator(schema("values.schema.yaml"))
        chart.validate(merged(schema("values.yaml"), document))
    elif document["apiVersion"] == "ray.io/v1":
        kuberay(document["kind"]).validate(document)
    else:
        kubernetes_validate.validate(document, KUBERNETES, strict=True)


# Prometheus' and Anyscale's have none here; kind.yml applies the first ones.
WITH_SCHEMA = [n for n in EVERYTHING if not n.startswith(("monitoring/", "anyscale/"))]


@pytest.mark.parametrize("name", WITH_SCHEMA)
def test_a_file_fits_its_schema(name):
    validate(name, EVERYTHING[name])


def broken(name: str, path: str, value: object) -> dict:
    """Return a copy of a document with another value at a path of keys, or without it."""
    document = copy.deepcopy(EVERYTHING[name])
    *way, last = [int(key) if key.isdigit() else key for key in path.split()]
    place = document
    for key in way:
        place = place.setdefault(key, {}) if isinstance(key, str) else place[key]
    if value is ABSENT:
        del place[last]
    else:
        place[last] = value
    return document


@pytest.mark.parametrize(
    ("name", "path", "value"),
    [
        ("cluster/RayCluster", "spec rayVersoin", "2.60.0"),
        ("cluster/RayCluster", "spec headGroupSpec rayStartParams num-cpus", 0),
        ("kuberay/ray-job.yaml", "spec entrypoints", "python train.py"),
        ("hub/values.yaml", "singleuser memory limits", "10G"),
        ("gpu/NetworkPolicy", "spec ingress 0 form", []),
        ("gpu/pod head", "spec securityContext fsGroup", "ray"),
    ],
)
def test_a_typing_error_does_not_fit_the_schema(name, path, value):
    refuses = (jsonschema.ValidationError, kubernetes_validate.ValidationError)
    with pytest.raises(refuses):
        validate(name, broken(name, path, value))


def test_the_hub_takes_seats_with_gpus_and_the_pages_login_of_github():
    """There, no list of names is left in force: one could be somebody's at GitHub."""
    ours = EVERYTHING["hub/values.yaml"]
    validate("hub/", merged(ours, EVERYTHING["hub/values.gpu.yaml"]))
    (block,) = re.findall(r"^```yaml\n(hub:.*?)^```", PAGE, re.M | re.S)
    github = merged(ours, yaml.safe_load(block))
    validate("hub/", github)
    people = {"allowed_users": [], "admin_users": ["your-name"]}
    assert github["hub"]["config"]["Authenticator"] == people


def test_one_file_has_the_whole_door_so_that_a_repetition_does_not_close_it():
    """All `helm upgrade`s of the page are one command, which reads that file."""
    (block,) = re.findall(r"^```yaml\n(proxy:.*?)^```", PAGE, re.M | re.S)
    door = yaml.safe_load(block)
    assert door["proxy"]["service"] == {"type": "LoadBalancer"}
    https = door["proxy"]["https"]
    assert https["hosts"] and https["letsencrypt"]["contactEmail"]
    https["enabled"] = True
    nodes = yaml.safe_load(re.search(r"`(scheduling: .*?)`", PAGE)[1])
    (password,) = re.findall(r"printf '(hub: .*?)\\n'", PAGE)
    passwords = yaml.safe_load(password)["hub"]["config"]["SharedPasswordAuthenticator"]
    assert passwords.keys() == {"user_password", "admin_password"}  # helpers', too
    values = merged(EVERYTHING["hub/values.yaml"], door | nodes)
    validate("hub/", merged(values, yaml.safe_load(password)))
    people = values["hub"]["config"]["Authenticator"]
    seats = len(people["allowed_users"] + people["admin_users"])
    assert nodes["scheduling"]["userPlaceholder"]["replicas"] == seats
    (upgrade,) = re.findall(r"^helm upgrade .*", PAGE, re.MULTILINE)
    assert "--values build/door.yaml" in upgrade and "--reuse-values" not in PAGE


def test_everybody_has_a_seat_wherever_the_room_is():
    people = EVERYTHING["hub/values.yaml"]["hub"]["config"]["Authenticator"]
    names = sorted(people["allowed_users"] + people["admin_users"])
    assert names == [f"seat-{number:02}" for number in range(1, 37)]
    assert set(re.findall(r"seat-\{01\.\.(\d+)\}", PAGE)) == {"36", "30"}
    assert re.findall(r"wc -l /root/door.txt` prints (\d+)", PAGE) == ["36"]
    loops = re.findall(r"for seat in \$\(seq -w 1 (\d+)\)", ANYSCALE)
    assert len(loops) > 4 and set(loops) == {"36"}


def test_the_bounds_hold_what_the_page_says():
    def size(kind: str) -> tuple[float, float]:
        limits = EVERYTHING[kind]["spec"]["containers"][0]["resources"]["limits"]
        return float(limits["cpu"]), manifests.quantity(limits["memory"]) / 2**30

    def room(workers: int) -> tuple[int, int, int]:
        """Return pods, CPUs and GiB: of so many workers, and the cluster with two GPUs."""
        pods = [size("cluster/pod workers")] * workers + [size("cluster/pod head")]
        pods += [size("gpu/pod workers")] * 2 + [size("gpu/pod head")]
        return len(pods), *(int(sum(each)) for each in zip(*pods))

    hard = EVERYTHING["room/ResourceQuota"]["spec"]["hard"]
    bounds = [hard["pods"], hard["limits.cpu"], hard["limits.memory"].rstrip("Gi")]
    assert all(need <= int(most) for need, most in zip(room(16), bounds))
    said = "51 workers need {} pods, {} CPUs and {}Gi".format(*room(51))
    assert said in PAGE


def test_a_node_that_the_page_calls_large_enough_holds_seven_seats():
    seat = EVERYTHING["hub/values.yaml"]["singleuser"]
    memory = int(re.search(r"53 GiB of memory \((\d+)Ki\)", PAGE)[1]) * 2**10
    assert 7 * manifests.quantity(seat["memory"]["guarantee"]) <= memory
    assert 7 * seat["cpu"]["guarantee"] <= 14


@pytest.mark.parametrize("name", EVERYTHING)
def test_a_file_keeps_the_rules(name):
    assert manifests.faults(name, EVERYTHING[name]) == []


PLACES = [(pattern, path) for pattern in MUST for path in MUST[pattern]]


@pytest.mark.parametrize(("pattern", "path"), PLACES)
def test_another_value_is_refused_where_one_must_stand(pattern, path):
    name = next(name for name in EVERYTHING if fnmatch(name, pattern))
    document = broken(name, path, "another")
    assert [f for f in manifests.faults(name, document) if f.startswith(f"{path}: ")]


BOX = "spec containers 0"
POLICY, WORKERS = "gpu/NetworkPolicy", "gpu/pod workers"
EVERYBODY = [{"ipBlock": {"cidr": "0.0.0.0/0"}}]
OTHERS = {"ray.io/cluster": "workshop"}
PROFILE = "singleuser profileList 1 kubespawner_override"
STORED = f"{PROFILE} environment WORKSHOP_STORAGE"
ADMINS = "hub config Authenticator admin_users"
BROKEN = [
    ("no_secret", WORKERS, f"{BOX} env 2 name", "AWS_SECRET_KEY"),
    ("open_ports", WORKERS, f"{BOX} ports 0 containerPort", 10001),
    ("open_ports", WORKERS, f"{BOX} ports", []),
    ("storage", WORKERS, f"{BOX} env 0 value", "/tmp/results"),
    ("storage", WORKERS, f"{BOX} volumeMounts 0 readOnly", True),
    ("storage", WORKERS, "spec volumes 0 persistentVolumeClaim claimName", "other"),
    ("shared_memory", WORKERS, "spec volumes 1 emptyDir medium", ABSENT),
    ("shared_memory", WORKERS, "spec volumes 1 emptyDir sizeLimit", "1Gi"),
    ("limits", WORKERS, f"{BOX} resources limits cpu", ABSENT),
    ("limits", WORKERS, f"{BOX} resources requests memory", ABSENT),
    ("limits", WORKERS, "spec volumes 2 emptyDir", {}),
    ("last_checkpoint", WORKERS, "spec terminationGracePeriodSeconds", 100),
    ("last_checkpoint", WORKERS, f"{BOX} env 3 value", "30"),
    ("gpus_are_used", WORKERS, f"{BOX} env 1 value", "smoke"),
    ("gpus_are_used", WORKERS, "spec tolerations", []),
    (
        "policy_of_one_cluster",
        POLICY,
        "spec egress 0 to 0 podSelector matchLabels",
        OTHERS,
    ),
    ("policy_inwards", POLICY, "spec ingress 2 from", EVERYBODY),
    ("policy_inwards", POLICY, "spec ingress 2 from 0 namespaceSelector", {}),
    ("policy_inwards", POLICY, "spec ingress 2 from", ABSENT),
    ("policy_inwards", POLICY, "spec ingress 2 ports", ABSENT),
    ("policy_inwards", POLICY, "spec ingress 2 ports 0 port", 10001),
    ("policy_outwards", POLICY, "spec egress 2 ports", ABSENT),
    ("policy_outwards", POLICY, "spec egress 1 to 0 namespaceSelector", {}),
    ("policy_outwards", POLICY, "spec egress 3 to 0 ipBlock except", ["10.0.0.0/8"]),
    ("seat_limits", "hub/values.yaml", "singleuser memory limit", ABSENT),
    ("seat_limits", "hub/values.yaml", "singleuser extraResource limits", {}),
    ("seat_limits", "hub/values.yaml", "singleuser storage extraVolumeMounts", {}),
    ("seat_with_a_gpu", "hub/values.gpu.yaml", f"{PROFILE} extra_resource_limits", {}),
    ("seat_with_a_gpu", "hub/values.gpu.yaml", f"{PROFILE} mem_guarantee", "30G"),
    ("seat_with_a_gpu", "hub/values.gpu.yaml", f"{PROFILE} mem_limit", "10G"),
    ("seat_with_a_gpu", "hub/values.gpu.yaml", STORED, "/home/ray/storage"),
    ("fits_its_node", WORKERS, f"{BOX} resources limits memory", "32Gi"),
    ("helpers_have_seats", "hub/values.yaml", ADMINS, ["seat-30"]),
]


@pytest.mark.parametrize(("rule", "name", "path", "value"), BROKEN)
def test_a_rule_refuses_a_broken_copy(rule, name, path, value):
    found = manifests.faults(name, broken(name, path, value))
    assert {fault.partition(":")[0] for fault in found} == {rule}


def test_every_rule_has_been_seen_to_refuse_something():
    assert {rule for rule, *_ in BROKEN} == RULES.keys()


@pytest.mark.parametrize("folder", ["cluster", "gpu", "kind", "room"])
def test_kubectl_builds_what_these_tests_look_at(folder):
    """kubectl has kustomize built in, and needs no cluster for that."""
    if not shutil.which("kubectl"):
        pytest.skip("kubectl is not installed here")
    command = ["kubectl", "kustomize", KUBERAY / folder]
    text = subprocess.check_output(command, timeout=TIMEOUT_S)
    theirs = [each for each in yaml.safe_load_all(text) if each]

    def name(document):
        return document["kind"], document["metadata"]["name"]

    assert sorted(theirs, key=name) == sorted(built(KUBERAY / folder), key=name)


# What stands in no file, with an example.
NOWHERE = {
    r"image: .*:latest|^FROM .*:latest|^FROM [^:\s]+$": "    image: ray:latest",
    r"chmod\s+-?\w*\s*777": "RUN chmod -R 777 /mnt",
    r"type: *(LoadBalancer|NodePort)|serviceType: *(Load|Node)": "type: LoadBalancer",
    r"(?i)(auth_token|password|secret_access_key) *[:=] *['\"]?\w{8}": (
        "  auth_token: abcdefgh123"
    ),
}


@pytest.mark.parametrize("pattern", NOWHERE)
def test_no_file_has_a_public_service_or_a_typed_password(pattern):
    assert re.search(pattern, NOWHERE[pattern], re.MULTILINE)
    files = [p for p in CLUSTER.rglob("*") if p.is_file()]
    for path in (p for p in files if p.suffix not in (".md", ".png")):
        assert not re.search(pattern, path.read_text(), re.MULTILINE), path


def test_the_image_is_no_root_and_has_the_pinned_packages():
    steps = [
        line.split()
        for line in (CLUSTER / "Containerfile").read_text().splitlines()
        if line[:1].isupper()
    ]
    assert [step[1] for step in steps if step[0] == "USER"] == ["1000"]
    (install,) = re.findall(
        r"pip install (?:.*\\\n)*.*-r .*", (CLUSTER / "Containerfile").read_text()
    )
    assert "-r requirements.txt -r /tmp/hub.txt" in install


def test_files_that_pip_does_not_read_have_the_same_pins():
    """Anyscale builds its image from one file; Ray is that of its base."""
    constraints = (ROOT / "constraints.txt").read_text()
    (ray,) = re.findall(r"^ray==(\S+)$", constraints, re.MULTILINE)
    assert EVERYTHING["cluster/RayCluster"]["spec"]["rayVersion"] == ray
    base, _, install = (
        (CLUSTER / "anyscale/Containerfile").read_text().partition("pip install")
    )
    assert re.search(rf"^FROM anyscale/ray:{ray}-slim-py311$", base, re.MULTILINE)
    found = {line.strip(' "\\') for line in install.splitlines()}
    for line in (ROOT / "requirements.txt").read_text().splitlines():
        line = line.partition("#")[0].strip()
        if line and line[0] != "-" and (package := Requirement(line)).name != "ray":
            pin = re.search(rf"^{package.name}==[^\s;]+", constraints, re.MULTILINE)
            assert (line if "<" in line else pin[0]) in found
    (hub,) = (CLUSTER / "hub/requirements.txt").read_text().split()
    assert hub in (CLUSTER / "one-machine/requirements.txt").read_text().split()


def test_a_notebook_at_anyscale_finds_utils(tmp_path):
    """By the image's own line; the page pushes the lessons to where that one looks."""
    lines = (CLUSTER / "anyscale/Containerfile").read_text().splitlines()
    (line,) = [each[4:] for each in lines if each.startswith("RUN echo")]
    assert "pushed, as they are in this commit, to `/home/ray/default`" in ANYSCALE
    assert "workspace_v2 push --name seat-$seat --local-dir build/lessons" in ANYSCALE
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", tmp_path], check=True
    )
    path = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
    line = line.replace("/home/ray/default", str(ROOT))
    subprocess.run(["sh", "-c", line], env=path, check=True, timeout=TIMEOUT_S)
    code = "import importlib.util; print(importlib.util.find_spec('utils').origin)"
    found = subprocess.check_output(
        ["python", "-c", code], env=path, cwd="/", text=True, timeout=TIMEOUT_S
    )
    assert found.strip() == str(ROOT / "utils/__init__.py")


def test_the_last_list_at_anyscale_has_all_seats():
    lists = re.findall(r"^anyscale workspace_v2 list .*", ANYSCALE, re.MULTILINE)
    assert lists  # the command line ends it after ten
    assert all(int(re.search(r"--max-items (\d+)", e)[1]) >= 36 for e in lists)


def test_a_prebuilt_codespace_has_its_packages():
    """GitHub runs these two commands when it prebuilds, and no `postCreateCommand`."""
    text = (ROOT / ".devcontainer" / "devcontainer.json").read_text()
    container = yaml.safe_load(text)
    commands = ("onCreateCommand", "updateContentCommand")
    assert "make setup" in [container.get(command) for command in commands]


def test_the_tool_starts_seats_and_leaves_them_running(monkeypatch, capsys):
    started = []
    monkeypatch.setattr(hub, "Seat", lambda *seat: started.append(seat))
    hub.start("http://127.0.0.1:1", "password", ["seat-01", "seat-02"])
    assert {name for _, name, _ in started} == {"seat-01", "seat-02"}
    assert capsys.readouterr().out == "2 servers run\n"


def test_a_correction_comes_beside_what_somebody_has_edited(tmp_path):
    """By the hub's own lines, at each start of a seat."""
    hooks = EVERYTHING["hub/values.yaml"]["singleuser"]["lifecycleHooks"]
    *shell, script = hooks["postStart"]["exec"]["command"]
    (lessons := tmp_path / "opt").mkdir()
    script = script.replace("/opt/workshop", str(lessons))
    for commit, text in (("friday", "1"), ("friday", "2"), ("sunday", "3")):
        (lessons / "lesson").write_text(text)
        own = {"HOME": str(tmp_path), "WORKSHOP_COMMIT": commit}
        own["PATH"] = os.environ["PATH"]
        subprocess.run([*shell, script], env=own, check=True, timeout=TIMEOUT_S)
        if text == "1":
            (tmp_path / "workshop-friday" / "lesson").write_text("mine")
    found = {p.parent.name: p.read_text() for p in tmp_path.glob("workshop-*/lesson")}
    assert found == {"workshop-friday": "mine", "workshop-sunday": "3"}


def test_the_pages_commands_name_files_and_versions_that_are_checked_here():
    for page in CLUSTER.rglob("*.md"):
        for name in re.findall(r"(?<=[\s'\"`=/])0\d-[\w./*-]+", page.read_text()):
            assert list(ROOT.glob(name.rstrip("."))), f"{page} names {name}"
    charts = set(re.findall(r"(?:kuberay|jupyterhub)/([\w-]+) --version (\S+)", PAGE))
    assert charts == {("kuberay-operator", OPERATOR), ("jupyterhub", CHART)}


# Commands of the page that kind.yml leaves out or does in another way, by a piece of them.
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
    "gcloud": "the machine is GitHub's",
    "hub --start": "two seats are started without it",
    "component=singleuser-server": "as above",
    "kill $(jobs -p)": "the machine ends",
}
SMALLER = {  # what the workflow adds to a command of the page, or changes in it
    " --build-arg TORCH_BACKEND=cpu": "",
    " --set singleuser.cpu.guarantee=0.5 --set singleuser.memory.guarantee=3G": "",
    '{user_password: "%s"}': '{user_password: "%s", admin_password: "%s"}',
    '-hex 6)" >': '-hex 6)" "$(openssl rand -base64 24)" >',
}


def test_kind_runs_the_commands_of_the_page():
    workflow = (ROOT / ".github/workflows/kind.yml").read_text()
    for ours, theirs in SMALLER.items():
        workflow = workflow.replace(ours, theirs)
    text = PAGE[PAGE.index("## Kubernetes\n") : PAGE.index("## Anyscale\n")]
    blocks = re.findall(r"^```bash\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    lines = [line.strip() for block in blocks for line in block.splitlines()]
    assert len(lines) > 40
    for line in lines:
        left_out = [piece for piece in NOT_ON_KIND if piece in line]
        assert left_out or line in workflow, f"kind.yml does not run {line!r}"


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
    if not (WEEKLY / "anyscale").exists():
        pytest.skip("no packages of the weekly tests here: `make .venv-weekly`")

    def load(*paths):
        command = [WEEKLY / "python", "-c", LOAD, *paths]
        return subprocess.run(
            command, capture_output=True, text=True, timeout=TIMEOUT_S
        )

    paths = sorted((CLUSTER / "anyscale").glob("*.yaml"))
    done = load(*paths)
    assert len(paths) == 4 and done.returncode == 0, done.stderr
    for path in paths:
        (tmp_path / path.name).write_text(path.read_text() + "surprise: 1\n")
        assert load(tmp_path / path.name).returncode, path
    commands = re.findall(r"anyscale (?:[a-z][\w-]+ )+--[^;\n`]+", ANYSCALE)
    assert len(commands) >= 18
    for line in commands:
        words = shlex.split(line)
        command = itertools.takewhile(lambda word: word[0] != "-", words[1:])
        ask = [WEEKLY / "anyscale", *command, "--help"]
        printed = subprocess.check_output(ask, text=True, timeout=TIMEOUT_S)
        assert all(word in printed for word in words if word[:2] == "--"), line
