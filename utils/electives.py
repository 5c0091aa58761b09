"""The packages of the electives: what is missing, and what to type then."""

import re
import sys
from importlib import metadata
from pathlib import Path

REQUIREMENTS = (
    Path(__file__)
    .parents[1]
    .joinpath("02-ddp-pytorch-ray", "electives", "requirements.txt")
)
# The same module under another name: on Linux what is pinned lacks what GPUs need.
OTHER_NAMES = {"xgboost": "xgboost-cpu"}
INSTALL = "run `make electives` in the folder of the workshop, then restart the kernel"


def needs(*packages: str) -> None:
    """Say in one sentence what to type, where packages of the electives are missing.

    Raises:
        ModuleNotFoundError: a package of this name is not installed.
    """
    if gone := missing(*packages):
        raise ModuleNotFoundError(f"This lesson needs {', '.join(gone)}: {INSTALL}.")


def missing(*packages: str) -> list[str]:
    """Return which of these packages are not installed, by the names that pip knows.

    `xgboost` is there also where it is installed as `xgboost-cpu`.
    """
    names = {name: (name, OTHER_NAMES.get(name, name)) for name in packages}
    return [name for name, known in names.items() if not any(map(_version, known))]


def wrong_versions() -> list[str]:
    """Return the packages that are installed in another version than pinned."""
    there = {name: (_version(name), wanted) for name, wanted in pins().items()}
    return [
        f"{name} is {version}, not {wanted}"
        for name, (version, wanted) in there.items()
        if version not in (None, wanted)
    ]


def pins() -> dict[str, str]:
    """Read the pins of the electives for this platform: versions by name."""
    pin = r"^([\w.-]+)==([\w.]+)(?: ; sys_platform (..) 'linux')?"
    found = re.findall(pin, REQUIREMENTS.read_text(), re.MULTILINE)
    here = "==" if sys.platform == "linux" else "!="
    return {name: version for name, version, only in found if only in ("", here)}


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
