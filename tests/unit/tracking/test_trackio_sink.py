"""trackio keeps a run on this machine, apart from others of its name; read from its own store."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from unirl.core.errors import UnirlError
from unirl.tracking.trackio_sink import TrackioSink, trackio_name

LOG_AND_RESUME = """
import json, socket, sys
from pathlib import Path

def refuse(*args, **settings):
    raise AssertionError("the network was used")

socket.socket.connect = refuse
socket.getaddrinfo = refuse

import numpy as np
from PIL import Image
from unirl.tracking.tracker import Panel, Picture, Row
from unirl.tracking.trackio_sink import TrackioSink, trackio_name

folder = Path(sys.argv[1])
picture = folder / "cat.png"
Image.fromarray(np.zeros((4, 4, 3), dtype=np.uint8)).save(picture)

def log(name, rows, resumes):
    sink = TrackioSink("unirl-test", "run", folder / name, {"seed": 3}, resumes)
    for row in rows:
        sink.log(row)
    sink.show(Panel("eval/samples", 2, (Picture(picture, "a cat", 0.5), Picture(picture, "b"))))
    sink.close()

def window(rollout):
    return Row("rollout", rollout, 2 * rollout + 2, {"train/loss": float(rollout)})

log("one", [window(0), window(1)], False)
log("other", [window(7)], False)
log("one", [window(2)], True)

from trackio.sqlite_storage import SQLiteStorage
names = [trackio_name("run", folder / name) for name in ("one", "other")]
print("RESULT" + json.dumps({
    "runs": sorted(SQLiteStorage.get_runs("unirl-test")) == sorted(names),
    "logs": [SQLiteStorage.get_logs("unirl-test", name) for name in names],
}, default=str))
"""


def test_a_resumed_run_goes_on_and_one_of_the_same_name_elsewhere_stays_apart(
    tmp_path: Path,
) -> None:
    """In a process of its own: trackio settles on its folder when it is imported."""
    process = subprocess.run(
        [sys.executable, "-c", LOG_AND_RESUME, str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "TRACKIO_DIR": str(tmp_path / "trackio"), "HF_HUB_OFFLINE": "1"},
    )
    result = json.loads(process.stdout.rpartition("RESULT")[2])
    assert result["runs"], "two runs, neither more nor less"
    one, other = result["logs"]
    losses = [
        (log["step"], log["train/loss"], log["train/step"]) for log in one if "train/loss" in log
    ]
    assert losses == [(1, 0.0, 2.0), (2, 1.0, 4.0), (3, 2.0, 6.0)]
    pictures = [log["eval/samples/0000"] for log in one if "eval/samples/0000" in log]
    assert [picture["caption"] for picture in pictures] == ["0.500 a cat"] * 2
    assert [log["step"] for log in other if "train/loss" in log] == [8]
    assert any((tmp_path / "trackio").rglob("*.db"))


def test_the_name_has_a_mark_of_the_folder(tmp_path: Path) -> None:
    here, there = (trackio_name("run", tmp_path / name) for name in ("here", "there"))
    assert here != there
    assert here.startswith("run-")
    assert here == trackio_name("run", tmp_path / "there" / ".." / "here")


def test_a_missing_package_names_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "trackio", None)
    with pytest.raises(UnirlError, match=r"report_to_trackio=true(?s:.*)unirl\[trackio\]"):
        TrackioSink("unirl-test", "run", tmp_path, {}, resumes=False)
