"""The workshop on several machines: code that is missing, storage, lost nodes, jobs.

Each machine has an address and files of its own (tests/machines.py). The first is a head
that trains nothing; the others have one CPU each, and not this repository.
"""

import contextlib
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from tests import scripts
from tests.machines import Machine, machines
from tests.waiting import TIMEOUT_S, wait_until
from utils import nodes

# Every change runs 02/06 and 02/07, which start several nodes of Ray in one machine.
pytestmark = pytest.mark.weekly

RAY = [nodes.python(), "-m", "ray.scripts.scripts"]  # what `ray` is
TOKEN = "1" * 64
# Lost after five checks without an answer in a second. Ray waits ten seconds for each:
# from a machine that is cut off comes no refusal, only silence.
HEALTH = {"health_check_period_ms": 500, "health_check_timeout_ms": 1000}
HIDDEN = [
    path for path in scripts.ROOT.iterdir() if path.is_dir() and path.name != ".venv"
]


class Run(NamedTuple):
    """A command on the head that goes on by itself, and the files with what it says."""

    process: subprocess.Popen
    out: Path
    err: Path

    def end(self, timeout: float = TIMEOUT_S) -> tuple[int, str, str]:
        """Wait for its end; return its exit status, and what it said."""
        code = self.process.wait(timeout)
        return code, self.out.read_text(), self.err.read_text()


class Cluster(NamedTuple):
    """A cluster of Ray, and the folders of its machines."""

    head: Machine
    nodes: list[Machine]
    shared: Path  # one for all
    local: Path  # each has its own

    @property
    def environment(self) -> dict[str, str]:
        """Return that of a user of any of these machines."""
        ours = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN}
        ours |= {"WORKSHOP_MODE": "smoke", "WORKSHOP_STORAGE": str(self.shared)}
        ours |= {"RAY_ADDRESS": f"{self.head.address}:6379", "HOME": str(self.local)}
        # here, as on Debian, a host name stands for a machine's own address
        ours |= {"GLOO_SOCKET_IFNAME": "eth0", "RAY_USAGE_STATS_ENABLED": "0"}
        found = scripts.environment() | ours
        del found["RAY_TMPDIR"]  # each machine has its own /tmp/ray
        return found

    def start(self, machine: Machine, *options: str, **environment: str) -> None:
        """Start Ray on a machine; returns when it runs."""
        command = [*RAY, "start", "--block", f"--node-ip-address={machine.address}"]
        log = self.shared / f"{machine.address}-{time.time_ns()}.log"
        with log.open("w") as file:
            started = subprocess.Popen(
                machine.command([*command, *options]),
                env=self.environment | environment,
                stdout=file,
                stderr=subprocess.STDOUT,
            )
        said = log.read_text
        wait_until(lambda: "Ray runtime started" in said(), started, said)

    def join(self, machine: Machine, num_cpus: int = 1, **environment: str) -> None:
        """Let a machine join."""
        address = f"--address={self.head.address}:6379"
        self.start(machine, address, f"--num-cpus={num_cpus}", **environment)

    def begin(self, command: list, folder: Path | str, **environment: str) -> Run:
        """Start a command on the head, in a folder."""
        name = self.shared / f"command-{time.time_ns()}"
        out, err = name.with_suffix(".out"), name.with_suffix(".err")
        with out.open("w") as stdout, err.open("w") as stderr:
            process = subprocess.Popen(
                self.head.command(command, folder),
                env=self.environment | environment,
                stdout=stdout,
                stderr=stderr,
            )
        return Run(process, out, err)

    def driver(self, command: list, **environment: str) -> Run:
        """Start a Python program on the head, in the root of this repository."""
        return self.begin([sys.executable, *command], scripts.ROOT, **environment)

    def submit(self, entrypoint: list, *options: str) -> Run:
        """Submit a Python program as a job, and follow it to its end."""
        command = [*RAY, "job", "submit", "--address=http://127.0.0.1:8265", *options]
        command += ["--", sys.executable, *entrypoint]
        # Ray's command keeps the job's lines in its buffer, if it prints to a file
        return self.begin(command, scripts.ROOT, PYTHONUNBUFFERED="1")


