"""JupyterHub on this machine, with accounts that exist only for it.

For Linux and root. The hub runs in namespaces of its own for mounts and processes: there
`/etc`, `/home` and `/tmp` are copies or new, so an account is made as on a real machine and
is gone afterwards, with everything that it started. `make hub` installs it.
"""

import contextlib
import os
import secrets
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import requests

from tests.machines import may_mount
from tests.scripts import ROOT
from tests.tools.hub import Seat
from tests.waiting import TIMEOUT_S, wait_until
from utils.processes import free_port

CONFIG = ROOT / "02-ddp-pytorch-ray/cluster/one-machine/jupyterhub_config.py"
HUB = ROOT / ".venv-weekly"
TMP = Path("/tmp")
CGROUPS = Path("/sys/fs/cgroup")
OWN = "/home/.hub"  # in there: what a hub installed for long keeps beside its packages
# What the README's steps do to a machine, in namespaces. $1 is an empty folder; %s opens
# what accounts have to read below folders that are closed to them.
START = """
set -e
mount -t tmpfs tmpfs "$1"
cp -a /etc "$1/etc" && mount --bind "$1/etc" /etc
mkdir -p "$1/home/.hub" && chmod 700 "$1/home/.hub" && mount --bind "$1/home" /home
mkdir -m 1777 "$1/tmp"
%s
mount --rbind "$1/tmp" /tmp
shift
groupadd workshop
groupadd workshop-helpers
while [ "$1" != -- ]; do
  groups=workshop
  [ "$1" != "$HELPER" ] || groups=workshop,workshop-helpers
  useradd --create-home --groups "$groups" --shell /bin/bash "$1"
  chmod 700 "/home/$1"
  echo "$1:$2" | chpasswd
  shift 2
done
shift
exec "$@"
"""


@dataclass
class Hub:
    """A hub that answers at `url`; `people` are names with their passwords."""

    url: str
    people: dict[str, str]
    process: psutil.Process

    def seat(self, name: str) -> Seat:
        """Log in, and start the server."""
        return Seat(self.url, name, self.people[name])

    def of_user(self, uid: int) -> list[psutil.Process]:
        """Return what runs as this person, zombies left out."""
        found = []
        for process in self.process.children(recursive=True):
            with contextlib.suppress(psutil.Error):
                dead = process.status() == psutil.STATUS_ZOMBIE
                if process.uids().real == uid and not dead:
                    found.append(process)
        return found


def opened(*paths: Path) -> str:
    """Return lines for a shell that show, of closed folders above paths, the paths alone.

    And of /tmp, which is a new one.
    """
    below: dict[Path, set[Path]] = {}
    for path in paths:
        above = reversed(path.parents)
        hidden = (up for up in above if up == TMP or not up.stat().st_mode & 1)
        if closed := next(hidden, None):
            below.setdefault(closed, set()).add(path)
    lines = []
    for closed, shown in below.items():
        new = '"$1"' if closed == TMP else '"$1/opened"'
        for path in map(shlex.quote, map(str, shown)):
            lines += [f"mkdir -p {new}{path}", f"mount --bind {path} {new}{path}"]
        if closed != TMP:
            place = shlex.quote(str(closed))
            lines += [f"mount --rbind {new}{place} {place}"]
    return "\n".join(lines)


@contextlib.contextmanager
def hub(
    folder: Path, *names: str, helper: str = "", **settings: object
) -> Iterator[Hub]:
    """Yield a hub for these names, one of which may be a helper's.

    Args:
        settings: of `Seat`, for its command line.
    """
    if not may_mount():
        pytest.skip("this user may not make network namespaces")
    if not (HUB / "node_modules/.bin/configurable-http-proxy").exists():
        pytest.skip("no packages of the weekly tests here: `make .venv-weekly`")
    (inside := folder / "inside").mkdir()
    people = {name: secrets.token_hex(8) for name in names}
    script = START % opened(Path(sys.base_prefix), ROOT)
    accounts = [word for pair in people.items() for word in pair]
    url = f"http://127.0.0.1:{free_port()}"
    command = [HUB / "bin/jupyterhub", "--config", CONFIG]
    command += [f"--JupyterHub.bind_url={url}"]
    command += [f"--JupyterHub.hub_bind_url=http://127.0.0.1:{free_port()}"]
    command += [f"--ConfigurableHTTPProxy.api_url=http://127.0.0.1:{free_port()}"]
    command += [f"--JupyterHub.db_url=sqlite:///{OWN}/hub.sqlite"]
    command += [f"--JupyterHub.cookie_secret_file={OWN}/cookie_secret"]
    command += [f"--ConfigurableHTTPProxy.pid_file={OWN}/proxy.pid"]
    command += [f"--Seat.{name}={value}" for name, value in settings.items()]
    # also if this test is killed, it ends with all that it has started
    alone = ["setpriv", "--pdeathsig", "KILL"]
    alone += ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
    started = ["sh", "-c", script, "sh", inside, *accounts, "--"]
    log = folder / "hub.log"
    with log.open("w") as output:
        job = subprocess.Popen(
            [*alone, *map(str, started), *map(str, command)],
            env=os.environ
            | {"PATH": f"{HUB / 'bin'}:{os.environ['PATH']}", "HELPER": helper},
            stdout=output,
            stderr=output,
        )
    try:
        wait_until(lambda: answers(url), job, log.read_text)
        yield Hub(url, people, psutil.Process(job.pid))
    except BaseException:
        print(log.read_text()[-5000:])
        raise
    finally:
        job.kill()  # and with it all that it has started
        job.wait(TIMEOUT_S)
        for controller in ("memory", "cpu", "."):
            remove_groups(CGROUPS / controller / "workshop")


def answers(url: str) -> bool:
    try:
        return requests.get(f"{url}/hub/health", timeout=60).ok
    except requests.ConnectionError:
        return False


def remove_groups(room: Path) -> None:
    """Remove the control groups; the last process takes a moment to leave."""
    deadline = time.monotonic() + 60
    for group in [*room.glob("*/"), room]:
        while group.exists() and time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                group.rmdir()
            time.sleep(0.1)
