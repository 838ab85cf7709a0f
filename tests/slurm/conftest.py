"""One emulated cluster for all tests; between them nodes are mended and jobs ended."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator

import pytest

from tests.slurm.cluster import Cluster
from tests.slurm.jobs import Project


@pytest.fixture(scope="session")
def whole_cluster() -> Iterator[Cluster]:
    missing = [
        name for name in ("slurmctld", "slurmd", "sbatch", "munged") if not shutil.which(name)
    ]
    if missing:
        pytest.fail(
            f"no {', '.join(missing)} here: run tests/slurm/install.sh, or `make test-slurm`"
        )
    with Cluster(4) as up:
        yield up


@pytest.fixture
def cluster(whole_cluster: Cluster) -> Iterator[Cluster]:
    yield whole_cluster
    whole_cluster.cancel_all()
    whole_cluster.repair()


@pytest.fixture
def project(cluster: Cluster) -> Iterator[Project]:
    """The real scripts and a fake program, of an ordinary user where the tests are root's."""
    made = Project.make(cluster, user="nobody" if os.geteuid() == 0 else None)
    yield made
    shutil.rmtree(made.folder, ignore_errors=True)
