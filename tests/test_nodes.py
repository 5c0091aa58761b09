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

import psutil
import pytest
import torch

from tests import scripts
from tests.machines import Machine, machines
from tests.patience import PATIENCE, wait_until
from utils import nodes

# Seven minutes beside 02/06 and 02/07, which start several nodes of Ray in every change.
pytestmark = [pytest.mark.part02, pytest.mark.weekly]

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

    def end(self, timeout: float = PATIENCE) -> tuple[int, str, str]:
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

    def submit(self, entrypoint: list, env_vars: dict | None = None, *options) -> Run:
        """Submit a Python program as a job, with variables, and follow it to its end."""
        command = [*RAY, "job", "submit", "--address=http://127.0.0.1:8265", *options]
        if env_vars:
            brought = json.dumps({"env_vars": env_vars})
            command.append(f"--runtime-env-json={brought}")
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
    *_, file = sorted(folder.rglob("checkpoint.pt"))
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


ONE_WORKER = ["--num-workers", "1"]  # two such runs train side by side


def with_data(folder: Path) -> list[str]:
    """Return what to type for an epoch of one worker; the other node's CPU reads."""
    command = [scripts.TRAIN_RAY_DDP_WITH_RAY_DATA, *ONE_WORKER, "--smoke-test"]
    return [*command, "--num-epochs", "1", "--checkpoint-dir", folder]


SCRIPTS: dict[str, Callable[[Path], list]] = {
    "ddp": train_ray_ddp,
    "data": with_data,
    "fsdp2": lambda folder: part03("train_fsdp2.py", folder),
    "deepspeed": lambda folder: part03("train_deepspeed.py", folder),
}
IMPORTS = """
import sys
from pathlib import Path
from utils.cluster import start_ray
import ray

def folder():
    from utils import models
    return models.__file__

start_ray(2) if sys.argv[1] == "with" else ray.init()
there = {f"node:{sys.argv[2]}": 0.001}  # takes no CPU, of which another job has all
print(ray.get(ray.remote(num_cpus=0, resources=there)(folder).remote()))
"""


def wait_for(true: Callable[[], object], run: Run) -> None:
    """Wait until `true()`; a command may not end before."""
    wait_until(true, run.process, lambda: f"{run.out.read_text()}{run.err.read_text()}")


def has_checkpoint(folder: Path) -> bool:
    """Return whether a run of train_ray_ddp.py has one that its controller noted."""
    noted = folder / "train_ray_ddp" / "checkpoint_manager_snapshot.json"
    return noted.exists() and "checkpoint_2" in noted.read_text()


def same_weights(folder: Path, other: Path) -> bool:
    ours, theirs = weights(folder), weights(other)
    return ours.keys() == theirs.keys() and all(
        torch.allclose(ours[name], theirs[name], rtol=0, atol=1e-6) for name in ours
    )


HOLD = """
import sys, time
from pathlib import Path
import ray
from ray.util.placement_group import placement_group
ray.init()
ray.get(placement_group([{"CPU": 1}] * 2).ready())
Path(sys.argv[1]).touch()
while Path(sys.argv[1]).exists():
    time.sleep(0.1)
"""
WAITS = "Of the cluster's 2 CPU, 0 are free: this run waits until other jobs"


def variables(folder: Path) -> dict[str, str]:
    """Return what a job may bring along."""
    return {"WORKSHOP_MODE": "smoke", "WORKSHOP_STORAGE": str(folder)}


