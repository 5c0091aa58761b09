"""Machines made of namespaces: each has an address, processes and files of its own.

For tests of what crosses a network, on Linux and as root. A bridge joins them, which stands
in a namespace too: the network of the real machine stays as it is.
"""

import contextlib
import os
import shlex
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil

from tests.waiting import TIMEOUT_S

ADDRESS = "10.77.0.{}"  # inside of the namespaces only


def may_mount() -> bool:
    """Return whether this is root, and no container keeps CAP_SYS_ADMIN from it."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return False
    return bool(int(status.partition("CapEff:")[2].split()[0], 16) >> 21 & 1)


class Machine:
    """One of them, switched on.

    Args:
        bridge: name of the namespace of the bridge.
        number: the last part of its address.
        own: folders of which it has its own, empty to begin with; they must exist.

    Raises:
        OSError: it does not start.
    """

    def __init__(self, bridge: str, number: int, own: list[Path]):
        self.address = ADDRESS.format(number)
        self._bridge, self._port = bridge, f"port{number}"
        self._name = f"{bridge}-{number}"
        self._power = None
        _ip("netns", "add", self._name)
        try:
            self._start(own)
        except BaseException:
            self.off()
            raise

    def _start(self, own: list[Path]) -> None:
        """Connect it to the bridge, and turn its power on."""
        bridge = self._bridge
        cable = ["link", "add", self._port, "type", "veth"]
        _ip("-n", bridge, *cable, "peer", "name", "eth0", "netns", self._name)
        _ip("-n", bridge, "link", "set", self._port, "master", "bridge", "up")
        _ip("-n", self._name, "address", "add", f"{self.address}/24", "dev", "eth0")
        for device in ("eth0", "lo"):
            _ip("-n", self._name, "link", "set", device, "up")
        mounts = [f"mount -t tmpfs tmpfs {shlex.quote(str(path))}" for path in own]
        # What is started here ends with its first process, as its power is cut.
        alone = [
            "unshare",
            "--mount",
            "--pid",
            "--fork",
            "--kill-child",
            "--mount-proc",
        ]
        script = "\n".join(["set -e", *mounts, "echo on", "exec sleep infinity"])
        self._power = subprocess.Popen(
            ["ip", "netns", "exec", self._name, *alone, "sh", "-c", script],
            stdout=subprocess.PIPE,
            text=True,
        )
        if self._power.stdout.readline() != "on\n":
            raise OSError(f"The machine {self.address} does not start.")
        (first,) = psutil.Process(self._power.pid).children()
        self._first = str(first.pid)

    def command(self, command: list, folder: Path | str = "/") -> list[str]:
        """Return what to type outside to run `command` on this machine, in a folder."""
        enter = ["nsenter", "--target", self._first, "--mount", "--net", "--pid"]
        return [*enter, "env", f"--chdir={folder}", *map(str, command)]

    def processes(self, text: str) -> list[psutil.Process]:
        """Return its processes that have `text` in their command line."""
        here = os.readlink(f"/proc/{self._first}/ns/pid")
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.NoSuchProcess, OSError):
                same = os.readlink(f"/proc/{process.pid}/ns/pid") == here
                if same and text in " ".join(process.cmdline()):
                    found.append(process)
        return found

    def cut(self) -> None:
        """Pull its network cable: processes go on, and packets are lost."""
        _ip("-n", self._bridge, "link", "set", self._port, "down")

    def plug(self) -> None:
        """Put the cable back."""
        _ip("-n", self._bridge, "link", "set", self._port, "up")

    def off(self) -> None:
        """Cut its power."""
        if self._power:
            self._power.kill()
            self._power.wait(TIMEOUT_S)
        _ip("netns", "del", self._name)


@contextlib.contextmanager
def machines(
    count: int, own: list[Path], only_first: list[Path]
) -> Iterator[list[Machine]]:
    """Yield machines in one network; `own` folders are empty, `only_first` on all others.

    Raises:
        OSError: this user may not make namespaces.
    """
    bridge = f"workshop-{uuid.uuid4().hex[:6]}"
    _ip("netns", "add", bridge)
    started = []
    try:
        _ip("-n", bridge, "link", "add", "bridge", "type", "bridge")
        _ip("-n", bridge, "link", "set", "bridge", "up")
        for number in range(1, count + 1):
            hidden = [] if number == 1 else only_first
            started.append(Machine(bridge, number, [*own, *hidden]))
        yield started
    finally:
        for machine in started:
            machine.off()
        _ip("netns", "del", bridge)


def _ip(*arguments: str) -> None:
    """Call `ip` of iproute2.

    Raises:
        OSError: it refuses.
    """
    done = subprocess.run(
        ["ip", *arguments], capture_output=True, text=True, timeout=TIMEOUT_S
    )
    if done.returncode:
        raise OSError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
