"""`make bench`: measure every row, and write results.json and RESULTS.md.

    python -m tests.tools.benchmarks [PART ...] [--quick]

Names of parts: measure these, and leave the rows of the others as they were. `--quick`
takes a few pairs of each, to see that everything runs, and writes nothing.
"""

import argparse
import importlib
import os
import platform
from dataclasses import asdict
from importlib import metadata
from pathlib import Path

from tests.tools.notebooks.execution import RECORDING_ENVIRONMENT

PARTS = ["formulas", "strategies", "ray_data", "ray_train", "allocator"]
FOLDER = Path(__file__).parent


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser("python -m tests.tools.benchmarks")
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--quick", action="store_true", help="write nothing")
    args = parser.parse_args(arguments)
    if unknown := [part for part in args.parts if part not in PARTS]:
        parser.error(f"there is no part {unknown[0]}: choose from {', '.join(PARTS)}")
    os.environ.update(RECORDING_ENVIRONMENT)  # before torch and Ray are imported
    from tests.tools.benchmarks import ratios, report

    ratios.fewer_pairs = 3 if args.quick else None
    results = report.read(FOLDER)
    machine = (
        f"{os.cpu_count()} cores ({platform.machine()}), Python "
        f"{platform.python_version()}, torch {metadata.version('torch').split('+')[0]}, "
        f"Ray {metadata.version('ray')}"
    )
    for part in args.parts or PARTS:
        rows = importlib.import_module(f"tests.tools.benchmarks.{part}").rows()
        for row in rows:
            print(f"{row.number:3d}  {row.value:>8s}  {row.verdict:12s} {row.what}")
        if not args.quick:  # after each part, so that a later one's error loses nothing
            results[part] = {"machine": machine, "rows": [asdict(row) for row in rows]}
            report.write(FOLDER, results)
            print(f"Written: {os.path.relpath(FOLDER / 'RESULTS.md')}")


if __name__ == "__main__":
    main()
