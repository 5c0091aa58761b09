"""JupyterHub on one shared machine: a seat for each account of the group `workshop`.

Started as root in the root of the repository, as the hub becomes whoever logs in: README.md
of the folder above, "One shared machine", has all steps. Options:
https://jupyterhub.readthedocs.io/en/5.5.0/reference/config-reference.html
"""

import asyncio
import contextlib
import grp
import os
import pwd
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from jupyterhub.spawner import LocalProcessSpawner

# Root's: everybody reads it, nobody writes. But what the hub keeps is root's alone.
LESSONS = Path(__file__).resolve().parents[3]
HUB = Path(sys.prefix)  # the environment of the command `jupyterhub`
STATE = HUB / "state"
STATE.mkdir(mode=0o700, exist_ok=True)
CGROUPS, MEMBERS = Path("/sys/fs/cgroup"), "cgroup.procs"
PERIOD_US = 100_000
# Absent where the kernel does not count swap; without them, who takes too much is swapped.
OF_SWAP = {"memory.swap.max", "memory.memsw.limit_in_bytes"}
LONG_S = 300  # when thirty people start at once
IDLE_S = 7200  # longer than any lunch
# As the person, in the home: lessons of another commit stay beside these. Ray and others
# write to a folder of /tmp that nobody else may enter: not one that a neighbour made.
PREPARE = """
set -e
umask 077
own="/tmp/seat-$USER"
mkdir -p "$own" "$HOME/storage"
[ -O "$own" ] && [ ! -L "$own" ] || { echo "$own is not $USER's: remove it" >&2; exit 1; }
chmod 700 "$own"
there="$HOME/workshop-$0"
[ -e "$there" ] || {
  rm -rf "$there.new" && mkdir "$there.new" &&
  tar --extract --directory "$there.new" && mv "$there.new" "$there"
}
"""


class Seat(LocalProcessSpawner):
    """A person's JupyterLab, with a share of the machine for all its processes together."""

    def make_preexec_fn(self, name: str) -> Callable[[], None]:
        """Return what the new process does first: enter the groups, then be `name`."""
        become = super().make_preexec_fn(name)
        groups = control_groups(name, int(self.mem_limit), float(self.cpu_limit))

        def enter_and_become() -> None:
            for group in groups:
                (group / MEMBERS).write_text(str(os.getpid()))
            become()

        return enter_and_become

    async def stop(self, now: bool = False) -> None:
        """End the server, and what it leaves: a kernel that trains does not end at once."""
        await super().stop(now)
        groups = control_groups(
            self.user.name, int(self.mem_limit), float(self.cpu_limit)
        )
        while left := (groups[0] / MEMBERS).read_text().split():
            for number in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(number), signal.SIGKILL)
            await asyncio.sleep(0.1)

    def get_env(self) -> dict[str, str]:
        home, own = pwd.getpwnam(self.user.name).pw_dir, f"/tmp/seat-{self.user.name}"
        places = {
            "WORKSHOP_STORAGE": f"{home}/storage",
            "TMPDIR": own,
            "RAY_TMPDIR": own,
        }
        return super().get_env() | places


def control_groups(name: str, memory: int, cpus: float) -> list[Path]:
    """Limit what a person's processes take together (Linux, cgroups of version 1 or 2).

    Args:
        memory: bytes, of RAM and swap; the kernel ends a process of a person who takes
            more.
        cpus: how many cores' time they get.

    Returns:
        the groups: whoever writes a process's number into their file MEMBERS puts it in.
    """
    quota = int(cpus * PERIOD_US)
    if (CGROUPS / "cgroup.controllers").exists():  # version 2
        room = CGROUPS / "workshop"
        room.mkdir(exist_ok=True)
        for above in (CGROUPS, room):
            (above / "cgroup.subtree_control").write_text("+cpu +memory")
        cpu = f"{quota} {PERIOD_US}"
        limits = [("memory.max", memory), ("memory.swap.max", 0), ("cpu.max", cpu)]
        return [limited(room / name, limits)]
    both = "memory.memsw.limit_in_bytes"
    # with swap it may never be less than without, also while it changes
    of_memory = [(both, -1), ("memory.limit_in_bytes", memory), (both, memory)]
    of_cpu = [("cpu.cfs_period_us", PERIOD_US), ("cpu.cfs_quota_us", quota)]
    return [
        limited(CGROUPS / "memory/workshop" / name, of_memory),
        limited(CGROUPS / "cpu/workshop" / name, of_cpu),
    ]


