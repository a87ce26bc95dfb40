"""The report: every launched trajectory, broken and hostile runs, and the trace."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from tests.observe.test_timeline import event
from thundersyncrl.errors import ConfigError
from thundersyncrl.observe import report
from thundersyncrl.observe.event_file import EventWriter
from thundersyncrl.observe.events import Event
from thundersyncrl.observe.report import page_data, report_json, script_json, trajectory_rows, write_report
from thundersyncrl.observe.run_record import read_run
from thundersyncrl.observe.trace import trace
from thundersyncrl.runtime.json_lines import append_line, append_lines
from thundersyncrl.runtime.run_folder import RunFolder

HOSTILE = '</script><script>document.body.dataset.hacked="yes"</script> "quotes" \'single\' & <b>bold</b> \u2028 \udc80'


def id_of(step: int, member: int) -> str:
    return f"step={step}/group=0/member={member}"


def step_events(step: int, at_s: float) -> list[Event]:
    """A step of three seconds with two trajectories."""
    events = [event("controller", "step", at_s, at_s + 3, step=step)]
    for member in (0, 1):
        own: dict[str, Any] = {"trajectory": id_of(step, member), "step": step}
        events += [
            event("sandbox", "environment open", at_s, at_s + 0.2, **own),
            event("controller", "sample", at_s + 0.2, at_s + 1, **own),
            event("sandbox", "tool", at_s + 1, at_s + 1.5 + member / 4, **own),
            event("controller", "trajectory", at_s, at_s + 1.5 + member / 4, tokens=8, **own),
            event("sandbox", "verifier", at_s + 1.75, at_s + 2, detail=f"{member}.0", **own),
            event("learner", "pack", at_s + 1.8, at_s + 2.2, tokens=12, detail="content", **own),
        ]
    engine = [event("engine", "decode", at_s + 0.2, at_s + 1, tokens=16, step=step)]
    return [*events, *engine, event("learner", "optimizer", at_s + 2.2, at_s + 2.8, step=step)]


def transcript_row(step: int, member: int, *, task: str = "copy-1", reason: str = "") -> dict[str, Any]:
    return {
        "step": step,
        "group": 0,
        "member": member,
        "task": task,
        "kind": "copy",
        "reward": None if member else 1.0,
        "status": "failed" if member else "completed",
        "cause": "tool" if member else "",
        "reason": reason,
        "num_turns": 1,
        "num_action_tokens": 8,
        "metrics": {"wall_s": 1.5},
    }


def make_run(path: Path, *, num_steps: int = 2, task: str = "copy-1", reason: str = "") -> RunFolder:
    folder = RunFolder(path)
    path.mkdir(exist_ok=True)
    folder.config.write_text('run = "x"\n')
    log = EventWriter(folder.events)
    for step in range(num_steps):
        log.extend(step_events(step, 4.0 * step))
        log.flush(step)
        append_lines(folder.transcripts, [transcript_row(step, m, task=task, reason=reason) for m in (0, 1)])
        append_line(folder.metrics, {"event": "step", "step": step, "reward_mean": 0.5, "step_s": 3.0})
    append_line(folder.metrics, {"event": "evaluation", "name": "after", "step": num_steps, "pass_rate": 0.5})
    return folder


def embedded(page: str) -> Any:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def test_the_page_holds_every_step_and_every_launched_trajectory(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    run = read_run(folder)
    write_report(folder, run)
    data = embedded(folder.report.read_text())
    assert [s["name"] for s in data["stretches"]] == ["step 0", "step 1"]
    assert [row["id"] for row in data["trajectories"]] == [id_of(s, m) for s in (0, 1) for m in (0, 1)]
    assert [row["outcome"] for row in data["trajectories"][:2]] == ["completed", "failed (tool)"]
    labels = [lane["label"] for lane in data["stretches"][1]["lanes"]]
    assert labels == ["engine", "learner", "sandbox", id_of(1, 0), id_of(1, 1)]
    assert data["notes"] == []


def test_the_figures_for_machines_add_up(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    found = json.loads(json.dumps(report_json(folder, read_run(folder)), allow_nan=False))
    assert (found["num_trajectories"], found["steps"]["num"]) == (4, 2)
    assert found["steps"]["seconds"] == pytest.approx(6.0)
    for stretch in found["stretches"]:
        for actor in stretch["actors"].values():
            assert actor["busy_s"] + sum(actor["idle_s"].values()) == pytest.approx(stretch["seconds"], rel=1e-3)


def test_a_trajectory_that_never_ended_is_in_the_table(tmp_path: Path) -> None:
    """A run that broke off in step 2: its events are there, its mark and its transcripts aren't."""
    folder = make_run(tmp_path / "run")
    log = EventWriter(folder.events)
    log.extend(e for e in step_events(2, 8.0) if e.what != "step")
    log.flush(2)
    run = read_run(folder)
    assert run.stretches[-1].window.name == "step 2, unfinished"
    assert [row["outcome"] for row in trajectory_rows(run)[-2:]] == ["unfinished", "unfinished"]