@contextlib.contextmanager
def cluster(
    folder: Path, num_nodes: int, num_cpus: int = 1, **environment: str
) -> Iterator[Cluster]:
    """Yield a head and some nodes, whose Ray starts with further variables, all at once."""
    shared, local = folder / "shared", folder / "local"
    for made in (shared, local, Path("/tmp/ray")):
        made.mkdir(parents=True, exist_ok=True)
    try:
        with machines(1 + num_nodes, [local, Path("/tmp/ray")], HIDDEN) as made:
            found = Cluster(made[0], made[1:], shared, local)
            health = f"--system-config={json.dumps(HEALTH)}"
            head = ["--head", "--port=6379", "--num-cpus=0", health]
            found.start(made[0], *head, "--dashboard-host=127.0.0.1", **environment)
            with ThreadPoolExecutor() as threads:
                joined = [
                    threads.submit(found.join, m, num_cpus, **environment)
                    for m in made[1:]
                ]
                [each.result() for each in joined]
            yield found
    except OSError as problem:
        if "netns add" in str(problem):
            pytest.skip("this user may not make network namespaces")
        raise


@pytest.fixture(scope="module")
def two_nodes(tmp_path_factory) -> Iterator[Cluster]:
    with cluster(tmp_path_factory.mktemp("nodes"), 2) as found:
        yield found


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """Return those of the last checkpoint of a run of train_ray_ddp.py."""
    *_, file = sorted(folder.glob("checkpoint_*/checkpoint.pt"))
    return torch.load(file, weights_only=True)["model"]


def train_ray_ddp(folder: Path, *arguments: str) -> list[str]:
    """Return what to type for two epochs on both nodes."""
    command = [scripts.TRAIN_RAY_DDP, "--num-workers", "2", "--epochs", "2"]
    return [*command, "--batch-size", "128", "--checkpoint-dir", folder, *arguments]


def part03(script: str, folder: Path, *arguments: str) -> list[str]:
    """Return what to type for ten steps on both nodes."""
    path = scripts.ROOT / "03-fsdp-deepspeed" / script
    command = [path, "--num-workers", "2", "--steps", "10", "--save-every", "5"]
    return [*command, "--checkpoint-dir", folder, *arguments]


def with_data(folder: Path) -> list[str]:
    """Return what to type for an epoch of one worker; the other node's CPU reads."""
    command = [scripts.TRAIN_RAY_DDP_WITH_RAY_DATA, "--num-workers", "1"]
    command += ["--smoke-test"]
    return [*command, "--num-epochs", "1", "--checkpoint-dir", folder]


IMPORTS = """
import sys
from utils.cluster import start_ray
import ray

def folder():
    from utils import models
    return models.__file__

start_ray(2) if sys.argv[1] == "with" else ray.init()
there = {f"node:{sys.argv[2]}": 0.001}  # on that node
print(ray.get(ray.remote(num_cpus=0, resources=there)(folder).remote()))
"""


def wait_for(true: Callable[[], object], run: Run) -> None:
    """Wait until `true()`; a command may not end before."""
    wait_until(true, run.process, lambda: f"{run.out.read_text()}{run.err.read_text()}")


def has_checkpoint(folder: Path) -> bool:
    """Return whether a run of train_ray_ddp.py has one that its controller noted."""
    noted = folder / "checkpoint_manager_snapshot.json"
    return noted.exists() and "checkpoint_2" in noted.read_text()


@pytest.mark.parametrize("sent", [True, False])
def test_nodes_that_lack_utils_get_it_from_start_ray_and_not_from_ray_init(
    two_nodes, sent
):
    how, node = "with" if sent else "without", two_nodes.nodes[0].address
    code, out, err = two_nodes.driver(["-c", IMPORTS, how, node]).end()
    if sent:
        assert code == 0, err
        assert "py_modules_files" in out.splitlines()[-1]
    else:
        assert "cannot import name 'models' from 'utils'" in err


def test_a_folder_that_nodes_do_not_share_is_refused_in_one_sentence(two_nodes):
    command = part03("train_fsdp2.py", two_nodes.local / "run")
    code, _, err = two_nodes.driver(command).end()
    assert code == 1
    (sentence,) = err.splitlines()
    assert f"{two_nodes.local}/run is not shared: node(s) 10.77.0." in sentence
    assert "Name a folder that all nodes mount." in sentence


SCRIPTS: dict[str, tuple[Callable[[Path], list], list[str]]] = {
    "ddp": (train_ray_ddp, ["epoch 1/2: loss", "epoch 2/2: loss"]),
    "data": (with_data, ["epoch 1/1: loss"]),
    "fsdp2": (lambda folder: part03("train_fsdp2.py", folder), []),
    "deepspeed": (lambda folder: part03("train_deepspeed.py", folder), []),
}


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_trains_on_two_nodes_with_a_line_per_epoch(two_nodes, script):
    command, epochs = SCRIPTS[script]
    code, out, err = two_nodes.driver(command(two_nodes.shared / script)).end()
    assert code == 0, err
    assert err == ""
    started, *_, last = out.splitlines()
    assert started.startswith("Ray 2.") and "with 3 node(s), 2 logical CPUs" in started
    ends = "Trained. The last checkpoint is in " if epochs else "step 10: loss "
    assert last.startswith(ends)
    assert re.findall(r"ip=10\.77\.0\..*(epoch \d/\d: loss)", out) == epochs


