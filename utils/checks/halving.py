"""Checks of the exercises on searches that stop trials early (an elective of part 02)."""

from utils.checks.exercise import Exercise, cases

EXERCISES = {
    # 02-ddp-pytorch-ray/electives/02_hyperparameter_search.ipynb
    "epochs best first": Exercise(
        lambda answer: answer == 16 + 15 * 1,
        (
            "How far does the first trial go, and after which epoch do the others end?",
            "One trial runs to its end. Each of the others reaches one rung.",
        ),
        {
            16 * 16: "That is the whole training, without ASHA.",
            16 + 4 * 3 + 12: "That is what it trains if every rung waits for all.",
            16 + 16: "There are only fifteen others.",
        },
    ),
    "epochs if all wait": Exercise(
        cases(
            ((12, 9, (1, 3), 3), 26),
            ((16, 16, (1, 4), 4), 40),
            ((2, 9, (1,), 3), 10),
        ),
        (
            "From one rung to the next, all trials that are left train the same epochs: "
            "how many trials, and how many epochs?",
            "The last stretch ends at max_epochs. At least one trial is left.",
        ),
    ),
}
