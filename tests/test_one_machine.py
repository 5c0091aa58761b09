"""A machine that several people share: each has a seat, and nobody another one's."""

import ast
import os
import re
import subprocess
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import requests

from tests import one_machine
from tests.scripts import ROOT
from tests.tools.hub import LESSON, Seat
from tests.waiting import TIMEOUT_S, wait_until

# Where this code runs: as whom, in which Python, with which limits of memory and cores.
WHERE = f"""
import getpass, json, os, sys
from pathlib import Path
import ipykernel, utils
room = Path("/sys/fs/cgroup")
groups = dict(line.strip().split(":", 2)[1:] for line in open("/proc/self/cgroup"))
group = groups.get("memory", groups.get(""))
if (old := room / ("memory" + group)).exists():
    limit = (old / "memory.limit_in_bytes").read_text()
    cpu = room / ("cpu" + groups["cpu"])
    quota = int((cpu / "cpu.cfs_quota_us").read_text())
    period = int((cpu / "cpu.cfs_period_us").read_text())
else:
    limit = (room / group[1:] / "memory.max").read_text()
    quota, period = map(int, (room / group[1:] / "cpu.max").read_text().split())
print(getpass.getuser(), sys.prefix, group, int(limit) / 2**30, quota / period)
print(os.access({str(ROOT)!r}, os.W_OK), os.stat(Path.home()).st_mode & 0o77)
print(json.loads(Path(ipykernel.get_connection_file()).read_text())["transport"])
"""
UID = "import os; print(os.getuid())"
RAY = """
from utils.cluster import start_ray
import ray
start_ray(2)
print(ray.get_runtime_context().gcs_address)
"""
CONFIG = "02-ddp-pytorch-ray/cluster/one-machine/jupyterhub_config.py"
# As a curious neighbour. What raises nothing was possible.
LOOK = """
import os, requests
from utils.cluster import start_ray
def attempt(what):
    try:
        return what()
    except Exception as error:
        return type(error).__name__
print(attempt(lambda: os.listdir("/home/{name}")))
print(attempt(lambda: os.listdir("/tmp/seat-{name}")))
print(attempt(lambda: os.kill({pid}, 9)))
print(attempt(lambda: requests.get("{dashboard}/api/jobs/", timeout=60).status_code))
print(attempt(lambda: start_ray(1, address="{ray}")))
"""
GREEDY = """
import subprocess, sys
take = "b'x' * (6 * 2**30)"
print(subprocess.run([sys.executable, "-c", take]).returncode)
"""


def assigned(name: str) -> ast.expr:
    """Return what the hub's configuration assigns to a name."""
    (node,) = [
        each.value
        for each in ast.parse((ROOT / CONFIG).read_text()).body
        if isinstance(each, ast.Assign) and ast.unparse(each.targets[0]) == name
    ]
    return node


def test_seats_share_no_gpu_and_the_hub_outlives_who_starts_it():
    environment = assigned("c.Seat.environment")
    keys = [ast.literal_eval(key) for key in environment.keys]
    mode = environment.values[keys.index("WORKSHOP_MODE")]
    assert ast.literal_eval(mode) == "smoke"  # else each seat takes all of them
    page = (ROOT / CONFIG).parents[1].joinpath("README.md").read_text()
    starts = re.findall(r"^.*\$hub\b.*$", page, re.MULTILINE)
    assert len(starts) == 2  # in clear text for a try, and with a certificate
    assert all(s.startswith("systemd-run --unit workshop-hub ") for s in starts)
    assert "--JupyterHub.ssl_cert=" in starts[1]
    assert f'/.venv-hub/bin/jupyterhub --config /opt/workshop/{CONFIG}"\n' in page


FOUND = ["nothing", "own", "a link"]
FOUND += ["a neighbour's"] * (os.getuid() == 0)  # root alone can make one


