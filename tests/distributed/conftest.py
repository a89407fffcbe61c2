"""Two teams of ranks for all tests of this folder."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # where the ranks find `team` and `tasks`

from team import Team


@pytest.fixture(scope="session")
def two():
    team = Team(2)
    yield team
    team.close()


@pytest.fixture(scope="session")
def four():
    team = Team(4)
    yield team
    team.close()


@pytest.fixture(params=[2, 4], ids=["two ranks", "four ranks"])
def team(request):
    """Each of the teams."""
    return request.getfixturevalue({2: "two", 4: "four"}[request.param])
