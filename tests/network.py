"""An address at which nobody listens, whatever else runs on this machine."""

import socket

_held: list[socket.socket] = []


def nobody_listens() -> str:
    """Return a host:port that refuses connections as long as this process lives.

    It has the port, so that no one else gets it.
    """
    held = socket.socket()
    held.bind(("127.0.0.1", 0))
    _held.append(held)
    return f"127.0.0.1:{held.getsockname()[1]}"
