"""A site with its own data: what it was told about them, and what it makes of a run's task."""

from dataclasses import dataclass
from pathlib import Path

from perennial.common.config import Task
from perennial.common.data.dialect import PLAIN, Dialect
from perennial.common.data.examples import ClientData
from perennial.common.data.scenarios.own_data import OwnData
from perennial.common.data.site_files import read
from perennial.common.utils.errors import UserError
from perennial.common.utils.suggestions import unknown


@dataclass(frozen=True)
class OwnSite:
    """Where a site's data are, what it calls itself, columns of its table that are not as announced, and how its
    table is written."""

    data: Path
    name: str
    label_column: str = ""
    environment_column: str = ""
    dialect: Dialect = PLAIN

    def number(self, task: Task) -> int:
        """Which of the run's clients the site is. Raises `UserError` if it is none."""
        sites = self._scenario(task).client_ids
        if self.name not in sites:
            raise UserError(unknown("site", self.name, sites))
        return sites.index(self.name)

    def load(self, task: Task) -> ClientData:
        """The data as the run wants them. Raises `UserError` where they are not what the server announces."""
        scenario = self._scenario(task)
        environment = self.environment_column or scenario.environment_column
        found = read(self.data, scenario.targets_in(self.label_column), environment, self.dialect)
        return scenario.divided(self.name, task.seed, found)

    def _scenario(self, task: Task) -> OwnData:
        if not isinstance(task.scenario, OwnData):
            raise UserError(
                f"site {self.name!r} has data of its own, but the run is on parts of {task.scenario.name!r}; "
                "it needs a run on 'own-data', or a partition-id in place of its data"
            )
        return task.scenario
