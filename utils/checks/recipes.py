"""Checks of the exercises of 02-ddp-pytorch-ray/electives/01_old_recipes.ipynb."""

from utils.checks.exercise import Exercise, cases

EXERCISES = {
    "epochs that save": Exercise(
        cases(
            ((7, 3, True), [3, 6, 7]),
            ((7, 3, False), [3, 6]),
            ((6, 3, True), [3, 6]),
            ((4, 0, True), [4]),
            ((4, 0, False), []),
            ((3, 1, True), [1, 2, 3]),
        ),
        (
            "Go through the epochs: when is one due, and when is it the last?",
            "`epoch % 0` raises: ask for the frequency first.",
        ),
    ),
    "images of all ranks": Exercise(
        lambda answer: answer == 4000,
        (
            "What do the two functions return on each of the workers?",
            "How many images does a rank take that believes it is alone?",
        ),
        {
            1000: "So it would be if the ranks shared the images.",
            250: "That is a fair share: of whom does each rank know?",
        },
    ),
}