@pytest.fixture(scope="module")
def runs(two_nodes) -> dict[str, Run]:
    """Return what begins while a job holds both nodes, and goes on when that has ended."""
    shared = two_nodes.shared
    program, holds = shared / "hold.py", shared / "holds"
    program.write_text(HOLD)
    other = two_nodes.driver([program, holds])
    wait_for(holds.exists, other)

    brings = part03("train_fsdp2.py", shared / "its-own" / "fsdp2", *ONE_WORKER)
    brings[0] = brings[0].relative_to(scripts.ROOT)  # in what it brings, too
    sent = {"working_dir": ".", "py_modules": ["utils"]}
    file = shared / "runtime-env.json"
    file.write_text(json.dumps(sent | {"env_vars": variables(shared / "its-own")}))
    node = two_nodes.nodes[0].address
    fails = {
        "utils": two_nodes.driver(["-c", IMPORTS, "with", node]),
        "no utils": two_nodes.driver(["-c", IMPORTS, "without", node]),
        "not shared": two_nodes.driver(
            part03("train_fsdp2.py", two_nodes.local / "run")
        ),
    }
    waits = {name: two_nodes.driver(of(shared / name)) for name, of in SCRIPTS.items()}
    alone = part03("train_fsdp2.py", shared / "job-fsdp2", *ONE_WORKER)
    waits["job"] = two_nodes.submit(alone)
    waits["job with variables"] = two_nodes.submit(
        brings, None, f"--runtime-env={file}"
    )
    for run in waits.values():
        wait_for(lambda run=run: WAITS in run.out.read_text(), run)
    holds.unlink()  # ends the other one
    assert other.end()[0] == 0
    return fails | waits


def test_utils_is_sent_to_nodes_that_lack_it(runs):
    """With ray.init alone, as a control, nothing is sent."""
    code, out, err = runs["utils"].end()
    assert code == 0, err
    assert "py_modules_files" in out.splitlines()[-1]
    assert "cannot import name 'models' from 'utils'" in runs["no utils"].end()[2]


def test_a_folder_that_nodes_do_not_share_is_said(two_nodes, runs):
    code, _, err = runs["not shared"].end()
    assert code == 1
    (said,) = err.splitlines()
    assert f"{two_nodes.local}/run is not shared: node(s) 10.77.0." in said
    assert "Name a folder that all nodes mount." in said


def test_a_run_on_two_nodes_is_one_line_per_epoch(runs):
    code, out, err = runs["ddp"].end()
    assert code == 0, err
    started, waits, begins, *epochs, trained = out.splitlines()
    assert begins.endswith("starts anew: ddp holds no checkpoint yet")
    assert started.startswith("Ray 2.") and "with 3 node(s), 2 logical CPUs" in started
    assert waits.startswith(WAITS)
    assert len(epochs) == 2 and all("loss" in line for line in epochs)
    assert "ip=10.77.0." in epochs[0]
    assert trained.startswith("Trained. The last checkpoint is in ")
    assert err == ""


def test_a_run_that_streams_on_two_nodes_is_one_line_per_epoch(runs):
    code, out, err = runs["data"].end()
    assert code == 0, err
    _, *waits, rows, begins, epoch, trained = out.splitlines()
    assert waits and all(line.startswith(WAITS) for line in waits)
    assert rows.endswith("for each worker")
    assert begins.endswith("starts anew: data holds no checkpoint yet")
    assert "ip=10.77.0." in epoch and "epoch 1: loss" in epoch
    assert trained.startswith("Trained. The last checkpoint is in ")
    assert err == ""


@pytest.mark.parametrize("script", ["fsdp2", "deepspeed"])
def test_a_sharded_run_on_two_nodes_says_where_it_begins_and_ends(runs, script):
    code, out, err = runs[script].end()
    assert code == 0, err
    _, waits, begins, trained = out.splitlines()
    assert waits.startswith(WAITS)
    assert begins.endswith(f"starts anew: {script} holds no checkpoint yet")
    assert trained.startswith("steps 1 to 10: last loss")
    assert err == ""


@pytest.mark.parametrize(
    ("job", "folder"), [("job", "job-fsdp2"), ("job with variables", "its-own/fsdp2")]
)
def test_a_script_of_part_03_is_a_job(two_nodes, runs, job, folder):
    """It has waited for another job, and said so. Variables come with `utils`, too."""
    code, out, _ = runs[job].end()
    assert code == 0 and "\nsteps 1 to 10: last loss" in out, out
    assert (two_nodes.shared / folder / "step-000010" / ".metadata").exists()
    if job == "job with variables":
        written = (two_nodes.shared / folder).parent.glob(
            "train_fsdp2_*"
        )  # by Ray Train
        assert list(written)


