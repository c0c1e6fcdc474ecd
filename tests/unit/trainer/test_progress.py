"""What a run has cost is counted over all windows, and over resumes."""

from __future__ import annotations

from collections.abc import Iterator

from unirl.trainer.progress import Progress
from unirl.trainer.window_metrics import trained_forwards


def clock(*times: float) -> Iterator[float]:
    return iter(times)


def test_windows_add_up_and_seconds_count_every_device() -> None:
    progress = Progress(4, clock(100.0, 110.0).__next__)
    progress.add_window(16, 200)
    progress.add_window(16, 150)
    assert progress.metrics() == {
        "progress/wall_seconds": 10.0,
        "progress/device_seconds": 40.0,
        "progress/images": 32.0,
        "progress/denoiser_evaluations": 350.0,
    }


def test_a_resume_goes_on_where_the_checkpoint_stood_on_its_own_devices() -> None:
    first = Progress(4, clock(0.0, 10.0).__next__)
    first.add_window(8, 50)
    saved = first.state()
    first.add_window(8, 50)  # taken back: the run is killed before another save

    # Made at 5000 s, restored at 5020, asked at 5023: the time between is nobody's.
    second = Progress(2, clock(5000.0, 5020.0, 5023.0).__next__)
    second.resume(saved)
    second.add_window(8, 60)
    assert second.state() == {
        "wall_seconds": 13.0,
        "device_seconds": 46.0,
        "images": 16.0,
        "denoiser_evaluations": 110.0,
    }


def test_the_doctor_is_no_part_of_what_learning_needs() -> None:
    assert trained_forwards({"perf/total_denoiser_forwards": 90.0}) == 90
    costs = {"perf/total_denoiser_forwards": 90.0, "perf/doctor_denoiser_forwards": 40.0}
    assert trained_forwards(costs) == 50
    assert trained_forwards({}) == 0
