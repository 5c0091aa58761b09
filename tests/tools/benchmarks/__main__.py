"""`make bench`: measure every row, and write RESULTS.md, results.json and ratios.png.

    python -m tests.tools.benchmarks [PART ...]

names the parts to measure; the rows of the others stay as they were.
"""

import importlib
import os
import platform
import sys
import time
from importlib import metadata
from pathlib import Path

from tests.tools.notebooks.execution import RECORDING_ENVIRONMENT

PARTS = ["exact", "steps", "predicting", "streaming", "start", "allocator"]
PARTS += ["executing", "commands"]
FOLDER = Path(__file__).parent


def main(parts: list[str]) -> int:
    unknown = [part for part in parts if part not in PARTS]
    if unknown:
        print(f"There is no part {unknown[0]}: choose from {', '.join(PARTS)}.")
        return 1
    os.environ.update(RECORDING_ENVIRONMENT)  # before torch and Ray are imported
    from tests.tools.benchmarks import report

    results = report.read(FOLDER)
    before = {(r["number"], r["what"]): r["value"] for r in report.all_rows(results)}
    machine = {
        "cores": os.cpu_count(),
        "processor": platform.machine(),
        "python": platform.python_version(),
        "torch": metadata.version("torch").partition("+")[0],
        "ray": metadata.version("ray"),
    }
    for part in parts or PARTS:
        start = time.perf_counter()
        rows = importlib.import_module(f"tests.tools.benchmarks.{part}").rows()
        seconds = time.perf_counter() - start
        results["parts"][part] = {
            "machine": machine,
            "seconds": seconds,
            "rows": [
                vars(row) | {"before": before.get((row.number, row.what), "")}
                for row in rows
            ],
        }
        report.write(FOLDER, results)  # after each part, so that nothing is lost
        for row in rows:
            print(f"{row.number:3d}  {row.value:>8s}  {row.verdict:12s} {row.what}")
    print(f"Written: {os.path.relpath(FOLDER / 'RESULTS.md')}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