@pytest.mark.parametrize("there", FOUND)
def test_a_seat_gets_a_folder_that_nobody_else_has_made(there, tmp_path):
    """Whoever owns TMPDIR can swap the files that programs write there."""
    prepare = ast.literal_eval(assigned("PREPARE"))
    name = f"nobody-{uuid.uuid4().hex}"
    own, home = Path(f"/tmp/seat-{name}"), tmp_path / "home"
    (home / "workshop-0").mkdir(parents=True)  # the lessons are there
    if there == "a link":
        own.symlink_to(tmp_path)
    elif there != "nothing":
        own.mkdir(mode=0o777)
    if there == "a neighbour's":
        os.chown(own, 65534, 65534)
    try:
        done = subprocess.run(
            ["sh", "-c", prepare, "0"],
            env={"PATH": os.environ["PATH"], "USER": name, "HOME": str(home)},
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
        if there in ("nothing", "own"):
            assert done.returncode == 0 and own.stat().st_mode & 0o777 == 0o700
        else:
            assert done.returncode == 1
            assert f"{own} is not {name}'s: remove it" in done.stderr
    finally:
        own.unlink() if own.is_symlink() else own.rmdir()


@pytest.mark.weekly
@pytest.mark.ray
def test_a_seat_trains_in_a_ray_of_its_own_and_leaves_nothing(tmp_path):
    with one_machine.hub(tmp_path, "ann") as hub:
        for name, password in [("ann", "wrong"), ("root", "wrong"), ("nobody", "")]:
            with pytest.raises(PermissionError):
                Seat(hub.url, name, password)
        seat = hub.seat("ann")
        who, access, transport = seat.run(WHERE).splitlines()
        user, found = who.split(" ", 1)  # a path may have spaces
        prefix, *limits = found.rsplit(" ", 3)
        assert user == "ann" and limits == ["/workshop/ann", "10.0", "2.0"]
        assert Path(prefix).samefile(ROOT / ".venv")
        assert access == "False 0"  # the lessons are root's, and the home ann's alone
        assert transport == "ipc"
        assert "Trained." in seat.run(LESSON)
        uid = int(seat.run(UID))
        before = len(hub.of_user(uid))
        seat.run(RAY, keep=True)
        assert len(hub.of_user(uid)) > before
        seat.stop()
        wait_until(lambda: not hub.of_user(uid), said=lambda: hub.of_user(uid))


@pytest.mark.weekly
def test_a_helper_starts_and_stops_any_seat_and_opens_none(tmp_path):
    with one_machine.hub(tmp_path, "ann", "eva", helper="eva") as hub:
        ann, eva = hub.seat("ann"), hub.seat("eva")
        for one, other, status in [(ann, "eva", 404), (eva, "ann", 200)]:
            seen = f"{hub.url}/hub/api/users/{other}"
            assert (
                requests.get(seen, headers=one.headers, timeout=60).status_code
                == status
            )
            kernels = f"{hub.url}/user/{other}/api/kernels"
            assert (
                requests.get(kernels, headers=one.headers, timeout=60).status_code
                == 403
            )
        mode = "import os; print(os.environ['WORKSHOP_MODE'])"
        assert ann.run(mode).strip() == "smoke"  # else it takes GPUs
        eva.ask("DELETE", "/hub/api/users/ann/server")
        assert not ann.ask("GET", "/hub/api/users/ann")["server"]
        eva.ask("POST", "/hub/api/users/ann/server")


@pytest.mark.weekly
@pytest.mark.ray
def test_two_people_see_nothing_of_each_other_and_none_takes_all_memory(tmp_path):
    names = ["ann", "ben"]
    with (
        one_machine.hub(tmp_path, *names, mem_limit="5G") as hub,
        ThreadPoolExecutor() as at_once,
    ):
        ann, ben = at_once.map(hub.seat, names)
        printed = ann.run(RAY, keep=True)
        dashboard, ray = printed.partition("Dashboard: ")[2].split()[:2]
        pid = ann.run("import os; print(os.getppid())").strip()  # of the server
        facts = {"name": "ann", "dashboard": dashboard, "ray": ray, "pid": pid}
        seen = ben.run(LOOK.format(**facts)).splitlines()
        # Ray asks for a token, and ben's is another one
        assert seen == [*["PermissionError"] * 3, "401", "BadInput"]
        kernels = f"{hub.url}/user/ann/api/kernels"
        assert requests.get(kernels, headers=ann.headers, timeout=60).ok
        assert requests.get(kernels, headers=ben.headers, timeout=60).status_code == 403
        assert ben.run(GREEDY).strip() == "-9"
        assert ann.ask("GET", "/hub/api/users/ann")["server"]  # hers goes on