def test_a_job_loses_its_driver_and_then_a_node(two_nodes, runs):
    """Resubmitted, it goes on; a node cut off comes back; the weights are the same.

    A script of part 02: killed with variables, and resubmitted without.
    """
    folder, node = two_nodes.shared / "job", two_nodes.nodes[1]
    for run in runs.values():
        run.end()  # what is cut off below is its own
    entrypoint = train_ray_ddp(folder)
    killed = two_nodes.submit(entrypoint, variables(two_nodes.shared / "storage"))
    wait_for(lambda: has_checkpoint(folder), killed)
    (driver,) = [
        process
        for process in two_nodes.head.processes(str(scripts.TRAIN_RAY_DDP))
        if process.cmdline()[1] == str(scripts.TRAIN_RAY_DDP)  # not what has sent it
    ]
    driver.kill()
    driver.wait(PATIENCE)
    again = two_nodes.submit(entrypoint)
    code, out, _ = killed.end()
    assert code == 1 and "epoch 2" not in out, out

    for each in two_nodes.nodes:
        wait_for(lambda each=each: each.processes("RayTrainWorker"), again)
    node.cut()  # from then on the other one's worker waits for it, until it counts as lost
    wait_for(lambda: not two_nodes.nodes[0].processes("RayTrainWorker"), again)
    node.plug()  # its raylet learns that it counts as lost, and ends
    wait_for(lambda: not node.processes("raylet/raylet"), again)
    two_nodes.join(node)
    code, out, _ = again.end()
    assert code == 0, out
    assert "epoch 2:" in out and "epoch 1:" not in out
    assert same_weights(folder, two_nodes.shared / "ddp")


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


@pytest.mark.weekly
def test_a_notice_saves_in_mid_epoch_and_the_run_ends_as_an_undisturbed_one(tmp_path):
    with cluster(tmp_path, 3) as there:
        undisturbed, drained = there.shared / "undisturbed", there.shared / "drained"
        # an epoch takes longer than the deadline: none ends between notice and restart
        long = ["--batch-size", "2"]
        code, out, err = there.driver(train_ray_ddp(undisturbed, *long)).end()
        assert code == 0, f"{out}{err}"
        run = there.driver(train_ray_ddp(drained, *long))
        wait_for(lambda: "epoch 1:" in run.out.read_text(), run)
        node = next(n for n in there.nodes if n.processes("RayTrainWorker"))
        code, out, err = there.driver(["-c", DRAIN, node.address, *RAY]).end()
        assert code == 0, f"{out}{err}"
        code, out, err = run.end()
        assert code == 0, f"{out}{err}"
        assert re.search(r"goes on after epoch \d+ of drained, and \d+ images", out), (
            out
        )
        ours, theirs = weights(drained), weights(undisturbed)
        assert all(torch.equal(ours[name], theirs[name]) for name in ours | theirs)


@pytest.mark.weekly
@pytest.mark.parametrize("brings", [False, True])
def test_every_script_is_submitted_as_a_job(two_nodes, brings):
    for name, command in SCRIPTS.items():
        folder = two_nodes.shared / f"{name}{brings}"
        env_vars = variables(two_nodes.shared / "storage") if brings else None
        code, out, _ = two_nodes.submit(command(folder), env_vars).end()
        assert code == 0, out


EXECUTE = """
import sys
from pathlib import Path
from tests.tools.notebooks.execution import execute

for cell in execute(Path(sys.argv[1]), {}).cells:
    print(*[output.get("text", "") for output in cell.get("outputs", [])])
"""


TRAINS = """
import sys, ray
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

ray.init(logging_level="ERROR")
storage = RunConfig(name=sys.argv[2], storage_path=sys.argv[1])
one = ScalingConfig(num_workers=1)
TorchTrainer(lambda: None, scaling_config=one, run_config=storage).fit()
context = ray.get_runtime_context()
print("driver", context.get_job_id(), context.get_node_id())
"""
WHERE = """
import sys, ray
from ray.util.state import list_actors

ray.init(logging_level="ERROR")
of_job = [("class_name", "=", "TrainController"), ("job_id", "=", sys.argv[1])]
(controller,) = list_actors(filters=of_job)
print("controller", controller.node_id, ray.get_runtime_context().get_node_id())
"""


