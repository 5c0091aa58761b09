"""Where nobody is reached: an address at which no one listens, and no network at all."""

import socket

# Before a command, on Linux as root: it has a loopback of its own, and nothing else.
LOOPBACK_ONLY = ["unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
_held: list[socket.socket] = []


def nobody_listens() -> str:
    """Return a host:port that refuses connections as long as this process lives.

    It has the port, so that no one else gets it.
    """
    held = socket.socket()
    held.bind(("127.0.0.1", 0))
    _held.append(held)
    return f"127.0.0.1:{held.getsockname()[1]}"
