"""A machine that several people share: each has a seat, and nobody another one's."""

import ast
import contextlib
import os
import re
import subprocess
import threading
import time
import uuid
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import psutil
import pytest
import requests

from tests import one_machine
from tests.patience import PATIENCE, wait_until
from tests.skips import ROOT
from tests.tools.hub import LESSON, Seat

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
PAGE = (ROOT / "02-ddp-pytorch-ray/cluster/README.md").read_text()
ON_THE_PAGE = {  # what is measured, and where the page says how much a person needs of it
    "GB": r"Memory decides: ([\d.]+) GB for each person",
    "core seconds": r"computing: ([\d.]+) core seconds for each person",
}
LESSONS = {
    "01/01": "01-ddp-pytorch-only/01_data_parallelism_by_hand",
    "02/01": "02-ddp-pytorch-ray/01_ray_core",
    "02/02": "02-ddp-pytorch-ray/02_ray_train_ddp",
}
EXECUTE = """
import glob, os, subprocess
(notebook,) = glob.glob(os.path.expanduser("~/workshop-*/{lesson}.ipynb"))
run = ["jupyter-execute", "--inplace", "--kernel_name=python3", notebook]
done = subprocess.run(run, capture_output=True, text=True)
assert done.returncode == 0, done.stderr[-3000:]
"""
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
take = "b'x' * (9 * 2**30)"
print(subprocess.run([sys.executable, "-c", take]).returncode)
"""


FOUND = ["nothing", "own", "a link"]
FOUND += ["a neighbour's"] * (os.getuid() == 0)  # root alone can make one


@pytest.mark.parametrize("there", FOUND)
def test_a_seat_gets_a_folder_that_nobody_else_has_made(there, tmp_path):
    """Whoever owns TMPDIR can swap the files that programs write there."""
    config = ast.parse((ROOT / CONFIG).read_text())
    (prepare,) = [
        ast.literal_eval(node.value)
        for node in config.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "PREPARE"
    ]
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
            timeout=PATIENCE,
        )
        if there in ("nothing", "own"):
            assert done.returncode == 0 and own.stat().st_mode & 0o777 == 0o700
        else:
            assert done.returncode == 1
            assert f"{own} is not {name}'s: remove it" in done.stderr
    finally:
        own.unlink() if own.is_symlink() else own.rmdir()


@pytest.mark.weekly
@pytest.mark.xdist_group("ray")
def test_a_seat_trains_in_a_ray_of_its_own_and_leaves_nothing(tmp_path):
    with one_machine.hub(tmp_path, "ann") as hub:
        for name, password in [("ann", "wrong"), ("root", "wrong"), ("nobody", "")]:
            with pytest.raises(PermissionError):
                Seat(hub.url, name, password)
        seat = hub.seat("ann")
        who, access, transport = seat.run(WHERE).splitlines()
        assert who == f"ann {ROOT / '.venv'} /workshop/ann 10.0 2.0"
        assert access == "False 0"  # the lessons are root's, and the home ann's alone
        assert transport == "ipc"
        before = one_machine.computed()
        assert "Trained." in seat.run(LESSON)
        assert (
            one_machine.computed() - before > 1
        )  # importing torch alone takes as much
        uid = int(seat.run(UID))
        before = len(hub.of_user(uid))
        seat.run(RAY, keep=True)
        assert len(hub.of_user(uid)) > before
        seat.stop()
        wait_until(lambda: not hub.of_user(uid), said=lambda: hub.of_user(uid))


@pytest.mark.weekly
@pytest.mark.xdist_group("ray")
def test_three_people_learn_at_the_same_time_and_see_nothing_of_each_other(tmp_path):
    names = ["ann", "ben", "cem"]
    with (
        one_machine.hub(tmp_path, *names, mem_limit="8G") as hub,
        ThreadPoolExecutor(3) as at_once,
    ):
        seats = list(at_once.map(hub.seat, names))

        def learn(lesson: str, people: int) -> None:
            code = EXECUTE.format(lesson=LESSONS[lesson])
            list(at_once.map(lambda seat: seat.run(code), seats[:people]))

        learn("01/01", 3)
        learn("02/01", 3)
        needs = {n: measured(hub, partial(learn, "02/02", n)) for n in (1, 2, 3)}
        print(needs)
        draw(needs)
        for what, said in ON_THE_PAGE.items():
            values = [need[what] for need in needs.values()]
            steps = np.diff(values)
            assert 0.6 < steps[1] / steps[0] < 1.6, needs  # so a line may be drawn
            (each,) = re.findall(said, PAGE)
            slope = (values[2] - values[0]) / 2
            assert slope == pytest.approx(float(each), rel=0.3), what

        ann, ben, cem = seats
        said = ann.run(RAY, keep=True)
        dashboard, ray = said.partition("Dashboard: ")[2].split()[:2]
        pid = ann.run("import os; print(os.getppid())").strip()  # of the server
        facts = {"name": "ann", "dashboard": dashboard, "ray": ray, "pid": pid}
        seen = ben.run(LOOK.format(**facts))
        assert seen.count("\n") == 5, seen
        home, tmp, kill, jobs, joined = seen.splitlines()
        assert home == tmp == "PermissionError"
        assert kill == "PermissionError"
        assert jobs == "401"
        assert joined == "BadInput"  # it asks for a token, and ben's is another one
        kernels = f"{hub.url}/user/ann/api/kernels"
        assert requests.get(kernels, headers=ann.headers, timeout=60).ok
        assert requests.get(kernels, headers=ben.headers, timeout=60).status_code == 403
        assert cem.run(GREEDY).strip() == "-9"
        assert ann.ask("GET", "/hub/api/users/ann")["server"]  # nobody else has ended
        uids = [int(seat.run(UID)) for seat in seats]
        for seat in seats:
            seat.stop()
        wait_until(lambda: not any(map(hub.of_user, uids)))


def measured(hub: one_machine.Hub, work: Callable[[], object]) -> dict[str, float]:
    """Do the work; return its seconds, those of cores, and its most memory in GB.

    People are rarely at their highest at the same moment, but they may be. So each one's
    private memory counts at its own highest, and to that comes what is shared.
    """
    highest: dict[int, int] = defaultdict(int)  # by user, in bytes; -1: shared
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(1):
            for user, memory in memory_by_user(hub.process).items():
                highest[user] = max(highest[user], memory)

    with ThreadPoolExecutor(1) as watching:
        watched = watching.submit(watch)
        start, before = time.monotonic(), one_machine.computed()
        try:
            work()
        finally:
            ended.set()
        watched.result()
    return {
        "seconds": time.monotonic() - start,
        "core seconds": one_machine.computed() - before,
        "GB": sum(highest.values()) / 1e9,
        "GB shared": highest[-1] / 1e9,
    }


def memory_by_user(process: psutil.Process) -> dict[int, int]:
    """Return private bytes of a process and all below it, by user; -1: what they share."""
    found: dict[int, int] = defaultdict(int)
    for each in [process, *process.children(recursive=True)]:
        with contextlib.suppress(psutil.Error):  # it has just ended
            memory, user = each.memory_full_info(), each.uids().real
            found[user] += memory.uss
            found[-1] += memory.pss - memory.uss
    return found


def draw(needs: dict[int, dict[str, float]]) -> None:
    """Draw memory and core seconds of 1, 2 and 3 people, and lines through them to 30."""
    people = np.array(list(needs))
    figure, both = plt.subplots(1, 2, figsize=(9, 3.5), layout="constrained")
    figure.suptitle("Lesson 02/02, at the same time")
    for axes, what, unit in zip(both, ON_THE_PAGE, ("GB of memory", "core seconds")):
        values = np.array([need[what] for need in needs.values()])
        slope, start = np.polyfit(people, values, 1)
        end = start + 30 * slope
        axes.plot([0, 30], [start, end], color="0.6")
        axes.plot(people, values, "o")
        axes.set_title(f"{slope:.3g} {unit} for each person")
        axes.set_xlabel("people (measured: 1, 2 and 3)")
        axes.set_ylabel(unit)
        axes.set_xlim(0, 31)
        axes.set_ylim(0, 1.1 * end)
        axes.text(30, end, f"{end:,.0f}  ", ha="right")
    (folder := ROOT / "build/one-machine").mkdir(parents=True, exist_ok=True)
    figure.savefig(folder / "people.png", dpi=120)
    plt.close(figure)
