"""Plumbing shared by the notebooks and scripts of the workshop.

Whatever is the lesson (process groups, wraps, step loops, checkpoints) stands in the
notebooks and scripts themselves; here is only what is identical everywhere.
"""

from utils import processes

RAY_CAME_FIRST = processes.prepare()