@pytest.mark.parametrize("brings", [True, False])
def test_a_script_of_part_03_is_a_job(two_nodes, brings):
    """With the code and the variables that it brings along, or with those of the nodes."""
    storage = two_nodes.shared / f"job-{brings}"
    command = part03("train_fsdp2.py", storage / "fsdp2")
    options = []
    if brings:
        variables = {"WORKSHOP_MODE": "smoke", "WORKSHOP_STORAGE": str(storage)}
        runtime = {"py_modules": ["utils"], "env_vars": variables}
        options = ["--working-dir=.", f"--runtime-env-json={json.dumps(runtime)}"]
        command[0] = command[0].relative_to(scripts.ROOT)  # in what it brings, too
    code, out, _ = two_nodes.submit(command, *options).end()
    assert code == 0 and "\nstep 10: loss " in out, out
    assert (storage / "fsdp2" / "train_fsdp2-000010" / ".metadata").exists()
    if brings:
        assert list(storage.glob("train_fsdp2_*"))  # by Ray Train


def test_a_job_that_lost_its_driver_and_then_a_node_ends_with_the_same_weights(
    two_nodes,
):
    """Resubmitted, it goes on; the node that was cut off comes back."""
    undisturbed, folder = two_nodes.shared / "undisturbed", two_nodes.shared / "lost"
    assert two_nodes.driver(train_ray_ddp(undisturbed)).end()[0] == 0
    node, entrypoint = two_nodes.nodes[1], train_ray_ddp(folder)
    killed = two_nodes.submit(entrypoint)
    wait_for(lambda: has_checkpoint(folder), killed)
    (driver,) = [
        process
        for process in two_nodes.head.processes(str(scripts.TRAIN_RAY_DDP))
        if process.cmdline()[1] == str(scripts.TRAIN_RAY_DDP)  # not what has sent it
    ]
    driver.kill()
    driver.wait(TIMEOUT_S)
    again = two_nodes.submit(entrypoint)
    code, out, _ = killed.end()
    assert code == 1 and "epoch 2/" not in out, out

    for each in two_nodes.nodes:
        wait_for(lambda each=each: each.processes("RayTrainWorker"), again)
    node.cut()  # from then on the other one's worker waits for it, until it counts as lost
    wait_for(lambda: not two_nodes.nodes[0].processes("RayTrainWorker"), again)
    node.plug()  # its raylet learns that it counts as lost, and ends
    wait_for(lambda: not node.processes("raylet/raylet"), again)
    two_nodes.join(node)
    code, out, _ = again.end()
    assert code == 0, out
    assert "epoch 2/" in out and "epoch 1/" not in out
    ours, theirs = weights(folder), weights(undisturbed)
    for name in ours | theirs:
        torch.testing.assert_close(ours[name], theirs[name], rtol=0, atol=1e-6)


DRAIN = """
import subprocess, sys
import ray
ray.init()
address, *command = sys.argv[1:]
(node,) = [n["NodeID"] for n in ray.nodes() if n["NodeManagerAddress"] == address]
notice = ["--deadline-remaining-seconds=8", "--reason-message=a cloud takes it back"]
notice += ["--reason=DRAIN_NODE_REASON_PREEMPTION", f"--node-id={node}"]
subprocess.run([*command, "drain-node", *notice], check=True, timeout=300)
"""


def test_a_node_that_is_taken_back_with_notice_costs_no_step(tmp_path):
    with cluster(tmp_path, 3) as there:
        undisturbed, drained = there.shared / "undisturbed", there.shared / "drained"
        # an epoch takes longer than the deadline: none ends between notice and restart
        long = ["--batch-size", "2"]
        code, out, err = there.driver(train_ray_ddp(undisturbed, *long)).end()
        assert code == 0, f"{out}{err}"
        run = there.driver(train_ray_ddp(drained, *long))
        wait_for(lambda: "epoch 1/" in run.out.read_text(), run)
        node = next(n for n in there.nodes if n.processes("RayTrainWorker"))
        code, out, err = there.driver(["-c", DRAIN, node.address, *RAY]).end()
        assert code == 0, f"{out}{err}"
        code, out, err = run.end()
        assert code == 0, f"{out}{err}"
        assert re.search(r"goes on after epoch \d+ of 'drained', and \d+ items", out), (
            out
        )
        ours, theirs = weights(drained), weights(undisturbed)
        assert all(torch.equal(ours[name], theirs[name]) for name in ours | theirs)