def limited(group: Path, limits: Sequence[tuple[str, object]]) -> Path:
    """Make a control group with these limits, set one after the other."""
    group.mkdir(parents=True, exist_ok=True)
    for file, limit in limits:
        if file not in OF_SWAP or (group / file).exists():
            (group / file).write_text(str(limit))
    return group


def prepare(seat: Seat) -> None:
    """Give a person a copy of the lessons, and folders of their own.

    Raises:
        RuntimeError: there is no room, or somebody else has made their folder; the seat
            does not start.
    """
    git = ["git", "-C", LESSONS]
    name = [*git, "rev-parse", "--short=12", "HEAD"]
    commit = subprocess.check_output(name, text=True, timeout=LONG_S).strip()
    lessons = subprocess.check_output([*git, "archive", "HEAD"], timeout=LONG_S)
    su = ["su", "--login", "--shell", "/bin/sh", "--command", PREPARE, seat.user.name]
    done = subprocess.run(
        [*su, commit], input=lessons, capture_output=True, timeout=LONG_S
    )
    if done.returncode:
        raise RuntimeError(f"{seat.user.name}: {done.stderr.decode().strip()}")


def members(group: str) -> list[str]:
    """Return the accounts that were added to a group; none if there is no such group."""
    with contextlib.suppress(KeyError):
        return grp.getgrnam(group).gr_mem
    return []


c = get_config()  # noqa: F821  # type: ignore  # JupyterHub defines it
c.JupyterHub.spawner_class = Seat
c.JupyterHub.bind_url = "http://127.0.0.1:8000"  # until there is a certificate
c.JupyterHub.cookie_secret_file = str(STATE / "cookie_secret")
c.JupyterHub.db_url = f"sqlite:///{STATE}/jupyterhub.sqlite"
c.ConfigurableHTTPProxy.command = [f"{HUB}/node_modules/.bin/configurable-http-proxy"]
c.ConfigurableHTTPProxy.pid_file = str(STATE / "proxy.pid")
c.LocalAuthenticator.allowed_groups = {
    "workshop"
}  # with the passwords of their accounts
# Stop and start everybody's seat, at /hub/admin; open none but their own.
c.JupyterHub.load_roles = [
    {
        "name": "helpers",
        "scopes": ["admin-ui", "list:users", "read:users", "servers"],
        "users": members("workshop-helpers"),
    }
]
c.Seat.cmd = [f"{HUB}/bin/jupyterhub-singleuser"]
c.Seat.default_url = "/lab"
c.Seat.args = [
    "--KernelManager.transport=ipc",  # of TCP, everybody here could read outputs
    # whose browser is closed: an idle kernel goes, and then the seat
    f"--MappingKernelManager.cull_idle_timeout={IDLE_S}",
    f"--ServerApp.shutdown_no_activity_timeout={IDLE_S}",
]
c.Seat.notebook_dir = "~"
c.Seat.mem_limit = "10G"
c.Seat.cpu_limit = 2
c.Seat.pre_spawn_hook = prepare
c.Seat.http_timeout = c.Seat.start_timeout = LONG_S
c.Seat.environment = {
    "PATH": f"{LESSONS}/.venv/bin:{os.environ['PATH']}",
    "JUPYTER_PATH": f"{LESSONS}/.venv/share/jupyter",  # the kernel of the workshop
    "OMP_NUM_THREADS": "1",  # ranks share the cores
    "WORKSHOP_MODE": "smoke",  # else each seat takes all GPUs of this machine
    "WORKSHOP_LESSONS": str(LESSONS),  # as they were written
}