@pytest.mark.parametrize("lost", ["events", "metrics", "transcripts"])
def test_a_missing_file_is_told_and_the_rest_is_shown(tmp_path: Path, lost: str) -> None:
    folder = make_run(tmp_path / "run")
    getattr(folder, lost).unlink()
    run = read_run(folder)
    write_report(folder, run)
    assert any(f"{lost}.jsonl is missing" in note for note in embedded(folder.report.read_text())["notes"])
    assert json.loads(folder.trace.read_text())["traceEvents"]


def test_a_run_that_may_be_stale_is_labelled(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    folder.config.write_text("steps = 3\n[rollout]\nmax_staleness = 2\n")
    assert "up to 2 steps older" in page_data(folder, read_run(folder))["notes"][0]
    assert "up to 2 steps older" in report_json(folder, read_run(folder))["notes"][0]
    folder.config.write_text("steps = = 3")
    assert page_data(folder, read_run(folder))["notes"] == ["config.toml is broken."]


def test_half_written_lines_are_left_out_and_told(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    for path in (folder.events, folder.metrics, folder.transcripts):
        with path.open("ab") as file:
            file.write(b'{"step": 9, "wh\xff')
    run = read_run(folder)
    assert len(run.problems) == 3
    assert len(run.stretches) == 2


def test_numbers_that_nothing_can_hold_are_left_out(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    event = {"actor": "learner", "what": "pack", "start_s": 1.0, "end_s": 2.0, "step": 0}
    rows: list[tuple[Path, str]] = [
        (folder.events, json.dumps({**event, "tokens": math.inf})),
        (folder.events, json.dumps({**event, "start_s": 10**400})),
        (folder.events, json.dumps({**event, "trajectory": "step=0/group=" + "9" * 5000})),
        (folder.metrics, "[" * 200_000),
        (folder.transcripts, json.dumps({"step": 0, "group": 0, "member": 99, "reward": 10**400})),
    ]
    for path, row in rows:
        with path.open("a") as file:
            file.write(row + "\n")
    run = read_run(folder)
    write_report(folder, run)
    assert report_json(folder, run)
    assert len(run.problems) == 2


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected a run folder"):
        read_run(RunFolder(tmp_path))


def test_hostile_text_stays_text(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", task=HOSTILE, reason=HOSTILE)
    write_report(folder, read_run(folder))
    page = folder.report.read_text()
    assert "dataset.hacked" not in re.sub(r'<script type="application/json".*?</script>', "", page, flags=re.DOTALL)
    assert page.count("</script>") == 2
    assert embedded(page)["trajectories"][0]["task"] == HOSTILE.replace("\udc80", "?")
    assert not {"<", ">", "&"} & set(script_json({"a": HOSTILE}))


def test_a_hostile_name_of_a_run_is_escaped(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "<b>'run'")
    write_report(folder, read_run(folder))
    assert "<h1>&lt;b&gt;&#39;run&#39;</h1>" in folder.report.read_text()


def test_a_huge_run_is_cut_to_its_newest_part_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_run(tmp_path / "run", num_steps=6)
    monkeypatch.setattr(report, "MAX_TIMELINES", 2)
    monkeypatch.setattr(report, "MAX_ROWS", 5)
    monkeypatch.setattr(report, "MAX_LANE_EVENTS", 3)
    monkeypatch.setattr(report, "MAX_TRACE_EVENTS", 7)
    run = read_run(folder)
    data = page_data(folder, run)
    assert ["lanes" in s for s in data["stretches"]] == [False] * 4 + [True] * 2
    assert all("engine" in s["actors"] for s in data["stretches"]), "idle bars are there for every step"
    assert [row["step"] for row in data["trajectories"]] == [3, 4, 4, 5, 5]
    said = " ".join(data["notes"])
    assert "newest 2 of 6 stretches" in said
    assert "newest 5 of 12 trajectories" in said
    assert "first 3 events" in said
    assert "newest 7 events" in said


def test_the_trace_has_the_form_that_perfetto_reads(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    write_report(folder, read_run(folder))
    found = json.loads(folder.trace.read_text())
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in found["traceEvents"] if e["ph"] == "M"}
    assert set(names.values()) >= {"engine", "learner", "controller", "trajectories", id_of(0, 0), id_of(1, 1)}
    tracks: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for e in found["traceEvents"]:
        assert e["ph"] in ("M", "X")
        if e["ph"] == "X":
            assert e["dur"] >= 0
            assert isinstance(e["name"], str)
            assert (e["pid"], e["tid"]) in names
            tracks.setdefault((e["pid"], e["tid"]), []).append((e["ts"], e["ts"] + e["dur"]))
    for spans in tracks.values():
        nest(spans)


def nest(spans: list[tuple[float, float]]) -> None:
    """On one track events nest or follow each other; otherwise a viewer draws nonsense."""
    open_until: list[float] = []
    for start, end in sorted(spans, key=lambda s: (s[0], -s[1])):
        while open_until and open_until[-1] <= start + 0.11:
            open_until.pop()
        assert not open_until or end <= open_until[-1] + 0.11
        open_until.append(end)


def test_a_pack_of_several_trajectories_is_one_event_of_the_trace() -> None:
    packs = [event("learner", "pack", 0, 1, id_of(0, m), tokens=5) for m in (0, 1, 2)]
    (row,) = [e for e in trace(packs)["traceEvents"] if e["ph"] == "X"]
    assert row["args"]["tokens"] == 15
    assert len(row["args"]["trajectories"]) == 3