@pytest.mark.weekly
@pytest.mark.parametrize("cpus", [0, 1])
def test_a_driver_that_asks_for_a_cpu_is_on_a_node_and_its_controller_with_it(
    two_nodes, cpus
):
    program = two_nodes.shared / "trains.py"
    program.write_text(TRAINS)
    command = [program, two_nodes.shared / "where", f"asks-for-{cpus}"]
    options = [f"--entrypoint-num-cpus={cpus}"] if cpus else []
    code, out, _ = two_nodes.submit(command, None, *options).end()
    assert code == 0, out
    (job, driver) = re.search(r"driver (\w+) (\w+)", out).groups()
    code, out, err = two_nodes.driver(["-c", WHERE, job]).end()
    assert code == 0, err
    (controller, head) = re.search(r"controller (\w+) (\w+)", out).groups()
    assert controller == driver and (driver == head) == (not cpus)


@pytest.mark.weekly
def test_the_notebook_uses_a_cluster_that_is_there(tmp_path):
    """All of it, on nodes without this repository."""
    notebook = scripts.ROOT / "02-ddp-pytorch-ray" / "06_more_than_one_machine.ipynb"
    with cluster(tmp_path, 2, num_cpus=2) as there:
        code, out, err = there.driver(["-c", EXECUTE, notebook]).end(600)
    assert code == 0, err
    started = [line for line in out.splitlines() if line.startswith("Ray 2.")]
    assert started and all(":8265" in line for line in started), started
    assert "Proved: modules and variables arrive only if" in out
    assert "'SENT': 'with the job', 'BEFORE': None" in out  # nobody has set it there
    assert "storage path: 3 of 3 nodes" in out
    assert "relative path: 0 of 3 nodes" in out


@pytest.mark.weekly
def test_host_names_that_mean_127_are_said(tmp_path):
    with cluster(tmp_path, 2, GLOO_SOCKET_IFNAME="") as there:
        _, _, err = there.driver(train_ray_ddp(there.shared / "run")).end()
    assert "set GLOO_SOCKET_IFNAME on every node" in err.splitlines()[-1]


@pytest.mark.weekly
def test_eight_nodes_start_train_and_end(tmp_path):
    with cluster(tmp_path, 8) as there:
        command = part03("train_fsdp2.py", there.shared / "run", "--batch-size", "2")
        command[command.index("--num-workers") + 1] = "8"
        code, out, err = there.driver(command).end()
        assert code == 0, err
        assert "with 9 node(s), 8 logical CPUs" in out
        machines_of_it = [there.head, *there.nodes]
        running = [p for machine in machines_of_it for p in machine.processes("ray")]
        assert len(running) > 16
    _, left = psutil.wait_procs(running, timeout=PATIENCE)  # the kernel takes a moment
    assert not left


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
    """A shell on a machine, in the repository, of a user who has set nothing yet."""

    def __init__(self, machine: Machine, home: Path):
        variables = {"HOME": str(home), "RAY_USAGE_STATS_ENABLED": "0"}
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


@pytest.mark.weekly
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
        assert [f"epoch {n}: loss" in said for n in (1, 2, 3)] == [True] * 3, said
        assert "Trained. The last checkpoint is in " in said and "succeeded" in said
        assert all("train_ray_ddp" in each.type(f"ls {shared}") for each in terminals)

        assert end == [] and "Type `ray stop` on every machine." in PAGE.read_text()
        for terminal in (other, head):
            terminal.type("ray stop")
        head.type("ray status", fails=True)


def test_a_machine_that_does_not_start_leaves_no_namespace():
    def names() -> set[str]:
        command = ["ip", "netns", "list"]
        return set(
            subprocess.check_output(command, text=True, timeout=PATIENCE).split()
        )

    try:
        with machines(1, [], []):
            before = names()
    except OSError:
        pytest.skip("this user may not make network namespaces")
    with pytest.raises(OSError, match="does not start"):
        with machines(2, [Path("/no/such/folder")], []):
            pass
    assert not {n for n in names() - before if n.startswith("workshop-")}
