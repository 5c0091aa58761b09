"""Take a seat of a JupyterHub, as a browser does, and run code in it.

    python -m tests.tools.hub http://127.0.0.1:8000 PASSWORD seat-01 seat-02
    python -m tests.tools.hub --start http://127.0.0.1:8000 PASSWORD seat-{01..30}

Each name logs in, starts its server, trains in a Ray of its own and looks whether it can
reach what it must not. Ends with 1 at the first thing that is not as it should be. With
`--start` it only starts the servers, and leaves them running.
"""

import json
import re
import sys
import time
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import requests
import websocket

LONG = 1200  # seconds, for a node that pulls the image first


class Seat:
    """A person who has logged in, with a server that is running."""

    def __init__(self, hub: str, name: str, password: str) -> None:
        """Log in, and start the server.

        Raises:
            PermissionError: the hub does not know this name with this password.
            TimeoutError: the server does not start.
        """
        self.hub, self.name = hub, name
        browser = requests.Session()
        page = browser.get(f"{hub}/hub/login", timeout=60).text
        form = {"username": name, "password": password, "_xsrf": xsrf(page)}
        login = f"{hub}/hub/login?next=%2Fhub%2Ftoken"
        answer = browser.post(login, data=form, timeout=60)
        if answer.status_code == 403 or answer.url.split("?")[0].endswith("/login"):
            raise PermissionError(f"{name} may not log in: {answer.status_code}")
        answer = browser.post(
            f"{hub}/hub/api/users/{name}/tokens",
            headers={"X-XSRFToken": xsrf(answer.text), "Referer": f"{hub}/hub/token"},
            json={"note": "tests.tools.hub"},
            timeout=60,
        )
        answer.raise_for_status()
        self.headers = {"Authorization": f"token {answer.json()['token']}"}
        self.ask("POST", f"/hub/api/users/{name}/server")
        end = time.monotonic() + LONG
        while not self.ask("GET", f"/hub/api/users/{name}")["server"]:
            if time.monotonic() > end:
                raise TimeoutError(f"the server of {name} does not start")
            time.sleep(2)

    def ask(self, method: str, path: str) -> dict:
        """Send a request to the hub or the seat; return what it answers."""
        answer = requests.request(
            method, self.hub + path, headers=self.headers, timeout=60
        )
        answer.raise_for_status()
        return answer.json() if answer.text else {}

    def run(self, code: str, keep: bool = False) -> str:
        """Run Python code in a kernel of the seat; return what it prints.

        Args:
            keep: leave the kernel there, as somebody does who closes the browser.

        Raises:
            RuntimeError: the code raises.
        """
        kernels = f"/user/{self.name}/api/kernels"
        kernel = self.ask("POST", kernels)["id"]
        address = f"{self.hub}{kernels}/{kernel}/channels".replace("http", "ws", 1)
        request = {"msg_id": uuid.uuid4().hex, "session": uuid.uuid4().hex}
        request |= {"msg_type": "execute_request", "username": "", "version": "5.3"}
        message = {"header": request, "content": {"code": code}, "channel": "shell"}
        message |= {"parent_header": {}, "metadata": {}}
        printed = ""
        channel = websocket.create_connection(
            address, header=self.headers, timeout=LONG
        )
        try:
            channel.send(json.dumps(message))
            while True:  # what the kernel publishes is in order: "idle" comes last
                answer = json.loads(channel.recv())
                content = answer["content"]
                if answer["parent_header"].get("msg_id") != request["msg_id"]:
                    continue
                if content.get("name") == "stdout":  # no warning of a library
                    printed += content["text"]
                if answer["msg_type"] == "error":
                    raise RuntimeError("\n".join(content["traceback"]))
                if content.get("execution_state") == "idle":
                    return printed
        finally:
            channel.close()
            if not keep:
                self.ask("DELETE", f"{kernels}/{kernel}")

    def stop(self) -> None:
        """End the server: its home stays."""
        self.ask("DELETE", f"/hub/api/users/{self.name}/server")


def xsrf(page: str) -> str:
    """Return the number that a form of the hub has to send back."""
    found = re.search(r'name="_xsrf" value="([^"]+)"', page)
    found = found or re.search(r'xsrf_token: "([^"]+)"', page)
    if not found:
        raise LookupError("the hub's page has no _xsrf: is this a JupyterHub?")
    return found[1]


# What a lesson needs: a copy of the lessons, and a Ray of one's own with two workers.
LESSON = """
import glob, os, subprocess, sys
(lessons,) = glob.glob(os.path.expanduser("~/workshop-*/02-ddp-pytorch-ray"))
script = ["train_ray_ddp.py", "--num-workers", "2", "--epochs", "1", "--smoke-test"]
done = subprocess.run(
    [sys.executable, *script], cwd=lessons, capture_output=True, text=True
)
print(done.stdout, done.stderr)
assert done.returncode == 0 and "Trained." in done.stdout
"""
# The shared Ray's dashboard may be reached, and nothing else that is private.
REACHES = """
import socket
def reaches(host, port):
    try:
        socket.create_connection((host, port), 5).close()
        return True
    except OSError:
        return False
print([reaches("workshop-head-svc.workshop", port) for port in (8265, 6379)],
      reaches("169.254.169.254", 80), reaches("kubernetes.default", 443))
"""
# A job may be submitted from here, with the token that the hub has put into the seat.
JOBS = """
import os, subprocess
os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": "/mnt/ray/auth_token"}
address = "http://workshop-head-svc.workshop:8265"
subprocess.run(["ray", "job", "list", "--address", address], check=True)
"""


def start(hub: str, password: str, names: Sequence[str]) -> list[Seat]:
    """Start the servers of all names at once; they run when this returns."""
    with ThreadPoolExecutor(len(names)) as threads:
        seats = list(threads.map(lambda name: Seat(hub, name, password), names))
    print(f"{len(seats)} servers run")
    return seats


def main(hub: str, password: str, *names: str) -> None:
    for name, wrong in [(names[0], password + "x"), ("nobody", password)]:
        try:
            Seat(hub, name, wrong)
        except PermissionError as refused:
            print(refused)
        else:
            sys.exit(f"{name} could log in with {wrong}")
    seats = start(hub, password, names)
    with ThreadPoolExecutor(len(names)) as threads:
        outputs = list(threads.map(lambda seat: seat.run(LESSON), seats))
    for seat, output in zip(seats, outputs):
        print(seat.name, output.strip().splitlines()[-1])
        found = seat.run(REACHES).strip()
        if found != "[True, False] False False":
            sys.exit(f"{seat.name} reaches {found}")
        seat.run(JOBS)
        seat.stop()
    print("each trained, reached the dashboard of the shared Ray, and nothing else")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--start"]:
        start(sys.argv[2], sys.argv[3], sys.argv[4:])
    else:
        main(*sys.argv[1:])