def test_host_names_that_mean_127_end_in_a_sentence_with_the_fix(tmp_path):
    with cluster(tmp_path, 2, GLOO_SOCKET_IFNAME="") as there:
        _, _, err = there.driver(train_ray_ddp(there.shared / "run")).end()
    assert "set GLOO_SOCKET_IFNAME on every node" in err.splitlines()[-1]


def listed(terminal: "Terminal") -> set[str]:
    """Return the nodes that `ray status` lists."""
    return set(re.findall("node_[0-9a-f]+", terminal.type("ray status")))


PAGE = scripts.ROOT / "02-ddp-pytorch-ray" / "cluster" / "README.md"


def steps(page: str, names: dict[str, str]) -> list[list[list[str]]]:
    """Return the page's commands, by step and block, with an operator's names."""
    section = page.partition("\n## Machines of your own\n")[2].partition("\n## ")[0]
    for written, name in names.items():
        assert written in section
        section = section.replace(written, name)
    found = re.split(r"^\*\*\d\. ", section, flags=re.MULTILINE)[1:]
    blocks = [re.findall(r"```bash\n(.*?)```", step, re.DOTALL) for step in found]
    assert all("Check: " in step for step in found)
    return [[block.splitlines() for block in step] for step in blocks]


class Terminal:
    """A shell on a machine, in the repository, of a user who has set only a niceness."""

    def __init__(self, machine: Machine, home: Path):
        # Ray's own commands give workers niceness 15: beside another test, which takes
        # both cores, five of five did not start in time.
        variables = {"HOME": str(home), "RAY_USAGE_STATS_ENABLED": "0"}
        variables |= {"RAY_worker_niceness": "0"}
        self._shell = subprocess.Popen(
            machine.command(["bash"], scripts.ROOT),
            env=variables
            | {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def type(self, *commands: str, fails: bool = False) -> str:
        """Type commands, which end well (or fail), one by one; return what they print."""
        lines = []
        for command in commands:
            self._shell.stdin.write(f"{command}\nprintf '\\nended %s\\n' $?\n")
            self._shell.stdin.flush()
            while not (line := self._shell.stdout.readline()).startswith("ended "):
                assert line, "the shell has ended"
                lines.append(line)
            assert (line != "ended 0\n") == fails, f"{command}\n{''.join(lines)}"
        return "".join(lines)


def test_the_operators_page_is_followed_from_nothing_to_a_finished_run(tmp_path):
    """Its commands as written, on two machines whose host names mean 127.0.0.1."""
    home, shared, ray = tmp_path / "home", tmp_path / "shared", Path("/tmp/ray")
    for folder in (home, shared, ray):
        folder.mkdir(exist_ok=True)
    names = {"10.0.0.1": "10.77.0.1", "10.0.0.2": "10.77.0.2"}
    token, first, others, run, end = steps(
        PAGE.read_text(), names | {"/mnt/workshop": str(shared)}
    )
    with machines(2, [home, ray], []) as made:
        head, other = terminals = [Terminal(machine, home) for machine in made]
        generate, everywhere = token
        head.type(*generate)
        head.type(f"cp ~/.ray/auth_token {shared}/token")  # a stick between machines
        other.type(f"install -D -m 600 {shared}/token ~/.ray/auth_token")
        sums = {terminal.type(*everywhere).strip() for terminal in terminals}
        assert len(sums) == 1 and re.fullmatch(r"[0-9a-f]{64}  -", sums.pop())

        start, request = first
        head.type(*start)
        wait_until(lambda: len(listed(head)) == 1)
        assert head.type(*request).strip() == "401"

        join, again = others
        other.type(*join)
        wait_until(lambda: len(listed(head)) == 2)
        before = listed(head)
        assert head.type('getent hosts "$(hostname)"').startswith("127.")
        other.type(*again)
        wait_until(lambda: len(listed(head)) == 2 and listed(head) != before)

        (submit,) = run
        said = head.type(*submit)
        assert [f"epoch {n}/3: loss" in said for n in (1, 2, 3)] == [True] * 3, said
        assert "Trained. The last checkpoint is in " in said and "succeeded" in said
        assert all("train_ray_ddp" in each.type(f"ls {shared}") for each in terminals)

        assert end == [] and "Type `ray stop` on every machine." in PAGE.read_text()
        for terminal in (other, head):
            terminal.type("ray stop")
        head.type("ray status", fails=True)
