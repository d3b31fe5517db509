"""Shares of time between two looks."""

from __future__ import annotations

import pytest

from deploy.shares import Shares


def test_shares_over_all_parts_since_the_last_look():
    shares = Shares()
    assert shares.since({"actor-0": {"acting": 3.0, "replay": 1.0}}) == {"acting": 0.75, "replay": 0.25}
    found = shares.since({"actor-0": {"acting": 4.0, "replay": 1.0}, "actor-1": {"acting": 0.0, "replay": 3.0}})
    assert found == {"acting": 0.25, "replay": 0.75}


def test_a_part_that_began_anew_counts_from_there():
    shares = Shares()
    shares.since({"learner": {"rows": 100.0, "compute": 300.0}})
    assert shares.since({"learner": {"rows": 3.0, "compute": 1.0}}) == {"rows": 0.75, "compute": 0.25}


@pytest.mark.parametrize("spent", [{}, {"actor-0": {"acting": 2.0}}])
def test_no_time_no_shares(spent):
    shares = Shares()
    shares.since(spent)
    assert shares.since(spent) == {}
