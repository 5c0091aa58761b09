"""Copy figures that lessons recorded to docs/pictures, for the READMEs of the parts.

`record` and `link` write them anew. The two pictures that no lesson shows are drawn by
`python -m tests.tools.pictures`.
"""

import base64

import nbformat

from tests.tools.notebooks import ROOT

PICTURES = ROOT / "docs" / "pictures"
# By name of the picture: the lesson, and the title that its cell gives to utils.plots.
COPIED = {
    "overlap": (
        "01-ddp-pytorch-only/02_ddp_with_torchrun.ipynb",
        "One backward pass with DDP, rank 0",
    ),
    "killed": (
        "02-ddp-pytorch-ray/04_fault_tolerance.ipynb",
        "A worker is killed, and training goes on",
    ),
    "streamed": (
        "02-ddp-pytorch-ray/03_ray_data_streaming.ipynb",
        "4D, streamed through the training",
    ),
    "gathered": (
        "03-fsdp-deepspeed/02_fsdp2.ipynb",
        "Forward pass through four blocks",
    ),
}


def recorded(notebook: str, title: str) -> bytes:
    """Return the PNG that the cell of a lesson which draws this figure has shown.

    Raises:
        LookupError: no cell of it has this title and a picture, or several have.
    """
    cells = nbformat.read(ROOT / notebook, as_version=4).cells
    found = [
        output.data["image/png"]
        for cell in cells
        if cell.cell_type == "code" and title in cell.source
        for output in cell.outputs
        if "image/png" in output.get("data", {})
    ]
    if len(found) != 1:
        raise LookupError(
            f"{notebook} has {len(found)} figures with the title {title!r}."
        )
    return base64.b64decode(found[0])


def copy_recorded() -> None:
    """Write the pictures that are outputs of lessons anew, if they have changed."""
    PICTURES.mkdir(exist_ok=True)
    for name, figure in COPIED.items():
        path, now = PICTURES / f"{name}.png", recorded(*figure)
        if not path.exists() or path.read_bytes() != now:
            path.write_bytes(now)
