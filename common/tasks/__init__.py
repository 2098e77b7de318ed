"""What a model is to predict: the targets, the loss, what a prediction is, and the measures of how good it is."""

from perennial.common.tasks.base import (
    EVERY_TASK,
    AnswerTensor,
    Column,
    Measure,
    Prediction,
    PredictionTask,
    TaskName,
    checked_sums,
    sums_of,
    values_of,
)
from perennial.common.tasks.classes import Classes
from perennial.common.tasks.event import Event
from perennial.common.tasks.labels import Labels
from perennial.common.tasks.numbers import Numbers
from perennial.common.tasks.own_metric import METRIC, Metric

HEADLINES: dict[str, Measure] = {
    **{task.headline.name: task.headline for task in (Classes, Numbers, Labels, Event)},
    METRIC.name: METRIC,
}
"""The headline measures, by what they are called in files."""

__all__ = [
    "EVERY_TASK",
    "HEADLINES",
    "AnswerTensor",
    "Classes",
    "Column",
    "Event",
    "Labels",
    "Measure",
    "Metric",
    "Numbers",
    "Prediction",
    "PredictionTask",
    "TaskName",
    "checked_sums",
    "sums_of",
    "values_of",
]
