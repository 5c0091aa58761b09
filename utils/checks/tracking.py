"""Checks of the exercises about experiment trackers, an elective of part 02."""

from utils.checks.exercise import Exercise, cases

# (step, time, value): a first attempt has logged steps 0 and 1, a second one 1 and 2.
KILLED = [(0, 1.0, 3.0), (1, 2.0, 2.25), (1, 5.0, 2.5), (2, 6.0, 2.0)]

EXERCISES = {
    # 02-ddp-pytorch-ray/electives/03_experiment_tracking.ipynb
    "steps logged twice": Exercise(
        lambda answer: answer == 173 - 150,
        (
            "After which step was the last checkpoint saved? Steps are counted from 0.",
            "Count from the first step of the second attempt to the last of the first.",
        ),
        {
            22: "Are the first and the last of them both counted?",
            27: "Those are the steps from the kill to the next checkpoint.",
            150: "Those are the steps that the checkpoint has: they are logged once.",
            173: "Those are all steps of the first attempt: where does the second begin?",
        },
    ),
    "one curve": Exercise(
        cases(
            ((KILLED,), [3.0, 2.5, 2.0]),
            ((KILLED[::-1],), [3.0, 2.5, 2.0]),  # in any order
            (([*KILLED, (1, 9.0, 1.75)],), [3.0, 1.75, 2.0]),  # killed twice
            (([(7, 1.0, 0.5), (4, 0.5, 0.75)],), [0.75, 0.5]),  # steps are missing
        ),
        (
            "Which points of a step count? Sort by what tells attempts apart.",
            "A dictionary keeps the last value that it gets for a key.",
        ),
    ),
}
