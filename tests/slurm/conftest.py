"""Share one emulated cluster. After each test, jobs are cancelled and nodes restarted."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator

import pytest

from tests.slurm.cluster import NEEDS_ROOT, Cluster
from tests.slurm.jobs import Project
from tests.slurm.runs import FAULTS, Run


@pytest.fixture(scope="session")
def whole_cluster() -> Iterator[Cluster]:
    missing = [
        name for name in ("slurmctld", "slurmd", "sbatch", "munged") if not shutil.which(name)
    ]
    if missing:
        pytest.fail(
            f"no {', '.join(missing)} here: run tests/slurm/install.sh, or `make test-slurm`"
        )
    with Cluster(4) as started:
        yield started


@pytest.fixture
def cluster(whole_cluster: Cluster) -> Iterator[Cluster]:
    yield whole_cluster
    whole_cluster.cancel_all()
    whole_cluster.repair()


@pytest.fixture
def project(cluster: Cluster) -> Iterator[Project]:
    """The real scripts and a fake program. Its user is `nobody` where the tests run as root."""
    made = Project.make(cluster, user="nobody" if os.geteuid() == 0 else None)
    yield made
    shutil.rmtree(made.folder, ignore_errors=True)


@pytest.fixture(scope="session")
def checkout(whole_cluster: Cluster) -> Iterator[Project]:
    made = Project.of_this_checkout(whole_cluster)
    yield made
    shutil.rmtree(made.folder, ignore_errors=True)


@pytest.fixture
def training(checkout: Project, cluster: Cluster) -> Project:
    """This checkout, for real runs. The cluster is repaired after the test."""
    return checkout


@pytest.fixture(scope="session")
def undisturbed(checkout: Project) -> Run:
    """The run that others are compared with. It runs once per session."""
    run = Run.start(checkout, "undisturbed")
    run.wait_for_end()
    return run


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the table of faults for docs/results.md, and the skipped tests."""
    if FAULTS:
        terminalreporter.write_sep("-", "faults")
        for row in (("fault", "what was lost", "seconds until further than before"), *FAULTS):
            terminalreporter.write_line("| " + " | ".join(row) + " |")
    skipped = terminalreporter.stats.get("skipped", [])
    names = [report.nodeid for report in skipped if NEEDS_ROOT in str(report.longrepr)]
    if names:
        terminalreporter.write_sep("-", f"NOT TESTED: {NEEDS_ROOT}", red=True)
        terminalreporter.write_line("\n".join(names))
