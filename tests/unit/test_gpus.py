"""GPU checks with a fake nvidia-smi: healthy GPUs pass, and each fault is reported."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from dapo_megatron.doctor.check_result import Check, Status, worst
from dapo_megatron.doctor.gpus import GpuError, check_gpus, read_gpus
from tests.helpers.nvidia_smi import SOUND, install

PATH = "PATH"


def run_checks(
    monkeypatch: pytest.MonkeyPatch, folder: Path, num_tasks: int = 2, *, is_used: bool = True
) -> list[Check]:
    monkeypatch.setenv(PATH, str(folder))
    return list(check_gpus(read_gpus(60.0), num_tasks, is_used=is_used))


def problems(checks: list[Check]) -> list[Check]:
    return [check for check in checks if check.status is not Status.OK]


def test_healthy_gpus_pass(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    checks = run_checks(monkeypatch, install(tmp_path, [{}, {}]))
    assert not problems(checks)
    assert checks[0].finding == "2 x NVIDIA H100 80GB HBM3, driver 580.65.06"
    [gpu, _] = read_gpus(60.0)
    assert (gpu.memory_total_mib, gpu.sm_mhz, gpu.max_sm_mhz, gpu.reasons) == (81559, 345, 1980, 1)


FAULTS = {
    "ecc": ({"ecc.errors.uncorrected.volatile.total": "3"}, "fail", "3 uncorrected ECC errors"),
    "remap": ({"remapped_rows.pending": "Yes"}, "fail", "waits for a reset"),
    "spare rows": ({"remapped_rows.failure": "Yes"}, "fail", "no spare rows"),
    "hot": ({"clocks_event_reasons.active": "0x0000000000000048"}, "fail", "too hot"),
    "warm": ({"clocks_event_reasons.active": "0x0000000000000020"}, "warn", "by the driver"),
    "power": ({"clocks_event_reasons.active": "0x0000000000000080"}, "fail", "power supply"),
    "held": ({"clocks.applications.graphics": "1200"}, "warn", "limited to 1200 of 1980 MHz"),
    "slow": ({"clocks_event_reasons.active": "0x0"}, "warn", "SM clock at 345 of 1980 MHz"),
    "full": ({"memory.used": "5000"}, "fail", "5000 MiB in use by a process that nvidia-smi"),
}


@pytest.mark.parametrize(("change", "status", "text"), FAULTS.values(), ids=FAULTS)
def test_each_fault_is_reported_with_its_gpu(
    change: dict[str, str], status: str, text: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    checks = problems(run_checks(monkeypatch, install(tmp_path, [{}, change])))
    assert worst(checks) == status
    assert {check.name for check in checks} == {"GPU 1"}
    assert any(text in check.finding for check in checks)
    assert all(check.remedy for check in checks)


def test_a_foreign_process_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    process = {"gpu_uuid": "GPU-1", "pid": "4711", "process_name": "python", "used_memory": "30000"}
    folder = install(tmp_path, [{}, {"memory.used": "30010"}], processes=(process,))
    [check] = problems(run_checks(monkeypatch, folder))
    assert (check.name, check.status) == ("GPU 1", Status.FAIL)
    assert check.finding == "in use by pid 4711 python (30000 MiB)"


@pytest.mark.parametrize(("is_used", "status"), [(True, "fail"), (False, "warn")])
def test_too_few_gpus_are_reported(
    is_used: bool, status: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    [check] = problems(run_checks(monkeypatch, install(tmp_path, [{}]), is_used=is_used))
    assert (check.name, check.status) == ("GPUs", status)
    assert "1 x " in check.finding and "2 tasks" in check.finding


def test_a_machine_without_gpus_passes_if_none_is_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert not problems(run_checks(monkeypatch, tmp_path, is_used=False))
    assert worst(run_checks(monkeypatch, tmp_path)) is Status.FAIL


def test_a_hanging_nvidia_smi_is_killed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(PATH, str(install(tmp_path, [{}], sleeps_seconds=600.0)))
    start = time.monotonic()
    with pytest.raises(GpuError, match=r"no answer in 0\.5 s"):
        read_gpus(0.5)
    assert time.monotonic() - start < 60.0  # without a limit it would take 600 s


OPTIONAL = [name for name in SOUND if name not in ("name", "driver_version")]


@pytest.mark.parametrize("field", OPTIONAL)
def test_a_field_unknown_to_the_driver_is_left_out(
    field: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    checks = run_checks(monkeypatch, install(tmp_path, [{}, {}], refuses=(field,)))
    assert not problems(checks)


def test_the_older_name_of_the_throttle_reasons_is_also_queried(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    old = {"clocks_throttle_reasons.active": "0x0000000000000008"}
    folder = install(tmp_path, [old, old], refuses=("clocks_event_reasons.active",))
    failed = [check for check in run_checks(monkeypatch, folder) if check.status is Status.FAIL]
    assert [check.name for check in failed] == ["GPU 0", "GPU 1"]


def test_unsupported_values_are_ignored(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    not_supported = dict.fromkeys(OPTIONAL, "[N/A]")
    assert not problems(run_checks(monkeypatch, install(tmp_path, [not_supported, not_supported])))
