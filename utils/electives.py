"""Say what to type where the packages of an elective are missing."""

from importlib import metadata

INSTALL = "run `make electives` in the folder of the workshop, then restart the kernel"


def needs(*packages: str) -> None:
    """Raise ModuleNotFoundError, in one sentence, where packages are not installed."""
    if gone := missing(*packages):
        raise ModuleNotFoundError(f"This lesson needs {', '.join(gone)}: {INSTALL}.")


def missing(*packages: str) -> list[str]:
    """Return which of these packages, by the names that pip knows, are not installed."""
    # xgboost is pinned as xgboost-cpu on Linux: the same module without what GPUs need
    return [p for p in packages if not (_is_installed(p) or _is_installed(f"{p}-cpu"))]


def _is_installed(package: str) -> bool:
    try:
        metadata.version(package)
    except metadata.PackageNotFoundError:
        return False
    return True
